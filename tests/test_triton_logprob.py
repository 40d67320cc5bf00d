"""What only the Triton kernels of logprob promise: two ways to load a row, one result; their own tanh."""

import pytest
import torch
from backends import NO_INTERPRETER, TRITON_DEVICES
from bitwise import assert_equal

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not TRITON_DEVICES:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)
import triton.language as tl  # noqa: E402

from rlkernel.calls.logprob import LogprobCall, RowGrads  # noqa: E402
from rlkernel.triton_ops import logprob  # noqa: E402
from rlkernel.triton_ops._device import DTYPES  # noqa: E402
from rlkernel.triton_ops.logprob_kernels import bounded  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_alignment_changes_no_bit(device, dtype):
    """Aligned rows are loaded 16 bytes at a time, others entry by entry: other layouts, the same sums."""
    for vocab in (48, 9008):
        aligned = (torch.randn(3, vocab, device=device) * 4).to(dtype)
        target_ids = torch.randint(0, vocab, (3,), device=device)
        call = LogprobCall(aligned, target_ids, 0.7, -100, True)
        expected = logprob.forward(call)
        upstream = RowGrads(*torch.randn(3, 3, device=device))
        (expected_grad,) = logprob.backward(call, expected, upstream)
        for offset, stride in ((0, vocab + 1), (3, vocab + 5), (8, vocab + 16)):
            buffer = torch.full((3, stride + offset), float("nan"), dtype=dtype, device=device)
            view = buffer[:, offset : offset + vocab].copy_(aligned)
            call = LogprobCall(view, target_ids, 0.7, -100, True, True)
            results = logprob.forward(call)
            for name, a, b in zip(results._fields[:5], results, expected, strict=False):
                assert_equal(f"{name} at offset {offset}", a, b)
            (grad,) = logprob.backward(call, results, upstream)
            assert_equal(f"gradient at offset {offset}", grad.contiguous(), expected_grad)
            outside = torch.cat([buffer[:, :offset], buffer[:, offset + vocab :]], dim=1)
            assert outside.isnan().all(), "the gradient was written outside of the logits"


@triton.jit
def bounded_kernel(u, y, slope, softcap, N: tl.constexpr):
    i = tl.arange(0, N)
    a, b = bounded(tl.load(u + i), softcap)
    tl.store(y + i, a)
    tl.store(slope + i, b)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("softcap", [1.0, 30.0])
def test_softcap_is_accurate_from_tiny_to_saturated(device, softcap):
    sizes = torch.cat([torch.logspace(-30, 1.5, 3072), torch.linspace(0.5, 0.6, 1024)]) * softcap
    u = torch.where(torch.arange(4096) % 2 == 0, sizes, -sizes).to(device)
    y, slope = torch.empty_like(u), torch.empty_like(u)
    bounded_kernel[(1,)](u, y, slope, softcap, N=4096, enable_fp_fusion=False)
    x = u.double() / softcap
    exact, exact_slope = softcap * x.tanh(), x.cosh() ** -2
    ulp = torch.finfo(torch.float32).eps
    assert ((y.double() - exact).abs() / exact.abs()).max() < 4 * ulp
    # a relative error: 1 - tanh**2 has none of its digits left where tanh saturates
    assert ((slope.double() - exact_slope).abs() / exact_slope).max() < 64 * ulp


@ON_EVERY_DEVICE
def test_softcap_keeps_what_is_not_finite(device):
    u = torch.tensor([float("inf"), float("-inf"), float("nan"), 0.0], device=device)
    y, slope = torch.empty_like(u), torch.empty_like(u)
    bounded_kernel[(1,)](u, y, slope, 5.0, N=4)
    assert y[[0, 1, 3]].tolist() == [5.0, -5.0, 0.0] and y[2].isnan()
    assert slope[[0, 1, 3]].tolist() == [0.0, 0.0, 1.0] and slope[2].isnan()


def test_rows_of_two_strides_are_found():
    base = torch.empty(3, 4, 6, 8)
    assert logprob._rows(base) == (72, 72, [(0, 8)])
    assert logprob._rows(base[:, :, :-1]) == (60, 5, [(48, 8)])
    assert logprob._rows(base[:, :, :-1], torch.empty(3, 4, 5, 8)) == (60, 5, [(48, 8), (40, 8)])
    assert logprob._rows(base[:, 1:, :-1]) is None
    assert logprob._rows(torch.empty(2, 1, 8).expand(2, 5, 8)) == (10, 5, [(8, 0)])
    assert logprob._rows(torch.empty(8)) == (1, 1, [(0, 0)])
    assert logprob._rows(torch.empty(0, 5, 8))[0] == 0
