"""linear_logprob names what is wrong with the arguments of an FP8 head."""

import linear_logprob_cases
import pytest
import torch
from backends import needs_interpreter
from fp8_cases import check_against_fp64, make

import rlkernel

pytestmark = pytest.mark.usefixtures("poison")
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
small_tiles = linear_logprob_cases.small_tiles


WEIGHT, NAMED = torch.zeros(300, 200).to(FN), "'token', 'group', 'group_ue8m0'"
BAD = [
    (dict(weight_scale=None), "weight_scale must be given with a float8_e4m3fn weight, got None"),
    (dict(weight=torch.zeros(300, 200)), "weight must be float8_e4m3fn or float8_e4m3fnuz .*, got float32"),
    (dict(weight=WEIGHT.to(torch.float8_e5m2)), "weight must be float8_e4m3fn .*, got float8_e5m2"),
    (dict(weight=WEIGHT.clone().requires_grad_()), "weight must not require a gradient: FP8 is frozen"),
    (dict(weight=WEIGHT[:, :7]), r"weight must be \[V, 200\] with V >= 1, got \(300, 7\)"),
    (
        dict(weight_scale=torch.ones(3, 3)),
        r"weight_scale must be one value, \[300\], \[300, 1\] or \[3, 2\] for blocks of 128 x 128, got",
    ),
    (dict(weight_scale=torch.ones(200)), r"weight_scale must be one value, \[300\]"),
    (dict(weight_scale=torch.ones(3, 2).double()), "weight_scale must be float32, .*, got float64"),
    (dict(weight_scale=torch.ones(3, 2).requires_grad_()), "weight_scale must not require a gradient"),
    (dict(weight_scale=torch.tensor([[1, 1], [1, 0.0], [1, 1]])), r"weight_scale\[1, 1\] must be > 0 .* 0.0"),
    (dict(weight_scale=torch.tensor(torch.nan)), "weight_scale must be > 0 and finite, got nan"),
    (dict(weight_scale=0.5), "weight_scale must be a tensor or None, got 0.5"),
    (dict(weight_block_size=128), "weight_block_size must be two integers >= 1, got 128"),
    (dict(weight_block_size=(128, 0)), r"weight_block_size must be two integers >= 1, got \(128, 0\)"),
    (dict(weight_block_size=(64, 128)), r"\[5, 2\] for blocks of 64 x 128, got \(3, 2\)"),
    (dict(input_scale="row"), f"input_scale must be a tensor, None or one of {NAMED}, got 'row'"),
    (dict(input_scale="static"), f"input_scale must be a tensor, None or one of {NAMED}, got 'static'"),
    (dict(input_scale=0.5), "input_scale must be a tensor, None or one of .*, got 0.5"),
    (dict(input_scale=torch.ones(2)), r"input_scale must be one value, got shape \(2,\)"),
    (dict(input_scale=torch.tensor(1)), "input_scale must be float32, .*, got int64"),
    (dict(input_scale=torch.tensor(-1.0)), "input_scale must be > 0 and finite, got -1.0"),
    (
        dict(support_ids=torch.zeros(1, dtype=torch.int32), support_offsets=torch.tensor([0, 1, 1])),
        "support_ids must be None with weight_scale, got a tensor",
    ),
    (
        dict(weight=torch.zeros(300, 200), weight_scale=None, input_scale="token"),
        "input_scale must be None without weight_scale, got 'token'",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(
        hidden=torch.zeros(2, 200),
        weight=WEIGHT,
        target_ids=torch.tensor([0, 1]),
        weight_scale=torch.ones(3, 2),
    )
    rlkernel.linear_logprob(**good)
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_logprob(**good | change)


def test_what_takes_no_fp8_says_so():
    inputs = {"hidden": torch.zeros(2, 200), "weight": WEIGHT, "target_ids": torch.tensor([0, 1])}
    message = "weight must be float16, bfloat16, float32 or float64, got float8_e4m3fn"
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_logprob_statistics(**inputs)
    with pytest.raises(ValueError, match=message):
        rlkernel.sample_linear(inputs["hidden"], WEIGHT)
    rows = torch.zeros(1, 2)
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_policy_loss(
            inputs["hidden"].view(1, 2, 200), WEIGHT, inputs["target_ids"].view(1, 2), rows, rows, rows + 1
        )
    with pytest.raises(NotImplementedError, match="algorithm 'fused' is a Triton kernel"):
        rlkernel.linear_logprob(**inputs, weight_scale=torch.ones(1), algorithm="fused")


@needs_interpreter
def test_columns_that_no_step_of_the_kernel_divides():
    inputs = make(9, 70, 40, block=(16, 24))
    with (
        rlkernel.use_backend("triton"),
        pytest.raises(NotImplementedError, match="a multiple of 32, .* got 24"),
    ):
        rlkernel.linear_logprob(**inputs, input_scale="group")
    check_against_fp64("native", inputs, input_scale="group")
