"""``rlkernel.testing``: each assertion holds for what is right, and fails for the smallest other thing."""

import math

import pytest
import torch
from hypothesis import find, given, settings

from rlkernel import testing

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_ulps_count_numbers(dtype):
    numbers = [0.0, 1.0, -1.0, torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 2]
    x = torch.tensor(numbers, dtype=dtype)
    up = torch.full_like(x, math.inf)
    if dtype in (torch.float32, torch.float64):
        y = x
        for steps in range(1, 4):
            y = torch.nextafter(y, up)
            inside = y.isfinite()
            assert testing.ulps(x, y)[inside].tolist() == [steps] * int(inside.sum())
    assert testing.ulps(x, x).eq(0).all()
    assert testing.ulps(-x, x)[0] == 0  # -0 and 0
    tiny = torch.zeros(1, dtype=dtype).view(testing._INTEGERS[x.element_size()])
    low, high = (tiny + 1).view(dtype), -(tiny + 1).view(dtype)
    assert testing.ulps(low, high).item() == 2
    nan, one = torch.full((1,), math.nan, dtype=dtype), torch.ones(1, dtype=dtype)
    assert testing.ulps(nan, -nan).item() == 0 and testing.ulps(nan, one).item() == 2**62
    inf = one * math.inf
    assert testing.ulps(inf, torch.full_like(one, torch.finfo(dtype).max)).item() == 1
    assert testing.ulps(inf, -inf).item() >= testing.ulps(inf, one).item() > 2


def test_close_in_ulps_says_where_and_how_far():
    x = torch.linspace(1, 2, 5)
    y = x.clone()
    y[3] = torch.nextafter(torch.nextafter(y[3], y[4]), y[4])
    testing.assert_close_ulps(x, y, 2)
    with pytest.raises(AssertionError, match=r"gradient\[3\] is .*, 2 units .* at most 1 .*; 1 are further"):
        testing.assert_close_ulps(x, y, 1, "gradient")
    with pytest.raises(
        AssertionError, match=r"result must be \(5,\) torch.float64, got \(5,\) torch.float32"
    ):
        testing.assert_close_ulps(x, y.double(), 9)
    with pytest.raises(ValueError, match="got must be floating-point, got torch.int64"):
        testing.ulps(x.long(), x.long())


def test_bitwise_tells_zeros_apart_and_no_nan():
    x = torch.tensor([0.0, math.nan, 1.0])
    testing.assert_bitwise(x, x.clone())
    with pytest.raises(AssertionError, match=r"out\[0\] is .*; 1 differ"):
        testing.assert_bitwise(x * torch.tensor([-1.0, 1.0, 1.0]), x, "out")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu])
def test_fp8_has_bits_and_ulps(dtype):
    one, two = (torch.tensor([x]).to(dtype) for x in (1.0, 2.0))
    testing.assert_bitwise(one, one.clone())
    with pytest.raises(AssertionError, match="1 differ"):
        testing.assert_bitwise(one, two)
    mantissa = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2, torch.float8_e8m0fnu: 0}[dtype]
    assert testing.ulps(one, two).item() == 2**mantissa
    testing.assert_close_ulps(one, two, 2**mantissa)


def test_bits_of_complex_numbers():
    x = torch.tensor([0j, complex(1, math.nan)])
    testing.assert_bitwise(x, x.clone())
    with pytest.raises(AssertionError, match="1 differ"):
        testing.assert_bitwise(torch.tensor([complex(-0.0, 0.0), complex(1, math.nan)]), x)


def test_budget_is_twice_torchs_error_and_a_unit():
    truth = torch.tensor([1.0, math.inf, math.nan], dtype=torch.float64)
    torchs = (truth + 1e-5).float()
    testing.assert_within_budget((truth + 2e-5).float(), torchs, truth)
    testing.assert_within_budget((truth + 1e-7).float(), truth.float(), truth)  # a unit, where torch is exact
    with pytest.raises(AssertionError, match="loss: 3.0.*e-05 from fp64, PyTorch 1.0.*e-05"):
        testing.assert_within_budget((truth + 3e-5).float(), torchs, truth, "loss")
    with pytest.raises(AssertionError, match="non-finite values differ"):
        testing.assert_within_budget(torch.tensor([1.0, 3e38, math.nan]), torchs, truth)


def test_a_batch_that_shows_is_found():
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    testing.assert_batch_invariant(lambda x: x.softmax(-1), x)
    with pytest.raises(AssertionError):
        testing.assert_batch_invariant(lambda x: x - x.mean(), x)


def test_poison_is_no_result():
    assert testing.poisoned(2, 3).isnan().all() and testing.poisoned(2, dtype=torch.bfloat16).isnan().all()
    assert testing.poisoned(2, dtype=torch.int32).tolist() == [-(2**31)] * 2
    assert testing.poisoned(2, dtype=torch.bool).all() and testing.poisoned(1, dtype=torch.complex64).isnan()


def test_shapes_find_tails():
    """An operator that forgets the tail of a row, and one that cannot take an empty batch."""

    def forgets(rows, vocab):
        return vocab > 8 and vocab % 8 == 1

    strategy = testing.shapes((0, 3), (1, 70), width=8)
    assert forgets(*find(strategy, lambda shape: forgets(*shape)))
    assert find(strategy, lambda shape: shape[0] == 0)[0] == 0

    @settings(max_examples=20, deadline=None)
    @given(testing.shapes((1, 3), (1, 40), make=lambda shape: torch.ones(shape)))
    def inside(x):
        assert x.dim() == 2 and 1 <= x.shape[0] <= 3 and 1 <= x.shape[1] <= 40

    inside()
