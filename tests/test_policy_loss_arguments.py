"""What policy_loss refuses: each error names the argument, what it must be and what it got."""

import pytest
import torch

import rlkernel
from rlkernel.ops.policy_loss import rule as names
from rlkernel.reference.policy_loss import make_inputs

BAD = {
    "loss_type must be one of grpo, ppo, dapo": {"loss_type": "grop"},
    "loss_agg_mode must be one of token-mean": {"loss_agg_mode": "mean"},
    "importance_sampling_level must be one of token, sequence, sequence_token": {
        "importance_sampling_level": "seq"
    },
    "kl_estimator must be one of k1, k1\\+, abs": {"kl_estimator": "full"},
    "epsilon must be finite and >= 0, got -0.1": {"epsilon": -0.1},
    "clip_ratio_c must be finite and > 1, got 0.5": {"clip_ratio_c": 0.5},
    "ref_logprobs must be given": {"beta": 0.1},
    "use_bias_correction_kl must be one of False, True, ratio": {"use_bias_correction_kl": "r"},
    "rollout_logprobs must be given with use_bias": {"use_bias_correction_kl": "rollout"},
    "kl_input_clamp must be finite and > 0, got -1": {"kl_input_clamp": -1.0},
    "loss_agg_mode must be 'seq-mean-token-mean'": {"token_counts": torch.ones(4)},
    "num_items_in_batch must be given with token": {
        "token_counts": torch.ones(4),
        "loss_agg_mode": "seq-mean-token-mean",
    },
    "token_counts must be one number for each of 4": {"token_counts": torch.ones(3)},
    "entropy must be given": {"entropy_coef": 0.1},
    "dro_beta must be given": {"loss_type": "dro"},
    r"cov_ratio must be in \(0, 1\]": {"loss_type": "kl_cov", "cov_ratio": 0.0},
    "num_items_in_batch must be one number": {"num_items_in_batch": torch.ones(2)},
    "num_items_in_batch must be given with dp_size = 2": {"dp_size": 2},
    "correction must be one of token_tis": {"correction": "tis"},
    "rollout_logprobs must be given": {"correction": "token_tis"},
    r"old_logprobs must have logprobs' shape \(4, 12\), got \(4, 11\)": {"old_logprobs": torch.zeros(4, 11)},
    r"mask must have logprobs' shape": {"mask": torch.ones(4, 11)},
    "advantages must have logprobs' shape": {"advantages": torch.zeros(3)},
    "logprobs must be float16": {"logprobs": torch.zeros(4, 12, dtype=torch.int64)},
    r"logprobs must be \[N\] with cu_seqlens": {"cu_seqlens": torch.tensor([0, 12])},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_argument_is_named(message):
    with pytest.raises(ValueError, match=message):
        rlkernel.policy_loss(**(make_inputs(4, 12) | BAD[message]))


def test_offsets_are_looked_at():
    inputs = {k: v[0] for k, v in make_inputs(1, 12).items()}
    for offsets in ([0, 13], [1, 12], [0, 8, 4, 12]):
        with pytest.raises(ValueError, match="cu_seqlens must rise from 0 to at most 12"):
            rlkernel.policy_loss(**inputs, cu_seqlens=torch.tensor(offsets))


def test_an_unknown_loss_type_lists_exactly_the_known_ones():
    with pytest.raises(ValueError) as raised:
        rlkernel.policy_loss(**make_inputs(1, 2), loss_type="?")
    assert str(raised.value) == f"loss_type must be one of {', '.join(names.LOSS_TYPES)}, got '?'"
