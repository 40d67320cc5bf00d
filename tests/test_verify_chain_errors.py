"""What verify_chain and split_seeds refuse, in which words; and that split seeds are distinct."""

import pytest
import torch
from verify_chain_cases import case

import rlkernel

WRONG = {
    "drafts": (lambda d, x, q: {"draft_token_ids": d[:, :2]}, "draft_token_ids must have the shape (4, 3)"),
    "float drafts": (lambda d, x, q: {"draft_token_ids": d.float()}, "draft_token_ids must be integers, got"),
    "logits": (lambda d, x, q: {"target_logits": x[0]}, "target_logits must be [B, K + 1, V] with K >= 0"),
    "integers": (
        lambda d, x, q: {"target_logits": x.long()},
        "target_logits must be float16",
    ),
    "q": (
        lambda d, x, q: {"draft_logprobs": q[..., :9]},
        "draft_logprobs must be (4, 3, 150), got (4, 3, 9)",
    ),
    "probabilities": (
        lambda d, x, q: {"draft_logprobs": q.exp()},
        "draft_logprobs[0, 0] must be normalised log-probabilities, of which exp sums to 1, got a sum of 15",
    ),
    "masked q": (
        lambda d, x, q: {"draft_logprobs": q.masked_fill(q < -6, -torch.inf)},
        "draft_logprobs[0, 0] must be normalised log-probabilities, of which exp sums to 1, got a sum of 0.9",
    ),
    "q of nothing under a draft": (
        lambda d, x, q: {"draft_logprobs": torch.full_like(q, -torch.inf)},
        "draft_logprobs[0, 0] must be normalised log-probabilities, of which exp sums to 1, got a sum of 0",
    ),
    "q NaN": (
        lambda d, x, q: {"draft_logprobs": q.index_fill(1, torch.tensor(2), torch.nan)},
        "draft_logprobs[0, 2] must be normalised log-probabilities, of which exp sums to 1, got a sum of nan",
    ),
    "lengths": (
        lambda d, x, q: {"draft_lengths": torch.tensor([1, 2, 4, 0])},
        "draft_lengths[2] must be in [0, 3], got 4",
    ),
    "length shape": (
        lambda d, x, q: {"draft_lengths": torch.tensor([1])},
        "draft_lengths must be integers of shape (4,), got int64 (1,)",
    ),
    "temperature": (
        lambda d, x, q: {"temperature": torch.ones(4, 4)},
        "temperature must be one value or have shape (4,), got (4, 4)",
    ),
    "top_p": (lambda d, x, q: {"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
    "positions": (
        lambda d, x, q: {"positions": "a"},
        "positions must be a 64-bit integer or a tensor, got 'a'",
    ),
    "biases": (
        lambda d, x, q: {"logit_bias": [{1: 1.0}]},
        "logit_bias must be one dict or None for each of 4 requests, got 1",
    ),
    "penalties": (
        lambda d, x, q: {"penalties": rlkernel.Penalties(torch.zeros(2, 2, dtype=torch.int64))},
        "penalties.output_token_ids must be [4, L], got (2, 2)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    drafts, logits, q, seeds = case()
    change, message = WRONG[name]
    arguments = {"draft_token_ids": drafts, "target_logits": logits, "draft_logprobs": q, "seeds": seeds}
    with pytest.raises(ValueError) as caught:
        rlkernel.verify_chain(**{**arguments, **change(drafts, logits, q)})
    assert str(caught.value).startswith(message)


def test_split_seeds_are_distinct():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32])
    split = rlkernel.split_seeds(seeds, 2**16)
    assert split.dtype == torch.int64 and split.shape == (6, 2**16)
    assert split.flatten().unique().numel() == 6 * 2**16
    assert torch.equal(split[:, 0], seeds)
    assert torch.equal(rlkernel.split_seeds(seeds, 1), seeds[:, None])
    assert torch.equal(rlkernel.split_seeds(2**32, 5), split[5, :5])
    assert torch.equal(rlkernel.split_seeds(seeds, 5), split[:, :5])  # more samples change none


@pytest.mark.parametrize(
    ("seeds", "n", "message"),
    [
        (1, 0, "n must be an integer in [1, 2**31), got 0"),
        (1, True, "n must be an integer in [1, 2**31), got True"),
        (2**64, 1, f"seeds must be a 64-bit integer or a tensor, got {2**64}"),
        (torch.zeros(2), 1, "seeds must be integers, got float32"),
    ],
)
def test_errors_of_split_seeds(seeds, n, message):
    with pytest.raises(ValueError) as caught:
        rlkernel.split_seeds(seeds, n)
    assert str(caught.value) == message
