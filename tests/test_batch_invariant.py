"""``batch_invariant``: torch's operations, models of transformers, and what it leaves behind."""

import contextlib
import os
import threading

import pytest
import torch
import torch.nn.functional as F
from accuracy import check
from bitwise import assert_equal

import rlkernel
from rlkernel import batch_invariant_ops
from rlkernel.consistency import assert_invariant, aten
from rlkernel.consistency.invariance import SIZES
from rlkernel.runtime import invariance

FEW = SIZES[:9]  # for what is slow
g = torch.Generator().manual_seed(0)
WEIGHT, BIAS = torch.randn(77, 300, generator=g), torch.randn(77, generator=g)
ROWS = torch.randn(260, 300, generator=g) * torch.randint(1, 40, (260, 300), generator=g)
GAIN, ROUTER, EXPERTS = (torch.randn(n, generator=g) for n in ((300,), (6, 300), (6, 20, 300)))
GAIN = 1 + GAIN / 10


@pytest.fixture(autouse=True)
def _own_numbers():
    """A test's numbers are the same whichever tests ran before it."""
    g.manual_seed(1)


def rms_norm(x):
    """As models write it."""
    wide = x.float()
    return GAIN.to(x.dtype) * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotary(x):
    """Three tokens a row, turned by their positions."""
    frequencies = 1 / 10000 ** (torch.arange(0, 100, 2).float() / 100)
    angles = (frequencies[None, :, None] @ torch.arange(5.0, 8.0)[None, None]).mT.repeat(1, 1, 2)
    x = x.view(len(x), 3, 100)
    turned = torch.cat([-x[..., 50:], x[..., :50]], -1)
    return (x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)).flatten(1)


def routed(x):
    """The experts of each row, two of six; ties among them."""
    weights, chosen = F.linear(x, ROUTER.to(x.dtype)).div(40).round().softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), chosen


def grouped(a, b, offs):
    """torch's for what it takes; the same one by one for truth and for comparison."""
    if rlkernel.batch_invariant.is_enabled():
        return F.grouped_mm(a, b, offs=offs)
    ends = offs.tolist()
    spans = list(enumerate(zip([0, *ends], ends, strict=False)))
    if a.dim() == 2:
        return torch.cat([a[first:end] @ b[g] for g, (first, end) in spans])
    return torch.cat([a[g] @ b[:, first:end] for g, (first, end) in spans], 1)


def experts(combine):
    """Rows sorted by expert, a product for each group, and their sum by one of the ways that there are."""

    def run(x):
        weights, chosen = routed(x)
        order = chosen.flatten().argsort(stable=True)
        row = order // 2
        offs = torch.bincount(chosen.flatten(), minlength=6).cumsum(0).int()
        out = grouped(x[row], EXPERTS.to(x.dtype).mT, offs) * weights.flatten()[order, None]
        if combine == "sum":
            return out[order.argsort()].view(len(x), 2, 20).sum(1)
        if combine == "index_add":
            return torch.zeros(len(x), 20, dtype=x.dtype).index_add(0, row, out)
        return torch.zeros(len(x), 20, dtype=x.dtype).scatter_add(0, row[:, None].expand(-1, 20), out)

    return run


def grouped_apart(x):
    """[G, M, K] with columns in groups; each row of M alone."""
    a = x.view(len(x), 3, 100).transpose(0, 1).contiguous()
    offs = torch.tensor([20, 20, 77], dtype=torch.int32)
    return grouped(a, WEIGHT[:, :100].t().to(x.dtype), offs)


# each of rows [M, 300] alone: what a model does with them
FUNCTIONS = {
    "linear": lambda x: F.linear(x, WEIGHT.to(x.dtype)),
    "linear with bias": lambda x: F.linear(x, WEIGHT.to(x.dtype), BIAS.to(x.dtype)),
    # of another stride in every batch of them
    "linear of a transposed view": lambda x: (
        F.linear(x.view(len(x), 3, 100).transpose(0, 1), WEIGHT[:, :100].to(x.dtype), BIAS.to(x.dtype))
        .transpose(0, 1)
        .flatten(1)
    ),
    "addmm with factors": lambda x: torch.addmm(
        BIAS.to(x.dtype), x, WEIGHT.t().to(x.dtype), beta=2, alpha=0.5
    ),
    "bmm": lambda x: torch.bmm(x.view(len(x), 3, 100), x.view(len(x), 3, 100).mT).flatten(1),
    "baddbmm": lambda x: torch.baddbmm(x[:, :9].view(-1, 3, 3), *(x.view(-1, 3, 100), x.view(-1, 100, 3))),
    "mean": lambda x: x.mean(-1),
    "sum": lambda x: x.view(len(x), 30, 10).sum((1, 2)),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(-1),
    "logsumexp": lambda x: x.logsumexp(-1),
    "norm": lambda x: torch.linalg.vector_norm(x, dim=-1),
    "var": lambda x: x.var(-1),
    "cumsum": lambda x: x.cumsum(-1),
    "layer_norm": lambda x: F.layer_norm(x, (300,)),
    "rms_norm": lambda x: F.rms_norm(x, (300,)),
    **{f.__name__: f for f in (F.silu, F.gelu, torch.sigmoid, F.softplus, torch.tanh, torch.erf)},
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "rms_norm formula": rms_norm,
    "rotary": rotary,
    "swiglu": lambda x: F.silu(x[:, :150]) * x[:, 150:],
    "embedding": lambda x: F.embedding(x[:, :5].detach().abs().long() % 77, WEIGHT.to(x.dtype)).flatten(1),
    "router": lambda x: routed(x)[0],
    **{f"experts, {how}": experts(how) for how in ("sum", "index_add", "scatter_add")},
    "grouped_mm of columns": grouped_apart,
    "einsum": lambda x: torch.einsum(
        "mhd,nhd->mhn", x.view(len(x), 3, 100), WEIGHT.view(77, 3, 100).to(x.dtype)
    ),
    "exp": lambda x: (x / 100).exp(),
    "rsqrt": lambda x: x.abs().rsqrt(),
    "angles": lambda x: torch.cat([x.cos(), x.sin()], -1),
    "attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(len(x), 3, 10, 10) * s for s in (1, 0.1, 2)), is_causal=True
    ).flatten(1),
    "attention, values of another head dim": lambda x: F.scaled_dot_product_attention(
        *(x.view(len(x), 3, 10, 10)[..., :n] for n in (8, 8, 5)), is_causal=True
    ).flatten(1),
}


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_rows_have_the_same_bits_in_every_batch(name, dtype):
    with rlkernel.batch_invariant():
        assert_invariant(FUNCTIONS[name], ROWS.to(dtype), rows=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_two_threads_change_no_bit(name, dtype):
    """Nor do they in any batch: of one thread above, of one and of many rows here."""
    x = ROWS.to(dtype)
    with rlkernel.batch_invariant():
        want = FUNCTIONS[name](x)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            found = {rows: FUNCTIONS[name](x[:rows]) for rows in (1, 17, len(x))}
        finally:
            torch.set_num_threads(before)
    for rows, got in found.items():
        assert_equal(f"{rows} rows", got, want[:rows])


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_any_operation_does_otherwise_is_seen(name, monkeypatch):
    """Mutants, the same on every processor: all that a function calls differs for an odd number of rows."""
    rows = 0

    def nudged(right):
        def run(original, *args, **kwargs):
            found = right(original, *args, **kwargs)
            for x in found if isinstance(found, tuple) else (found,):
                if rows % 2 and x.is_floating_point():
                    x.mul_(1 + 2**-14)
            return found

        return run

    def function(x):
        nonlocal rows
        rows = len(x)
        return FUNCTIONS[name](x)

    with rlkernel.batch_invariant() as mode:
        function(ROWS[:9])
    called = {row.op for row in mode.report()}
    assert called or name == "embedding"  # a copy
    for op in called:
        monkeypatch.setitem(aten.SERVED, op, nudged(aten.SERVED[op]))
    with rlkernel.batch_invariant():
        if called:
            with pytest.raises(AssertionError):
                assert_invariant(function, ROWS[:10], sizes=(1, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [n for n in FUNCTIONS if n != "embedding"])
def test_gradients_of_rows_have_the_same_bits_in_every_batch(name, dtype, threads):
    def gradient(x):
        x = x.detach().requires_grad_()
        out = FUNCTIONS[name](x)
        (found,) = torch.autograd.grad(out, x, out.detach().clone())
        return found

    with rlkernel.batch_invariant():
        assert_invariant(gradient, ROWS[:70].to(dtype), sizes=(1, 3, 8, 33) if threads == 1 else (3,), rows=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_numbers_are_torchs(name, dtype):
    run, x = FUNCTIONS[name], ROWS.to(dtype)
    want, truth = run(x), run(x.double())
    with rlkernel.batch_invariant():
        got = run(x)
    assert got.dtype == want.dtype
    check(name, got, want, truth)


@pytest.mark.parametrize("op", ["mm", "sum.dim_IntList", "silu"])
def test_an_order_that_follows_the_batch_is_seen(op, monkeypatch):
    """Mutants: each operation as a library might do it."""

    def halves(original, a, b):
        half = a.shape[1] // (2 if len(a) > 4 else 3)
        return (a[:, :half, None] * b[None, :half]).sum(1) + (a[:, half:, None] * b[None, half:]).sum(1)

    def by_rows(original, x, dim, keepdim=False, *, dtype=None):
        if not x.is_floating_point():
            return original(x, dim, keepdim, dtype=dtype)
        return sum(x.unbind(-1)) if len(x) % 2 else sum(x.flip(-1).unbind(-1))

    def tail(original, x):
        found = (x / (1 + torch.exp(-x))).flatten()
        found[-3:] *= 1 + 2**-22
        return found.view(x.shape)

    runs = {"mm": lambda x: x @ WEIGHT.t(), "sum.dim_IntList": lambda x: x.sum(-1), "silu": F.silu}
    monkeypatch.setitem(aten.SERVED, op, {"mm": halves, "sum.dim_IntList": by_rows, "silu": tail}[op])
    with rlkernel.batch_invariant(), pytest.raises(AssertionError):
        assert_invariant(runs[op], ROWS, sizes=FEW, rows=9)


CALLS = {
    "exp": torch.exp,
    "exp_": lambda x: x.clone().exp_(),
    "exp.out": lambda x: torch.exp(x, out=x.clone()),
}
WRONG = {
    "two rows": lambda x: len(x) == 2,
    "strides": lambda x: not x.is_contiguous(),
    "negative numbers": lambda x: len(x) == 2 and bool((x < 0).any()),
}


@pytest.mark.parametrize("where", WRONG)
@pytest.mark.parametrize("op", CALLS)
def test_a_kernel_of_torch_that_fails_its_check_is_refused(op, where, monkeypatch):
    from rlkernel.consistency import aten_checked

    monkeypatch.setattr(aten_checked, "_seen", {})
    kernel = torch.library.get_kernel

    class Worse:
        def __init__(self, name, key):
            self.kernel, self.name = kernel(name, key), name

        def call_boxed(self, keyset, x, *args, **kwargs):
            wrong = self.name == f"aten::{op}" and WRONG[where](x)
            found = self.kernel.call_boxed(keyset, x, *args, **kwargs)
            return found.mul_(1 + 2**-20) if wrong else found

    monkeypatch.setattr(torch.library, "get_kernel", Worse)
    refused = pytest.raises(RuntimeError, match=f"torch's {op} gives rows of 300 other bits")
    with rlkernel.batch_invariant(), refused:
        CALLS[op](ROWS)


@pytest.mark.parametrize("value_dim", [16, 10, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_left_padding_right_padding_and_packing_change_nothing(dtype, value_dim, threads):
    """torch's attention under each of the masks that trainers make, and its gradients."""
    q, k, v, grad = (
        torch.randn(1, 4, 90, dim, generator=g).to(dtype) for dim in (16, 16, value_dim, value_dim)
    )

    def attend(left, right, behind=0.0):
        """Rows of padding are ``behind`` and have no gradient."""
        x = [F.pad(t, (0, 0, left, right), value=behind).requires_grad_() for t in (q, k, v)]
        seen = torch.zeros(90 + left + right, dtype=torch.bool)
        seen[left : left + 90] = True
        mask = seen[None] & torch.ones(len(seen), len(seen), dtype=torch.bool).tril()
        asked = mask if left % 2 else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)
        out = F.scaled_dot_product_attention(*x, attn_mask=asked[None, None])
        grads = torch.autograd.grad(out, x, F.pad(grad, (0, 0, left, right)))
        return [t.detach()[:, :, left : left + 90] for t in (out, *grads)]

    def packed(*which):
        """Sequences one behind the other: the first 30 rows, and all."""
        starts = [0]
        for n in which:
            starts.append(starts[-1] + n)
        x = [torch.cat([t[:, :, :n] for n in which], 2).requires_grad_() for t in (q, k, v)]
        number = torch.arange(starts[-1]).unsqueeze(1).ge(torch.tensor(starts)).sum(1)
        mask = (number[:, None] == number) & torch.ones(starts[-1], starts[-1], dtype=torch.bool).tril()
        out = F.scaled_dot_product_attention(*x, attn_mask=mask[None, None])
        grads = torch.autograd.grad(out, x, torch.cat([grad[:, :, :n] for n in which], 2))
        at = which.index(90)
        return [t.detach()[:, :, starts[at] : starts[at + 1]] for t in (out, *grads)]

    with rlkernel.batch_invariant():
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        whole = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
        cases = {f"{left} in front, {right} behind": attend(left, right) for left, right in PADDED}
        cases |= {
            "NaN behind": attend(0, 9, torch.nan),
            "packed": packed(30, 90),
            "in front": packed(90, 30, 7),
        }
        for name, found in cases.items():
            for which, got, want in zip(("out", "dq", "dk", "dv"), found, whole, strict=True):
                assert_equal(f"{which}, {name}", got, want)
        for at in (1, 63, 64, 89):  # a step behind a cache
            step = F.scaled_dot_product_attention(q[:, :, at : at + 1], *(x[:, :, : at + 1] for x in (k, v)))
            assert_equal(f"step {at}", step, whole[0][:, :, at : at + 1])
        for first, end in ((20, 70), (60, 65), (65, 90)):  # a chunk of a prefill
            seen = torch.ones(end, end, dtype=torch.bool).tril()[None, None, first:]
            keys = [x[:, :, :end] for x in (k, v)]
            chunk = F.scaled_dot_product_attention(q[:, :, first:end], *keys, attn_mask=seen)
            assert_equal(f"chunk {first} to {end}", chunk, whole[0][:, :, first:end])
        # a step of an engine on pages of 7 tokens that lie backwards
        tokens = (F.pad(x[0].transpose(0, 1), (0, 0, 0, 0, 0, 1)) for x in (k, v))
        pages = [x.unflatten(0, (13, 7)).flip(0) for x in tokens]
        table, lens, starts = torch.arange(12, -1, -1)[None], torch.tensor([90]), torch.tensor([0, 25])
        found = rlkernel.paged_prefix_attention(q[0].transpose(0, 1)[65:], *pages, table, lens, starts)
        assert_equal("pages", found.transpose(0, 1)[None], whole[0][:, :, 65:])


PADDED = ((0, 0), (5, 0), (0, 7), (64, 3), (2, 2))


def masked_attention(mask, q, k, v):
    """The output and the gradients of q, k and v."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(
        *leaves, attn_mask=mask.to(q.dtype) if mask.is_floating_point() else mask
    )
    return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out) * q.sign())]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_heads_that_share_keys_have_the_gradients_of_repeated_keys(dtype):
    """transformers repeats them under a mask, and not without one."""
    q, grad = (torch.randn(1, 6, 150, 16, generator=g).to(dtype) for _ in range(2))
    leaves = [q, *(torch.randn(1, 2, 150, 16, generator=g).to(dtype) for _ in range(2))]
    leaves = [x.requires_grad_() for x in leaves]

    def repeated(x):
        return x[:, :, None].expand(-1, -1, 3, -1, -1).reshape(1, 6, 150, 16)

    mask = torch.ones(150, 150, dtype=torch.bool).tril()[None, None]
    with rlkernel.batch_invariant():
        shared = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        q, k, v = leaves
        apart = F.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=mask)
        assert_equal("out", shared, apart)
        grads = (torch.autograd.grad(x, leaves, grad) for x in (shared, apart))
        for name, got, want in zip(("dq", "dk", "dv"), *grads, strict=True):
            assert_equal(name, got, want)


MASKS = {
    "a row sees those in front of it": torch.ones(70, 70, dtype=torch.bool).tril(-1),
    "a window": torch.ones(70, 70, dtype=torch.bool).tril().triu(-20),
    "all keys": torch.zeros(70, 70),
    "rows that see nothing": torch.ones(70, 70, dtype=torch.bool).tril()
    & (torch.arange(70) % 9 > 2)[:, None],
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_mean_what_they_do_in_torch(name):
    x = [torch.randn(16, 2, 70, 8, generator=g) for _ in range(3)]
    want, truth = (masked_attention(MASKS[name], *y) for y in (x, [t.double() for t in x]))
    with rlkernel.batch_invariant():
        got = masked_attention(MASKS[name], *x)
    for which, *values in zip(("out", "dq", "dk", "dv"), got, want, truth, strict=True):
        check(which, *values, magnitude=4.0)


def windowed(rows, window, left=0, right=0):
    """What a trainer's mask shows of a sequence that is padded."""
    place = torch.arange(left + rows + right)
    inside = (place >= left) & (place < left + rows)
    back = place[:, None] - place
    return inside & (back >= 0) & (back < window)


def test_rows_of_a_window_are_those_of_attention_at_their_positions():
    """And their gradients."""
    q, k, v, grad = (torch.randn(1, 4, 150, 16, generator=g) for _ in range(4))

    def masked(mask, left=0, right=0):
        x = [F.pad(t, (0, 0, left, right)).requires_grad_() for t in (q, k, v)]
        out = F.scaled_dot_product_attention(*x, attn_mask=mask)
        grads = torch.autograd.grad(out, x, F.pad(grad, (0, 0, left, right)))
        return torch.stack([t.detach()[0, :, left : left + 150].transpose(0, 1) for t in (out, *grads)])

    def whole(starts):
        x = [t[0].transpose(0, 1).requires_grad_() for t in (q, k, v)]
        out = rlkernel.attention(*x, cu_seqlens_q=torch.tensor(starts), window=40)
        return torch.stack([out.detach(), *torch.autograd.grad(out, x, grad[0].transpose(0, 1))])

    with rlkernel.batch_invariant():
        for left, right in ((0, 0), (5, 0), (0, 7), (64, 3)):
            found = masked(windowed(150, 40, left, right), left, right)
            assert_equal(f"{left} in front, {right} behind", found, whole([0, 150]))
        mask = torch.block_diag(*(windowed(n, 40) for n in (1, 49, 100)))
        assert_equal("packed", masked(mask), whole([0, 1, 50, 150]))


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (windowed(9, 3), None),
        (windowed(9, 3)[3:], "do not say where their sequence begins"),
        (torch.block_diag(windowed(5, 2), windowed(6, 4)), "must see one window, got one of 2"),
    ],
    ids=["whole", "behind a cache", "two windows"],
)
def test_windows_without_a_beginning_are_refused(mask, message):
    q, k = torch.randn(1, 2, mask.shape[0], 8), torch.randn(1, 2, mask.shape[1], 8)
    expected = pytest.raises(RuntimeError, match=message) if message else contextlib.nullcontext()
    with rlkernel.batch_invariant(), expected:
        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.randn(6, 6), "its mask must hide keys, and not weigh them"),
        (torch.eye(6, dtype=torch.bool).logical_not(), "must show keys that follow each other"),
        (
            torch.ones(1, 2, 6, 6, dtype=torch.bool).tril_() & torch.tensor([1, 0]).bool()[:, None, None],
            "all heads",
        ),
    ],
    ids=["weights", "holes", "heads"],
)
def test_masks_that_are_no_intervals_are_refused(mask, message):
    x = torch.randn(1, 2, 6, 8)
    with rlkernel.batch_invariant(), pytest.raises(RuntimeError, match=message):
        F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


REFUSED = {
    "convolution": lambda: F.conv1d(torch.randn(1, 2, 5), torch.randn(3, 2, 2)),
    "native_batch_norm": lambda: F.batch_norm(torch.randn(4, 3), None, None, training=True),
    "pow.Tensor_Scalar": lambda: ROWS.abs() ** 1.7,
    "mm": lambda: torch.mm(ROWS.double(), WEIGHT.t().double()),
    "_softmax": lambda: ROWS.softmax(0),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_made_invariant_is_an_error_or_counted(name):
    with rlkernel.batch_invariant() as strict:
        with pytest.raises(RuntimeError, match=f"torch's {name} must be invariant inside"):
            REFUSED[name]()
        with rlkernel.batch_invariant(strict=False) as loose:
            REFUSED[name]()
    refused = [row for row in loose.report() if row.backend == "torch, not invariant"]
    assert refused and refused[0].op == name and refused[0].calls == 1
    assert refused[0] in strict.report()


def test_integers_are_exact_as_they_are():
    x = torch.arange(12).view(3, 4)
    with rlkernel.batch_invariant():
        found = x @ x.T, x.sum(1), x.cumsum(1), x.float().mean(1), (x > 3).sum()
    for got, want in zip(
        found, (x @ x.T, x.sum(1), x.cumsum(1), x.float().mean(1), (x > 3).sum()), strict=True
    ):
        assert torch.equal(got, want)


def test_out_and_in_place():
    x, w = ROWS[:5], WEIGHT.t()
    with rlkernel.batch_invariant():
        want = x @ w
        out = torch.empty(0)
        assert torch.mm(x, w, out=out) is out and torch.equal(out, want)
        strided = torch.zeros(5, 154)[:, ::2]
        torch.mm(x, w, out=strided)
        assert torch.equal(strided, want)
        base = torch.full((5, 77), torch.nan)
        assert torch.equal(torch.addmm(base, x, w, beta=0), want)
        assert torch.equal(torch.zeros(5, 77).addmm_(x, w), want)
        assert torch.equal(torch.mv(w.t(), x[0]), want[0])
        assert torch.equal(torch.dot(x[0], w[:, 0]), want[0, 0])
        assert torch.equal(F.silu(x, inplace=False), F.silu(x.clone(), inplace=True))


# What it leaves behind


def bits_of_torch():
    return [f(ROWS[:9]) for f in FUNCTIONS.values()] + [torch.mm(ROWS, ROWS.t()), F.silu(ROWS[:1, :7])]


def test_everything_is_as_before_behind_the_block():
    environment = dict(os.environ)
    want = bits_of_torch()
    with contextlib.suppress(ZeroDivisionError), rlkernel.batch_invariant():
        with rlkernel.batch_invariant(strict=False):
            assert rlkernel.batch_invariant.is_enabled()
        assert rlkernel.batch_invariant.is_enabled()
        raise ZeroDivisionError
    assert not rlkernel.batch_invariant.is_enabled() and not invariance.settings
    for got, before in zip(bits_of_torch(), want, strict=True):
        assert torch.equal(got, before)
    assert dict(os.environ) == environment


def test_one_object_is_entered_again_and_decorates():
    mode = rlkernel.batch_invariant()
    with mode:
        ROWS.mean(-1)
        with mode:
            ROWS.mean(-1)
        assert [row.calls for row in mode.report() if row.op == "mean.dim"] == [1]
    assert [row.calls for row in mode.report() if row.op == "mean.dim"] == [1]

    @rlkernel.batch_invariant()
    def run():
        return rlkernel.batch_invariant.is_enabled()

    assert run() and run() and not rlkernel.batch_invariant.is_enabled()


def test_enable_and_disable():
    mode = rlkernel.batch_invariant
    mode.disable()
    mode.enable()
    mode.enable(strict=False)
    assert mode.is_enabled() and not invariance.settings[-1].strict
    with mode():
        mode.disable()
        assert mode.is_enabled()
    assert not mode.is_enabled()
    for wrong in ({"level": "tp"}, {"strict": 1}):
        with pytest.raises(ValueError, match="must be"):
            mode.enable(**wrong)
    assert not mode.is_enabled()


def test_blocks_of_threads_end_in_any_order():
    first, second = threading.Event(), threading.Event()

    def run():
        with rlkernel.batch_invariant():
            first.set()
            second.wait(20)

    thread = threading.Thread(target=run)
    with rlkernel.batch_invariant():
        thread.start()
        assert first.wait(20)
    assert rlkernel.batch_invariant.is_enabled()
    second.set()
    thread.join()
    assert not rlkernel.batch_invariant.is_enabled()


def test_the_names_of_batch_invariant_ops():
    ops = batch_invariant_ops
    assert not ops.is_batch_invariant_mode_enabled()
    with ops.set_batch_invariant_mode():
        assert ops.is_batch_invariant_mode_enabled()
        want = torch.mm(ROWS, WEIGHT.t()), torch.log_softmax(ROWS, -1), ROWS.mean(-1)
        with ops.set_batch_invariant_mode(False):
            assert not ops.is_batch_invariant_mode_enabled()
            stock = ROWS.mean(-1)
        assert ops.is_batch_invariant_mode_enabled()
    assert torch.equal(stock, ROWS.mean(-1))
    got = ops.matmul_persistent(ROWS, WEIGHT.t()), ops.log_softmax(ROWS, dim=-1), ops.mean_dim(ROWS, 1)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    ops.enable_batch_invariant_mode()
    assert ops.is_batch_invariant_mode_enabled() and ops.get_batch_invariant_attention_block_size().block_n
    ops.disable_batch_invariant_mode()
    assert not ops.is_batch_invariant_mode_enabled()


def test_what_was_compiled_runs_invariant():
    linear = torch.nn.Linear(300, 77)
    compiled = torch.compile(lambda x: F.silu(linear(x)).mean(-1), backend="aot_eager")
    with torch.no_grad():
        compiled(ROWS)
        with rlkernel.batch_invariant() as mode:
            assert_invariant(compiled, ROWS, sizes=FEW, rows=5)
        assert {"linear", "mean.dim"} <= {row.op for row in mode.report()}


def test_linear_logprob_is_logprob_of_the_product():
    hidden, weight, ids = ROWS / 40, WEIGHT, torch.arange(len(ROWS)) % 77
    with rlkernel.batch_invariant():
        want = rlkernel.logprob(F.linear(hidden, weight), ids, temperature=0.7).logprobs

        def run(hidden, ids):
            return rlkernel.linear_logprob(hidden, weight, ids, temperature=0.7).logprobs

        assert_equal("linear_logprob", run(hidden, ids), want)
        assert_invariant(run, (hidden, ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rlkernels_operators(dtype, threads):
    """Log-probabilities and samples, whose seeds and positions go with the row."""
    x, ids = ROWS.to(dtype), torch.arange(len(ROWS)) % 300

    def run(x, ids):
        options = {"temperature": 0.7, "top_p": 0.9, "top_k": 50}
        sampled = rlkernel.sample(x / 8, seeds=ids, positions=ids + 3, **options)
        scored = rlkernel.logprob(x, ids, temperature=0.7, return_entropy=True)
        return tuple(sampled), scored.logprobs, scored.entropy

    with rlkernel.batch_invariant():
        assert_invariant(run, (x, ids), sizes=SIZES if threads == 1 else (1, 17), neighbours=())


def scored_by_a_trainer(logits, tokens, temperature=1.0):
    return rlkernel.logprob(logits, tokens, temperature=temperature).logprobs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sampled_token_has_the_number_that_a_trainer_computes(dtype):
    """Of the same logits, also of a distribution that is cut; and it is not so without the mode."""
    logits, n = (ROWS / 8).to(dtype), len(ROWS)
    t = torch.where(torch.arange(n) % 7 == 0, 0.0, 0.6)
    options = {"seeds": 3, "positions": torch.arange(n), "temperature": t, "top_logprobs": 3}
    shift = torch.linspace(-1, 1, 300)

    def sampled():
        plain = rlkernel.sample(logits, greedy_logprobs="softmax", **options)
        given = torch.stack([plain.token_ids, plain.token_ids + 1], 1) % 300
        again = rlkernel.score_tokens(logits, plain.token_ids, logprob_token_ids=given, **options)
        cut = rlkernel.sample(logits, return_support=300, top_p=0.8, **options)
        shifted = rlkernel.sample(logits, logit_bias=shift, **options)
        chain = rlkernel.verify_chain(plain.token_ids[:, None], torch.stack([logits] * 2, 1), seeds=3)
        pairs = [
            (plain.raw_logprobs, scored_by_a_trainer(logits, plain.token_ids)),
            (plain.tempered_logprobs, scored_by_a_trainer(logits, plain.token_ids, t.masked_fill(t == 0, 1))),
            (plain.processed_logprobs, plain.tempered_logprobs),
            (again.tempered_logprobs, plain.tempered_logprobs),
            (again.id_logprobs[:, 0], plain.tempered_logprobs),
            (cut.raw_logprobs, scored_by_a_trainer(logits, cut.token_ids)),
            (shifted.raw_logprobs, scored_by_a_trainer(logits, shifted.token_ids)),
            (
                shifted.tempered_logprobs,
                scored_by_a_trainer(logits.float() + shift, shifted.token_ids, t.masked_fill(t == 0, 1)),
            ),
            (chain.raw_logprobs[:, 0], scored_by_a_trainer(logits, chain.token_ids[:, 0])),
        ]
        first = plain.top_ids == plain.token_ids[:, None]
        return [*pairs, (plain.top_logprobs[first], plain.tempered_logprobs[first.any(1)])]

    with rlkernel.batch_invariant():
        for place, (got, want) in enumerate(sampled()):
            assert_equal(f"pair {place}", got, want)
    assert any(not torch.equal(got, want) for got, want in sampled())


HEADS = {"plain": {}, "softcap": {"softcap": 5.0}, "scaled": {"logit_scale": 0.3, "bias": BIAS}}


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_of_sample_linear_has_the_number_of_linear_logprob(dtype, head, store):
    hidden, weight = (ROWS / 40).to(dtype), WEIGHT.to(dtype)
    options = {name: x.to(dtype) if isinstance(x, torch.Tensor) else x for name, x in HEADS[head].items()}
    for rounded in (torch.float32, dtype):
        asked = options | {"logits_dtype": rounded, "temperature": 0.6}
        with rlkernel.batch_invariant():
            out = rlkernel.sample_linear(hidden, weight, seeds=3, store_logits=store, **asked)
            want = rlkernel.linear_logprob(hidden, weight, out.token_ids, **asked).logprobs
            assert_equal(f"{rounded}", out.tempered_logprobs, want)
            asked |= {"temperature": 1.0}
            raw = rlkernel.linear_logprob(hidden, weight, out.token_ids, **asked).logprobs
            assert_equal(f"raw, {rounded}", out.raw_logprobs, raw)


def test_the_experts_of_a_row_are_those_of_its_logits(threads):
    """Ties go the same way in any batch, and the combination is summed in a fixed order."""
    with rlkernel.batch_invariant():
        logits = F.linear(ROWS, ROUTER).div(400).round()
        assert (logits.sort(-1).values.diff(dim=-1) == 0).any(-1).float().mean() > 0.9
        assert_invariant(lambda x: torch.cat([*x.topk(3)], -1), logits, sizes=FEW)
        first = experts("index_add")(ROWS)
        for _ in range(3):
            assert_equal("again", experts("index_add")(ROWS), first)
