"""What only the Triton kernels of divergence promise: the same sums in any layout, of lanes in any order."""

import math

import pytest
import torch
from backends import NO_INTERPRETER, TRITON_DEVICES
from bitwise import assert_equal

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not TRITON_DEVICES:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)
import triton.language as tl  # noqa: E402

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults  # noqa: E402
from rlkernel.triton_ops import divergence  # noqa: E402
from rlkernel.triton_ops._device import DTYPES  # noqa: E402
from rlkernel.triton_ops.divergence_kernels import sum_lanes  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beta", (0.0, 0.4, 1.0))
def test_alignment_changes_no_bit(device, dtype, beta):
    """Aligned rows are loaded 16 bytes at a time, others entry by entry: other layouts, the same sums."""
    for vocab in (48, 4304):
        x, y = (torch.randn(2, 2, vocab, device=device) * 3).to(dtype)
        y = x + y / 8
        upstream = torch.randn(2, device=device)

        def run(x, y, upstream=upstream):
            call = DivergenceCall(x, y, None, beta, 0.7, True)
            results = divergence.forward(call)
            return *results, divergence.backward(call, results, upstream)

        expected = run(x, y)
        for offset, stride in ((0, vocab + 1), (3, vocab + 5), (8, vocab + 16)):
            buffers = (torch.zeros(2, stride + offset, dtype=dtype, device=device) for _ in range(2))
            moved = [
                buffer[:, offset : offset + vocab].copy_(z) for buffer, z in zip(buffers, (x, y), strict=True)
            ]
            for pair in (moved, (x, moved[1])):
                for name, a, b in zip(
                    (*DivergenceResults._fields, "grad"), run(*pair), expected, strict=True
                ):
                    if a is not None:
                        assert_equal(f"{name} at offset {offset}", a, b)


@triton.jit
def sum_kernel(x, out, N: tl.constexpr):
    tl.store(out, sum_lanes(tl.load(x + tl.arange(0, N))))


@ON_EVERY_DEVICE
def test_the_order_of_lanes_changes_no_bit(device):
    g = torch.Generator().manual_seed(1)

    def total(x):
        out = torch.empty(1, dtype=torch.float64, device=device)
        sum_kernel[(1,)](x.to(device), out, N=len(x), enable_fp_fusion=False)
        return out.item()

    for count in (32, 512):
        x = torch.randn(count, generator=g, dtype=torch.float64) * 10.0 ** torch.randn(count, generator=g)
        orders = [torch.randperm(count, generator=g) for _ in range(10)]
        found = {total(x[order]) for order in orders}
        assert len(found) == 1 < len({sum(x[order].tolist()) for order in orders})
        assert abs(found.pop() - math.fsum(x.tolist())) <= count * 2.0**-41 * x.abs().max()
        assert total(torch.full((count,), 0.1, dtype=torch.float64)) == pytest.approx(count / 10, rel=1e-12)
        assert total(torch.zeros(count, dtype=torch.float64)) == 0
        for special, want in ((math.inf, math.inf), (-math.inf, -math.inf), (math.nan, math.nan)):
            assert total(x.index_fill(0, torch.tensor([5]), special)) == pytest.approx(want, nan_ok=True)
        x[3], x[9] = math.inf, -math.inf
        assert math.isnan(total(x))
