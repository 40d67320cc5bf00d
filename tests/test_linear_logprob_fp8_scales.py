"""Scales and codes of an FP8 head: one in a wrong place is seen, and every code is decoded."""

import linear_logprob_cases
import pytest
import torch
from backends import needs_interpreter
from bitwise import assert_equal
from fp8_cases import INPUTS, check_against_fp64, make

from rlkernel.drivers import linear_logprob_fp8 as driver
from rlkernel.drivers.linear_logprob_fp8 import Codes

pytestmark = pytest.mark.usefixtures("poison")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
small_tiles = linear_logprob_cases.small_tiles


def shifted_weight_scale(hidden, weight, scale, block, first):
    return hidden, scale.roll(1, 0)


def shifted_columns(hidden, weight, scale, block, first):
    return hidden, scale.roll(1, 1)


def shifted_groups(hidden, weight, scale, block, first):
    return hidden._replace(scale=hidden.scale.roll(1, 1)), scale


def shifted_tokens(hidden, weight, scale, block, first):
    return hidden._replace(scale=hidden.scale.roll(1, 0)), scale


@needs_interpreter
@pytest.mark.parametrize(
    "mutant",
    [shifted_weight_scale, shifted_columns, shifted_groups, shifted_tokens],
    ids=lambda x: x.__name__,
)
def test_a_scale_in_the_wrong_place_is_seen(mutant, small_tiles, monkeypatch):
    from rlkernel.triton_ops import linear_logprob_fp8

    true = linear_logprob_fp8.multiply

    def wrong(hidden, weight, scale, block, first, out):
        hidden, scale = mutant(hidden, weight, scale, block, first)
        true(hidden, weight, scale, block, first, out)

    inputs = make(11, 70, 133, ignored=0.2)
    check_against_fp64("triton", inputs, input_scale="group")
    monkeypatch.setattr(linear_logprob_fp8, "multiply", wrong)
    with pytest.raises(AssertionError, match="from fp64"):
        check_against_fp64("triton", inputs, input_scale="group")


@pytest.mark.parametrize("rounding", ["wide", "group"])
def test_a_scale_of_another_slice_is_seen(rounding, small_tiles, monkeypatch):
    """What a slice of the vocabulary would have that began to count its blocks anew."""
    true = driver.Fp8Scratch._dequantise
    monkeypatch.setattr(
        driver.Fp8Scratch, "_dequantise",
        lambda self, codes, index, out: true(self, codes, index - index[0] if len(index) else index, out),
    )  # fmt: skip
    with pytest.raises(AssertionError, match="from fp64"):
        check_against_fp64("native", make(11, 70, 133), input_scale=INPUTS[rounding])


@needs_interpreter
@pytest.mark.parametrize("fp8", [FN, FNUZ], ids=["fn", "fnuz"])
def test_every_code_is_decoded(fp8):
    """All 256 of them, times 1: subnormal numbers too, and NaN where it is NaN."""
    from rlkernel.triton_ops import linear_logprob_fp8

    codes = torch.arange(256, dtype=torch.uint8).view(fp8)
    known = ~codes.float().isnan()
    assert known.sum() == (254 if fp8 == FN else 255)
    for which in (known, ~known):
        mine = codes[which]
        n = len(mine)
        one = torch.eye(n).to(fp8)
        weight = torch.zeros(1, n).to(fp8)
        weight.view(torch.uint8)[0] = mine.view(torch.uint8)
        out = torch.full((n, 1), 7.0)
        linear_logprob_fp8.multiply(Codes(one, torch.ones(1, 1), n), weight, torch.ones(1, 1), (1, n), 0, out)
        assert_equal("decoded", out[:, 0], mine.float() + 0.0)  # a sum is no -0
