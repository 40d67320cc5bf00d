"""Merge, gather and fixed-order reduction: the CPU's kernels, the device's emulated, CUDA's with a GPU."""

import contextlib

import pytest
import torch
from backends import EMULATED, INTERPRETED, NO_INTERPRETER
from bitwise import assert_equal

from rlkernel import native
from rlkernel.native.prefix_shared_attention.kernels import attention_merge, gather_kv, segment_reduce

INF = float("inf")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTS = ["native-cpu", *EMULATED, *(["native-cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=PARTS)
def device(request):
    """The device of the tensors; kernels are those of the part that the parameter names."""
    with contextlib.ExitStack() as stack:
        if request.param in EMULATED:
            import emulation

            stack.enter_context(native.emulated(emulation.module(EMULATED[request.param])))
        yield "cuda" if request.param == "native-cuda" else "cpu"


def normal(*shape, dtype=torch.float32, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


def merged(out, lse, part, part_lse, sinks):
    """The definition, in fp64; lse of rows without keys is -inf."""
    terms = [lse.double()] + ([part_lse.double()] if part is not None else [])
    terms = [torch.where(x == INF, -INF, x) for x in terms]
    all_terms = terms + ([sinks.double()[:, None].expand_as(lse)] if sinks is not None else [])
    total = torch.logsumexp(torch.stack(all_terms), 0)
    result = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for values, x in zip((out, part), terms, strict=False):
        weight = torch.exp(x - total).T[..., None]
        result += torch.where(x.T[..., None] == -INF, 0, weight * values.double())
    return result, total


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (70, 3, 64), (33, 2, 5), (130, 1, 96)], ids=str)
@pytest.mark.parametrize("given", ["part", "sinks", "both"])
def test_merge(device, dtype, shape, given):
    n, heads, _ = shape
    out, part = (normal(*shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    lse, part_lse = (8 * normal(heads, n, device=device, seed=s) for s in (2, 3))
    sinks = 4 * normal(heads, device=device, seed=4) if given != "part" else None
    if given == "sinks":
        part = part_lse = None
    want, want_lse = merged(out, lse, part, part_lse, sinks)
    attention_merge(out, lse, part, part_lse, sinks)
    rounded = want.to(dtype).double()
    unit = torch.finfo(dtype).eps
    allowed = (rounded - want).abs().max() + 4e-7 * want.abs().max() + unit / 8
    assert (out.double() - want).abs().max() <= allowed
    assert (lse.double() - want_lse).abs().max() <= 4e-7 * want_lse.abs().max() + 1e-7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_of_rows_and_heads_with_strides(device, dtype):
    """Some rows of a transposed view, a partial with the heads outside; nothing beside them is written."""
    whole = normal(4, 50, 24, dtype=dtype, device=device)
    out, lse = whole[:, :, :16].transpose(0, 1), normal(4, 50, device=device, seed=1)
    part, part_lse = (
        normal(4, 20, 16, dtype=dtype, device=device, seed=2).transpose(0, 1),
        normal(4, 60, device=device),
    )
    before = whole.clone(), lse.clone()
    want, want_lse = merged(out[7:27], lse[:, 7:27], part, part_lse[:, 3:23], None)
    attention_merge(out[7:27], lse[:, 7:27], part, part_lse[:, 3:23])
    assert torch.allclose(out[7:27].double(), want, rtol=0, atol=4 * torch.finfo(dtype).eps)
    assert torch.allclose(lse[:, 7:27].double(), want_lse, rtol=1e-6, atol=1e-6)
    whole[:, 7:27, :16], before[0][:, 7:27, :16] = 0, 0
    lse[:, 7:27], before[1][:, 7:27] = 0, 0
    assert torch.equal(whole, before[0]) and torch.equal(lse, before[1])


def test_merge_of_rows_without_keys(device):
    """They weigh 0 whatever they hold: -inf as FlashAttention 3 says it, +inf as 2; NaN stays in its row."""
    nan = float("nan")
    lse = torch.tensor([[INF, -INF, 1.0, 1.0, INF, -INF, nan, 1.0, 1.0]], device=device)
    part_lse = torch.tensor([[2.0, 2.0, INF, -INF, INF, -INF, 1.0, nan, 1.0]], device=device)
    out, part = torch.full((9, 1, 8), 3.0, device=device), torch.full((9, 1, 8), 5.0, device=device)
    out[[0, 1, 4, 5]], part[[2, 3, 4, 5]] = nan, INF
    attention_merge(out, lse, part, part_lse)
    assert out[:6, 0, 0].tolist() == [5, 5, 3, 3, 0, 0] and out[8, 0, 0] == 4
    assert lse[0, :6].tolist() == [2, 2, 1, 1, -INF, -INF]
    assert out[6:8].isnan().all() and lse[0, 6:8].isnan().all() and lse[0, 8].isfinite()


def test_merge_with_sinks_at_the_edge(device):
    """A sink of -inf changes no bit, one of +inf takes all, and a row without keys is left with its sink."""
    out, lse = normal(5, 3, 8, device=device), normal(3, 5, device=device, seed=1)
    lse[:, 4] = -INF
    before = out.clone(), lse.clone()
    attention_merge(out, lse, None, None, torch.tensor([-INF, INF, 0.5], device=device))
    assert torch.equal(out[:4, 0], before[0][:4, 0]) and torch.equal(lse[0], before[1][0])
    assert (out[:, 1] == 0).all() and (lse[1] == INF).all()
    assert (out[4] == 0).all() and lse[2, 4] == 0.5


def test_merge_far_apart(device):
    """A difference that no exp can hold: the smaller side vanishes, nothing overflows."""
    lse, part_lse = torch.tensor([[3e38, -3e38]], device=device), torch.tensor([[-3e38, 3e38]], device=device)
    out, part = torch.full((2, 1, 8), 3.0, device=device), torch.full((2, 1, 8), 5.0, device=device)
    attention_merge(out, lse, part, part_lse)
    assert out[:, 0, 0].tolist() == [3, 5] and (lse[0] == torch.tensor(3e38)).all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (2, 64), (3, 5), (8, 128)], ids=str)
def test_gather(device, dtype, shape):
    heads, head_dim = shape
    k = normal(40, heads, head_dim, dtype=dtype, device=device)
    v = normal(heads, 40, 3 * head_dim, dtype=dtype, device=device, seed=1)[..., :head_dim].transpose(0, 1)
    index = torch.tensor([*range(40), 0, 39, 5, 5, *range(20)], device=device)
    for x, y in ((k, v), (v, k), (k, k)):
        got = gather_kv(x, y, index)
        assert torch.equal(got[0], x[index]) and torch.equal(got[1], y[index])
    assert gather_kv(k, v, index[:0])[0].shape == (0, heads, head_dim)


def table(counts, keys, device):
    generator = torch.Generator().manual_seed(0)
    index = torch.randint(keys, (sum(counts),), generator=generator)
    return index.to(device), torch.tensor([0, *counts]).cumsum(0).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 8), (3, 5), (8, 64), (3, 120)], ids=str)
@pytest.mark.parametrize("wide", [False, True])
def test_reduce(device, dtype, shape, wide):
    """The bits of a sum in fp32, source by source in the order of the table, rounded once."""
    source_k, source_v = (normal(30, *shape, dtype=dtype, device=device, seed=s) for s in (0, 1))
    counts = [1, 0, 16, 3, *([2] * 20), 64]
    index, offsets = table(counts, 30, device)
    got = segment_reduce(source_k, source_v, index, offsets, torch.float32 if wide else None)
    for source, result in zip((source_k, source_v), got, strict=True):
        assert result.dtype == (torch.float32 if wide else dtype)
        for r, (a, b) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True)):
            total = torch.zeros(shape, device=device)
            for i in index[a:b].tolist():
                total = total + source[i].float()
            assert torch.equal(result[r], total.to(result.dtype)), r


def test_reduce_sums_wide_and_in_order(device):
    """Fails where terms are added in bf16 or in another order: 4096 swallows what comes after it there."""
    values = torch.tensor([2.0**-14, 4096.0, -4096.0, 2.0**-14, 1.0], device=device).bfloat16()
    source = values[:, None, None].expand(5, 1, 8).contiguous()
    offsets = torch.tensor([0, 4, 8], device=device)
    orders = torch.tensor([0, 1, 2, 3, 1, 2, 0, 3], device=device)
    result = segment_reduce(source, source, orders, offsets)[0]
    assert (result[0] == 2.0**-14).all()  # the first term is lost in fp32, the last is not
    assert (result[1] == 2.0**-13).all()


# Triton's

triton_around = None
with contextlib.suppress(ImportError):
    from rlkernel.triton_ops import prefix_shared_attention_around as triton_around
    from rlkernel.triton_ops import prefix_shared_attention_around_kernels as triton_kernels


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def both(request):
    """The device of the tensors, which the native kernels and Triton's both take."""
    if triton_around is None or (request.param == "cpu" and not INTERPRETED):
        pytest.skip(NO_INTERPRETER)
    return request.param


def as_on_a_gpu(device):
    """On a CPU the native kernels are the device's, emulated: the CPU's own have an exp of their own."""
    if device != "cpu":
        return contextlib.nullcontext()
    import emulation

    return native.emulated(emulation.module(32))


def merged_by_both(out, lse, *rest):
    """[out, lse] of the native kernel, and of Triton's."""
    found = []
    with as_on_a_gpu(out.device.type):
        for merge in (attention_merge, triton_around.attention_merge):
            mine = out.clone(), lse.clone()
            merge(*mine, *rest)
            found.append(mine)
    return found


def assert_same_merge(out, lse, *rest):
    for name, want, got in zip(("out", "lse"), *merged_by_both(out, lse, *rest), strict=True):
        assert_equal(name, got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("given", ["part", "sinks", "both"])
def test_triton_merges_to_the_same_bits(both, dtype, given):
    """Odd heads and widths, rows past a tile, views whose heads lie outside."""
    for n, heads, head_dim in [(70, 3, 64), (33, 2, 5), (1, 1, 8)]:
        out = normal(heads, n, head_dim + 3, dtype=dtype, device=both)[..., :head_dim].transpose(0, 1)
        part = normal(n, heads, head_dim, dtype=dtype, device=both, seed=1)
        lse, part_lse = (
            8 * normal(heads, n + 9, device=both)[:, 5:-4],
            8 * normal(heads, n, device=both, seed=2),
        )
        partial = (None, None) if given == "sinks" else (part, part_lse)
        assert_same_merge(out, lse, *partial, None if given == "part" else normal(heads, device=both))


def test_triton_merges_every_kind_of_lse_to_the_same_bits(both):
    """Finite, huge, denormal, infinite of both signs and NaN, each with each and under each sink."""
    kinds = torch.tensor([INF, -INF, float("nan"), 0.0, -0.0, 1.0, 88.5, -88.5, 3e38, -3e38, 1e-40, -86.99])
    wide = torch.linspace(-90, 90, 1500)  # all of exp's range, and of log's
    a = torch.cat([kinds.repeat_interleave(len(kinds)), torch.zeros_like(wide)])[None].to(both)
    b = torch.cat([kinds.repeat(len(kinds)), wide])[None].to(both)
    out, part = (normal(a.shape[1], 1, 2, device=both, seed=s) for s in (0, 1))
    out[::5], part[::7] = float("nan"), INF
    for sink in (None, INF, -INF, 0.5, float("nan")):
        assert_same_merge(out, a, part, b, None if sink is None else torch.tensor([sink], device=both))


def test_another_exp_has_other_bits(both, monkeypatch):
    """So the tests above can fail: an exp that is within a unit of ours."""
    if both != "cpu":
        pytest.skip(NO_INTERPRETER)
    import triton
    import triton.language as tl

    @triton.jit
    def exp(x):
        return tl.exp(x)

    monkeypatch.setattr(triton_kernels, "exp_exact", exp)
    out, part = normal(70, 3, 8), normal(70, 3, 8, seed=1)
    want, got = merged_by_both(out, normal(3, 70), part, normal(3, 70, seed=2))
    torch.testing.assert_close(got[0], want[0])
    assert not torch.equal(got[0], want[0])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_triton_gathers(both, dtype):
    index = torch.tensor([*range(40), 0, 39, 5, 5], device=both)
    for heads, head_dim in [(1, 8), (3, 5), (2, 128)]:
        k = normal(40, heads, head_dim, dtype=dtype, device=both)
        v = normal(heads, 40, 3 * head_dim, dtype=dtype, device=both)[..., :head_dim].transpose(0, 1)
        for x, y in zip((k, v), triton_around.gather_kv(k, v, index), strict=True):
            assert_equal("copies", y, x[index])
    assert triton_around.gather_kv(k, v, index[:0])[0].shape == (0, heads, head_dim)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_triton_reduces_to_the_same_bits(both, dtype):
    index, offsets = table([1, 0, 9, 3, *([2] * 20), 5, 0], 30, both)
    for heads, head_dim in [(3, 5), (1, 120)]:
        sources = [normal(30, heads, head_dim, dtype=dtype, device=both, seed=s) for s in (0, 1)]
        sources[0][3], sources[1][4] = INF, float("nan")
        for wide in (None, torch.float32):
            want = segment_reduce(*sources, index, offsets, wide)
            got = triton_around.segment_reduce(*sources, index, offsets, wide)
            for name, a, b in zip("kv", want, got, strict=True):
                assert_equal(name, b, a)
    nothing = triton_around.segment_reduce(*sources, index[:0], offsets[:1])
    assert nothing[0].shape == (0, heads, head_dim)
    flipped = triton_around.segment_reduce(*sources, index.flip(0), offsets, torch.float32)
    assert not torch.equal(flipped[1].nan_to_num(), got[1].nan_to_num())


def test_triton_merges_nothing(both):
    """No row, in memory that others use: nothing is written, where a launch of one block would write."""
    memory, sums = (torch.full(shape, 7.0, device=both) for shape in ((4, 2, 8), (2, 4)))
    out, lse = memory[:0], sums[:, :0]
    triton_around.attention_merge(out, lse, out, lse)
    assert memory.eq(7).all() and sums.eq(7).all()
