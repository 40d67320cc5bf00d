"""gae names what is wrong with its arguments."""

import pytest
import torch

import rlkernel
from rlkernel.reference.gae import make_inputs

pytestmark = pytest.mark.usefixtures("poison")


GOOD = {"rewards": torch.zeros(2, 3), "values": torch.zeros(2, 3)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rewards": [0.0]}, "rewards must be a tensor, got list"),
        ({"rewards": torch.zeros(2, 3, dtype=torch.int64)}, "rewards must be float16, .* got int64"),
        ({"rewards": torch.zeros(3)}, r"rewards must be \[B, L\], got \(3,\)"),
        ({"cu_seqlens": torch.tensor([0, 3])}, r"rewards must be \[N\] with cu_seqlens, got \(2, 3\)"),
        ({"values": torch.zeros(2, 4)}, r"values must have rewards' shape \(2, 3\), got \(2, 4\)"),
        ({"values": torch.zeros(2, 3, requires_grad=True)}, "values must not require a gradient"),
        ({"mask": torch.ones(2)}, r"mask must have rewards' shape \(2, 3\), got \(2,\)"),
        ({"mask": [1]}, "mask must be a tensor or None, got list"),
        ({"gamma": 1.5}, r"gamma must be in \[0, 1\], got 1.5"),
        ({"lam": -0.1}, r"lam must be in \[0, 1\], got -0.1"),
        ({"lam": float("nan")}, r"lam must be in \[0, 1\], got nan"),
        ({"lam": "x"}, "lam must be a number or a tensor, got str"),
        ({"lam": torch.ones(3)}, r"lam must be a number or have shape \(2,\), got \(3,\)"),
        ({"lam": torch.tensor([0.5, torch.nan])}, r"lam\[1\] must be in \[0, 1\], got nan"),
        ({"return_lam": 2}, r"return_lam must be in \[0, 1\], got 2"),
        ({"holes": "none"}, "holes must be one of 'skip', 'zero', got 'none'"),
        ({"holes": "zero", "last_values": torch.zeros(2)}, "last_values must be None with holes = 'zero'"),
        ({"last_values": torch.zeros(3)}, r"last_values must have shape \(2,\), got \(3,\)"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.gae(**{**GOOD, **change})


@pytest.mark.parametrize(
    "offsets, message",
    [
        ([0, 7], r"cu_seqlens must rise from 0 to at most 6, got \[0, 7\]"),
        ([1, 6], r"cu_seqlens must rise from 0 to at most 6, got \[1, 6\]"),
        ([0, 4, 3, 6], r"cu_seqlens must rise from 0 to at most 6, got \[0, 4, 3, 6\]"),
        ([], "cu_seqlens must be an int32 or int64 tensor"),
        ([0.0, 6.0], "cu_seqlens must be an int32 or int64 tensor"),
    ],
)
def test_bad_offsets_are_named(offsets, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.gae(torch.zeros(6), torch.zeros(6), cu_seqlens=torch.tensor(offsets))


def test_debug_mode_names_the_token():
    inputs = make_inputs(2, 5, masked=0)
    inputs["values"][1, 2] = torch.nan
    with (
        rlkernel.debug.checks(),
        pytest.raises(ValueError, match=r"values\[1, 2\] must be finite .*, got nan"),
    ):
        rlkernel.gae(**inputs)
    inputs["mask"][1, 2] = False
    with rlkernel.debug.checks():
        rlkernel.gae(**inputs)
