"""The comparison of bits that the tests rely on."""

import bitwise
import pytest
import torch


def test_every_bit_counts_but_those_of_nan():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        x = torch.tensor([0.0, 1.0, torch.nan, torch.inf], dtype=dtype)
        bitwise.assert_equal("x", x, x.clone())
        bitwise.assert_equal("nan", x, torch.where(x.isnan(), -x, x))
        with pytest.raises(AssertionError, match=r"x\[0\] is .*-0\.?.*; 1 differ"):
            bitwise.assert_equal("x", torch.where(x == 0, -x, x), x)
    with pytest.raises(AssertionError, match="ids"):
        bitwise.assert_equal("ids", torch.tensor([1, 2]), torch.tensor([1, 3]))
