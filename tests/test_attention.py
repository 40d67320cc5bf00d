"""``attention`` on every backend: torch's numbers, and a row's bits are those of any step of an engine."""

import backends
import pytest
import torch
from accuracy import check
from backends import is_slow, running, skip_unless_able
from bitwise import assert_equal
from torch.nn.functional import scaled_dot_product_attention

import rlkernel
from rlkernel import PrefixLayout

OP = "attention"
every_backend = pytest.mark.parametrize(("backend", "device"), backends.of(OP))
# the reference means the same, in products of torch whose bits depend on shapes
same_bits = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in backends.of(OP) if pair.values[0] != "reference"]
)
OPTIONS = {
    "plain": {},
    "softcap": {"softcap": 3.0, "scale": 0.5},
    "window": {"window": 75},
    "sinks": {"sinks": True},
}


def make(
    count, rows, keys=None, heads=4, kv_heads=2, head_dim=16, v_dim=None, dtype=torch.float32, device="cpu"
):
    g = torch.Generator().manual_seed(rows)
    keys = rows if keys is None else keys
    shapes = (rows, heads, head_dim), (keys, kv_heads, head_dim), (keys, kv_heads, v_dim or head_dim)
    return tuple(torch.randn(count, *shape, generator=g).to(dtype).to(device) for shape in shapes)


def options_of(name, heads=4, device="cpu"):
    options = dict(OPTIONS[name])
    if "sinks" in options:
        options["sinks"] = torch.linspace(-1, 2, heads).to(device)
    return options


def torchs(q, k, v, *, scale=None, softcap=None, window=None, sinks=None):
    """torch's own, in the dtype of q."""
    rows, keys = q.shape[1], k.shape[1]
    back = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)
    seen = ((back >= 0) & (back < (window or keys + 1))).to(q.device)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if softcap is None and sinks is None:
        out = scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)
        return out.transpose(1, 2)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(2, 3) * (scale or q.shape[3] ** -0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        sink = sinks.to(q.dtype)[:, None, None].expand(len(q), -1, rows, 1)
        scores = torch.cat([scores, sink], 3)
    return (scores.softmax(3)[..., :keys] @ v).transpose(1, 2)


def with_gradients(run, inputs, options):
    inputs = [x.detach().requires_grad_() for x in inputs]
    if "sinks" in options:
        options = {**options, "sinks": options["sinks"].to(inputs[0].dtype).detach().requires_grad_()}
    wanted = [*inputs, *(x for x in options.values() if isinstance(x, torch.Tensor))]
    out = run(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, wanted, upstream(out))]


def upstream(out):
    return torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)


def agrees(backend, inputs, **options):
    q, k, v = inputs
    skip_unless_able(backend, OP, *(x.flatten(0, 1) for x in inputs))
    with running(backend):
        got = with_gradients(rlkernel.attention, inputs, options)
    assert rlkernel.last_backend(OP) == backend
    want = with_gradients(torchs, inputs, options)
    truth = with_gradients(torchs, [x.double() for x in inputs], options)
    delta = (truth[0] * upstream(truth[0])).sum(-1).abs().max().item()  # gradients are differences from it
    for name, *values in zip(("out", "dq", "dk", "dv", "dsinks"), got, want, truth, strict=False):
        assert values[0].dtype == q.dtype
        check(name, *values, magnitude=delta if name != "out" else 0.0)
    return got[0]


@every_backend
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(("count", "rows"), [(1, 1), (2, 90), (1, 530)])
def test_numbers_and_gradients_are_torchs(backend, device, count, rows, option):
    if is_slow(backend, device):
        rows = min(rows, 65 * count)  # of several chunks: tests of paged_prefix_attention
    out = agrees(backend, make(count, rows, device=device), **options_of(option, device=device))
    assert out.shape == (count, rows, 4, 16)


@every_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(backend, device, dtype):
    assert agrees(backend, make(2, 33, head_dim=64, dtype=dtype, device=device)).dtype == dtype


def test_fp64_is_fp64_throughout():
    inputs = make(2, 33, dtype=torch.float64)
    got, want = (with_gradients(run, inputs, {}) for run in (rlkernel.attention, torchs))
    torch.testing.assert_close(got, want, rtol=1e-13, atol=1e-13)


@every_backend
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "v_dim"), [(7, 1, 16, None), (6, 2, 40, 24), (3, 1, 128, 67)]
)
def test_heads_of_any_number_and_dim(backend, device, heads, kv_heads, head_dim, v_dim):
    out = agrees(backend, make(1, 20, None, heads, kv_heads, head_dim, v_dim, device=device))
    assert out.shape == (1, 20, heads, v_dim or head_dim)


def paged(q, k, v, first, block_size, **options):
    """Rows ``first``... of one sequence as a step on a paged cache whose blocks lie in any order."""
    keys = len(k)
    blocks = -(-keys // block_size)
    order = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(block_size))[:blocks]

    def cache(x):
        padded = torch.full((blocks * block_size, *x.shape[1:]), torch.nan, dtype=x.dtype, device=x.device)
        padded[:keys] = x
        made = padded.new_full((blocks + 2, block_size, *x.shape[1:]), torch.nan)
        made[order] = padded.unflatten(0, (blocks, block_size))
        return made

    rows = keys - first
    tables = order[None], torch.tensor([keys]), torch.tensor([0, rows])
    return rlkernel.paged_prefix_attention(
        q[first:], cache(k), cache(v), *(x.to(q.device) for x in tables), **options, return_lse=True
    )


@same_bits
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("option", OPTIONS)
def test_a_sequence_has_the_bits_of_an_engines_steps(backend, device, option, dtype):
    """Whole, packed, in chunks, row by row and from blocks of any size."""
    rows, slow = 530, is_slow(backend, device)
    if slow:  # more than one chunk: tests of paged_prefix_attention
        rows = 150 if option == "plain" else 70
    others = make(1, 40, dtype=dtype, device=device)
    inputs = make(1, rows, dtype=dtype, device=device)
    options = options_of(option, device=device)
    q, k, v = (x[0] for x in inputs)
    with running(backend), torch.no_grad():
        out, lse = (x[0] for x in rlkernel.attention(*inputs, **options, return_lse=True))
        packed = [torch.cat([a[0], b[0], a[0]]) for a, b in zip(others, inputs, strict=True)]
        starts = torch.tensor([0, 40, 40 + rows, 80 + rows], device=device)
        among, among_lse = rlkernel.attention(*packed, cu_seqlens_q=starts, **options, return_lse=True)
        assert_equal("packed", among[40 : 40 + rows], out)
        assert_equal("lse packed", among_lse[:, 40 : 40 + rows], lse)
        for first in (rows - 1, 67) if slow else (rows - 1, rows - 64, 70):
            chunk = rlkernel.attention(inputs[0][:, first:], *inputs[1:], **options)
            assert_equal(f"rows {first}... behind their keys", chunk[0], out[first:])
        steps = (rows, rows - 1, 16), (66, 64, 1), (rows, 100, 48), (64, 60, 7), (rows - 1, 0, 32)
        for end, first, block_size in steps[:2] if slow else steps:
            step, step_lse = paged(q[:end], k[:end], v[:end], first, block_size, **options)
            assert_equal(f"paged rows {first} to {end}", step, out[first:end])
            assert_equal(f"lse of paged rows {first} to {end}", step_lse, lse[:, first:end])


@same_bits
def test_a_shared_prompt_has_the_bits_of_its_copies(backend, device):
    layout = PrefixLayout((130, 3, 70, 20), (-1, -1, 0, 0), (False, False, True, True))
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(layout.total, h, 16, generator=g).to(device) for h in (4, 2, 2))
    repeated, index = layout.repeated()
    with running(backend), torch.no_grad():
        out, lse = rlkernel.attention(q, k, v, batch=layout, return_lse=True)
        apart, apart_lse = rlkernel.attention(q[index], k[index], v[index], batch=repeated, return_lse=True)
    assert_equal("out", apart, out[index])
    assert_equal("lse", apart_lse, lse[:, index])


@same_bits
def test_neighbours_of_nan_change_nothing(backend, device):
    q, k, v = make(3, 70, device=device)
    with running(backend), torch.no_grad():
        alone = rlkernel.attention(q[1:2], k[1:2], v[1:2])
        for x in (q, k, v):
            x[0], x[2] = torch.nan, torch.inf
        assert_equal("in the middle", rlkernel.attention(q, k, v)[1:2], alone)


def test_the_bits_are_not_those_of_torch():
    """Row by row and whole, torch's own differ: what is compared above can differ."""
    q, k, v = (x.transpose(1, 2) for x in make(1, 530, head_dim=64))
    whole = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    # every product over keys cut at another place: a sum that another order rounds otherwise
    scores = (q[:, :, -1:] * k).sum(-1) * 64**-0.5
    halves = [slice(0, 265), slice(265, 530)]
    parts = [(scores[..., h].exp()[..., None] * v[:, :, h]).sum(2) for h in halves]
    last = sum(parts) / sum(scores[..., h].exp().sum(-1) for h in halves)[..., None]
    assert not torch.equal(last, whole[:, :, -1])
    torch.testing.assert_close(last, whole[:, :, -1], rtol=1e-5, atol=1e-6)


@every_backend
def test_batches_without_rows(backend, device):
    with running(backend):
        for shape in ((0, 5), (2, 0)):
            q, k, v = make(*shape, device=device)
            out, lse = rlkernel.attention(q, k, v, return_lse=True)
            assert out.shape == q.shape and lse.shape == (shape[0], 4, shape[1])
            out = rlkernel.attention(q[:, :3], k, v)
            assert out.shape == q[:, :3].shape
        # columns of a wider tensor: without an element torch calls any strides contiguous
        q, k, v = (torch.stack([x[0], x[0]], -1)[..., 0] for x in make(1, 0, device=device))
        for x in (q, k, v):
            x.requires_grad_()
        out = rlkernel.attention(q, k, v, cu_seqlens_q=torch.tensor([0], device=device))
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert [x.shape for x in (out, *grads)] == [x.shape for x in (q, q, k, v)]
        starts = torch.tensor([0, 0, 7, 7], device=device)
        q, k, v = (x[0] for x in make(1, 7, device=device))
        assert rlkernel.attention(q, k, v, cu_seqlens_q=starts).shape == q.shape


@every_backend
def test_under_torch_compile(backend, device):
    q, k, v = (x[0].requires_grad_() for x in make(1, 9, device=device))
    layout = PrefixLayout((4, 2, 3), (-1, 0, 0), (False, True, True))

    def run(q, k, v):
        return rlkernel.attention(q * 2, k, v, batch=layout)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    with running(backend):
        want, got = (torch.autograd.grad(f(q, k, v).square().sum(), (q, k, v)) for f in (run, compiled))
    for name, a, b in zip("qkv", got, want, strict=True):
        if (backend, device) == ("reference", "cuda"):  # a gradient may have other strides, which cuBLAS asks
            torch.testing.assert_close(a, b)
        else:
            assert_equal(name, a, b)


def test_what_torch_compile_cannot_make_is_asked_for():
    compiled = torch.compile(rlkernel.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="batch must be given under torch.compile"):
        compiled(*make(2, 9))


Q, K, V = make(2, 6)
STARTS = torch.tensor([0, 2, 6])
PACKED = {name: x[0] for name, x in zip("qkv", (Q, K, V), strict=True)}
BAD = {
    "cu_seqlens_q must be None beside 4-dimensional q, got Tensor": {"cu_seqlens_q": STARTS},
    "batch must be None beside 4-dimensional q, got PrefixLayout": {
        "batch": PrefixLayout((6,), (-1,), (True,))
    },
    r"k must be \[2, Tk, Hkv, D\] beside q, got \(1, 6, 2, 16\)": {"k": K[:1]},
    r"v must be \[2, 6, Hkv, D\] beside q, got \(2, 5, 2, 16\)": {"v": V[:, :5]},
    "k must have at least q's 6 rows, got 5": {"k": K[:, :5], "v": V[:, :5]},
    "window must be an integer >= 1, or None, got 0": {"window": 0},
    r"q must be \[B, Tq, Hq, D\] without cu_seqlens_q or batch, got \(6, 4, 16\)": PACKED,
    r"cu_seqlens_q must be \[B \+ 1\] int32 or int64, got float32 \(3,\)": {
        **PACKED,
        "cu_seqlens_q": STARTS * 1.0,
    },
    "cu_seqlens_q must go from 0 to 6, got 0 to 5": {**PACKED, "cu_seqlens_q": STARTS.clamp(max=5)},
    r"cu_seqlens_k must have cu_seqlens_q's shape \(3,\), got \(2,\)": {
        **PACKED,
        "cu_seqlens_q": STARTS,
        "cu_seqlens_k": torch.tensor([0, 6]),
    },
    "cu_seqlens_k must be None beside batch, got Tensor": {
        **PACKED,
        "cu_seqlens_k": STARTS,
        "batch": PrefixLayout((6,), (-1,), (True,)),
    },
    "q must have the rows of k where a gradient is wanted": {"q": Q[:, 3:].clone().requires_grad_()},
}


@pytest.mark.parametrize("message", BAD)
def test_what_is_off_is_named(message):
    with pytest.raises(ValueError, match=f"^{message}"):
        rlkernel.attention(**{"q": Q, "k": K, "v": V, **BAD[message]})


@pytest.mark.parametrize("dtype, device", [(torch.float64, "cpu"), (torch.bfloat16, "cpu"), (None, "meta")])
def test_a_default_of_torch_changes_nothing(dtype, device):
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    want = rlkernel.attention(q, k, v)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        with torch.device(device):
            got = rlkernel.attention(q, k, v)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, want)
