"""What C++ takes of torch's operations inside ``batch_invariant``: it has the bits of Python's way, to which
all else goes; both are asked for each call, so that a way that is lost is seen.
"""

import collections
import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel import native
from rlkernel.consistency import aten
from rlkernel.consistency.aten_call import Short
from rlkernel.runtime import invariance


def drawn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ANY, WIDE = DTYPES, DTYPES[:1]
CALLS = {
    "mm": (ANY, lambda x: torch.mm(x[0], x[1].t())),
    "bmm": (ANY, lambda x: torch.bmm(x, x.mT)),
    "addmm": (ANY, lambda x: torch.addmm(x[0, 0, :3], x[0], x[1, :3].t())),
    "linear": (ANY, lambda x: F.linear(x, x[0])),
    "sum.dim_IntList": (WIDE, lambda x: torch.cat([x.sum(-1, keepdim=True), x.sum([2])[..., None]], -1)),
    "mean.dim": (WIDE, lambda x: torch.cat([x.mean(-1, keepdim=True), x.mean([2])[..., None]], -1)),
    "_softmax": (ANY, lambda x: torch.cat([x[0].softmax(-1), x[0].float().softmax(1).to(x.dtype)])),
    "_log_softmax": (
        ANY,
        lambda x: torch.cat([x.log_softmax(-1), x.log_softmax(2, dtype=torch.float32).to(x.dtype)]),
    ),
    "silu": (ANY, F.silu),
    "gelu": (ANY, lambda x: torch.cat([F.gelu(x), F.gelu(x, approximate="tanh")])),
    "rsqrt": (WIDE, torch.rsqrt),
    "pow.Tensor_Scalar": (WIDE, lambda x: x.pow(2)),
    "rms_norm": (
        ANY,
        lambda x: torch.cat([F.rms_norm(x, x.shape[-1:], x[0, 0]), F.rms_norm(x, x.shape[-1:], eps=0.1)]),
    ),
    "layer_norm": (
        ANY,
        lambda x: torch.cat([F.layer_norm(x, x.shape[-1:], x[0, 0]), F.layer_norm(x, x.shape[-1:], eps=0.1)]),
    ),
}
SDPA = "_scaled_dot_product_flash_attention_for_cpu"
SHAPES = ((2, 3, 64), (2, 5, 37), (3, 1, 1), (2, 130, 40))


@pytest.fixture
def ways(monkeypatch):
    """``ways(calls)`` compares both ways of each, and gives the operations that Python's way had of each."""
    made, asked = native.replaced, []
    taken = True

    def replaced(op, name, otherwise):
        def watched(*args, **kwargs):
            asked[-1].append(name)
            return otherwise(*args, **kwargs)

        return made(op, name, watched) if taken else otherwise

    def asking(call):
        asked.append([])
        return call()

    monkeypatch.setattr(native, "replaced", replaced)

    def run(calls):
        nonlocal taken
        found, counted = [], []
        asked.clear()
        for way in (True, False):
            taken = way
            with rlkernel.batch_invariant() as mode:
                found.append([asking(call) for call in calls])
            counted.append(collections.Counter())
            for row in mode.report():
                counted[-1][row.op] += row.calls
        # what Python reads masks with is counted beside the operation
        assert counted[0] == {op: n for op, n in counted[1].items() if op in counted[0]}
        for i, (short, long) in enumerate(zip(*found, strict=True)):
            assert are_equal(short, long), i
        return asked[: len(calls)]

    return run


def are_equal(a, b):
    strides = [[d for d, n in zip(x.stride(), x.shape, strict=True) if n > 1] for x in (a, b)]
    alike = a.dtype == b.dtype and a.shape == b.shape and strides[0] == strides[1]
    signs = torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())
    return (
        alike
        and signs
        and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
        and torch.equal(a.isnan(), b.isnan())
    )


def test_each_short_way_is_asked_for_here():
    assert {name for name, served in aten.SERVED.items() if isinstance(served, Short)} == {*CALLS, SDPA}


@pytest.mark.parametrize("name", CALLS)
def test_it_has_the_bits_of_the_long_way(name, ways):
    dtypes, call = CALLS[name]
    for dtype in DTYPES:
        given = [drawn(*shape, dtype=dtype) for shape in SHAPES]
        given += [torch.nn.Parameter(given[0])]
        with torch.no_grad():
            asked = ways([functools.partial(call, x) for x in given])
        assert all((name in of_call) == (dtype not in dtypes) for of_call in asked), dtype


def test_views_are_read_where_they_lie(ways):
    wide = drawn(6, 80)
    views = (wide[:, :40], wide[::2], wide[:, ::2], wide.t(), wide[:1].expand(6, 80), wide[1:, 3:9])
    calls = (lambda x: torch.mm(x, x.t()), lambda x: F.linear(x, x), lambda x: x.mean(-1))
    assert not any(ways([functools.partial(call, x) for call in calls for x in views]))
    flipped = drawn(2, 5, 6).mT
    calls = (lambda: flipped.sum(-1), lambda: flipped.mean(-1), lambda: F.linear(flipped, wide[:, :5]))
    assert all(map(len, ways(calls)))


def test_numbers_that_are_none(ways):
    x = torch.tensor([[0.0, -0.0, -1.0, torch.inf], [-torch.inf, torch.nan, 1e-40, 3e38]])
    calls = (CALLS["mean.dim"][1], CALLS["sum.dim_IntList"][1])
    calls = [functools.partial(call, x[None]) for call in calls]
    calls += [functools.partial(call, x) for call in (torch.rsqrt, lambda t: t.pow(2), F.silu, F.gelu)]
    assert not any(ways(calls))


def _step(batch, keys, heads=4, shared=2, dim=16, value_dim=16, dtype=torch.float32):
    q = drawn(batch, 1, heads, dim, dtype=dtype).transpose(1, 2)
    return q, drawn(batch, shared, keys, dim, dtype=dtype), drawn(batch, shared, keys, value_dim, dtype=dtype)


def _masks(batch, keys, dtype):
    """Nothing, padding on the left, on both sides and of one for all."""
    place = torch.arange(keys)
    left = place >= torch.arange(batch)[:, None] % keys
    shown = (left, left & (place < keys - 1), place[None] > 0) if keys > batch + 1 else (left,)
    for flags in shown:
        yield flags[:, None, None]
        yield torch.zeros(flags.shape, dtype=dtype).masked_fill(~flags, torch.finfo(dtype).min)[:, None, None]
        yield torch.zeros(flags.shape, dtype=dtype).masked_fill(~flags, -torch.inf)[:, None, None]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_of_decoding_has_the_bits_of_the_long_way(dtype, ways):
    calls = []
    for batch, keys in ((1, 1), (1, 140), (3, 7), (5, 600), (2, 1100)):
        q, k, v = _step(batch, keys, dtype=dtype)
        for mask in (None, *_masks(batch, keys, dtype)):
            options = {"attn_mask": mask, "enable_gqa": True, "scale": None if keys % 2 else 0.3}
            calls.append(functools.partial(F.scaled_dot_product_attention, q, k, v, **options))
    wide = drawn(3, 2, 9, 40, dtype=dtype)
    views = (wide[..., :16], wide[:, :, 2:, 8:24], wide[:1, :, :, 3:19].expand(3, 2, 9, 16))
    q = drawn(3, 4, 1, 16, dtype=dtype)
    calls += [functools.partial(F.scaled_dot_product_attention, q, x, x, enable_gqa=True) for x in views]
    asked = ways(calls)
    assert not [call.args[1].shape for call, names in zip(calls, asked, strict=True) if SDPA in names][:-1]
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    q, k, v = _step(2, 9, dtype=dtype)
    lses = [lambda: flash(q, k, v)[1].contiguous(), lambda: flash(q, k, v, 0.0, True)[1].contiguous()]
    assert ways(lses) == [[], [SDPA]]


def test_other_steps_are_pythons(ways):
    q, k, v = _step(3, 9)
    apart = torch.zeros(3, 1, 1, 9)
    apart[:, :, :, ::2] = -torch.inf
    blind = torch.ones(3, 1, 1, 9, dtype=torch.bool)
    blind[1] = False
    uneven = drawn(3, 2 * 9 * 16 + 5)[:, :-5].unflatten(
        1, (2, 9, 16)
    )  # sequences are no whole number of keys apart
    rows = q.expand(3, 4, 2, 16)
    calls = (
        lambda: F.scaled_dot_product_attention(q, k, v, blind, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(q, uneven, v, enable_gqa=True),
        lambda: F.scaled_dot_product_attention(rows, k, v, enable_gqa=True),
    )
    assert all(SDPA in asked for asked in ways(calls))
    with rlkernel.batch_invariant(), pytest.raises(RuntimeError, match="keys that follow each other"):
        F.scaled_dot_product_attention(q, k, v, apart, enable_gqa=True)
    with rlkernel.batch_invariant(), pytest.raises(RuntimeError, match="and not weigh them"):
        F.scaled_dot_product_attention(q, k, v, apart.clamp(-1), enable_gqa=True)


def test_biases_of_16_bits_are_read_exactly(ways):
    """All that there are, which is added to 0."""
    for dtype in DTYPES[1:]:
        bias = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        rows = torch.zeros(1, 2, dtype=dtype), torch.zeros(2, 2**16, dtype=dtype)
        assert ways([lambda rows=rows, bias=bias: torch.addmm(bias, *rows)]) == [[]]


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Marked(torch.Tensor):
    pass


X, W = drawn(3, 64), drawn(5, 64, seed=1)


def _dual():
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(F.linear(forward_ad.make_dual(X, torch.ones_like(X)), W)).tangent


def _watched():
    with Watching():
        return F.linear(X, W)


def _with_gradient():
    x = X.clone().requires_grad_()
    return torch.autograd.grad(F.linear(x, W).sum(), x)[0]


def test_other_calls_are_pythons(ways):
    """Those that others look at, and those of other tensors."""
    calls = (
        _dual,
        _watched,
        _with_gradient,
        lambda: F.linear(X.as_subclass(Marked), W).as_subclass(torch.Tensor),
        lambda: F.linear(X[:0], W),
        lambda: F.linear(X[0], W),
    )
    assert all("linear" in asked for asked in ways(calls))


def test_other_options_are_pythons(ways):
    x = drawn(4, 6, 8)
    calls = (
        lambda: x.sum(1),
        lambda: x.sum((0, 2)),
        lambda: x.sum(),
        lambda: x.mean(0),
        lambda: x.int().sum(-1),
        lambda: x.pow(3),
        lambda: x.abs().pow(0.5),
        lambda: torch.addmm(x[0, :, :6], x[1], x[2].t()),
        lambda: F.layer_norm(x, (6, 8)),
        lambda: F.rms_norm(x, (6, 8)),
        lambda: F.layer_norm(x.mT, (6,)),
        lambda: torch.addmm(x[0, 0, :6], x[1], x[2].t(), alpha=2),
    )
    assert all(ways(calls))


def test_what_does_not_fit_is_torchs_error():
    with rlkernel.batch_invariant():
        for call in (
            lambda: torch.mm(X, W),
            lambda: F.linear(X, W[:, :3]),
            lambda: X.sum(3),
            lambda: F.gelu(X, approximate="other"),
        ):
            with pytest.raises((RuntimeError, IndexError, ValueError)):
                call()


def test_aside_in_any_thread_is_pythons(ways):
    """Which knows the thread: there torch's own runs, elsewhere ours."""
    inside, done = threading.Event(), threading.Event()

    def elsewhere():
        with invariance.aside():
            inside.set()
            done.wait()

    thread = threading.Thread(target=elsewhere)
    thread.start()
    inside.wait()
    try:
        assert ways([lambda: F.silu(X)]) == [["silu"]]
    finally:
        done.set()
        thread.join()
    assert not invariance.asides
    with rlkernel.batch_invariant() as mode, invariance.aside():
        assert torch.equal(torch.mm(X, W.t()), _own())
    assert mode.report() == []


def _own():
    with invariance.aside():
        return torch.mm(X, W.t())


def test_the_level_of_ranks_is_pythons():
    with rlkernel.batch_invariant(level="tensor_parallel"):
        tree = F.linear(X, W)
    assert torch.equal(tree, rlkernel.matmul(X, W.t(), segments=8))


def test_layer_norm_over_several_dimensions_is_that_of_their_rows():
    """And its gradients, with a bias and without, where the rows have other strides too."""

    def run(x, shape, weight, bias):
        leaves = [t.detach().requires_grad_() for t in (x, weight, bias) if t is not None]
        given = iter(leaves)
        x, weight, bias = (None if t is None else next(given) for t in (x, weight, bias))
        out = F.layer_norm(x, shape, weight, bias)
        return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().cos())]

    x, weight, bias = drawn(7, 5, 4), drawn(5, 4, seed=1), drawn(5, 4, seed=2)
    with rlkernel.batch_invariant():
        for given in (
            (x, weight, bias),
            (x, weight, None),
            (x, None, None),
            (x.mT.contiguous().mT, weight, bias),
        ):
            flat = [None if t is None else t.flatten(-2) for t in given]
            for found, wanted in zip(
                run(given[0], (5, 4), *given[1:]), run(flat[0], (20,), *flat[1:]), strict=True
            ):
                assert torch.equal(found, wanted.view(found.shape))
            own = rlkernel.layer_norm(*flat)
            assert torch.equal(F.layer_norm(flat[0], (20,), *flat[1:]), own)
