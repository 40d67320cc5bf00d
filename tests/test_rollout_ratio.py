"""The example of a filtered rollout: the trainer that knows the kept tokens has the sampler's bits."""

import importlib.util
from pathlib import Path

import pytest
import torch

_SPEC = importlib.util.spec_from_file_location(
    "rollout_ratio", Path(__file__).parent.parent / "examples" / "rollout_ratio.py"
)
example = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)


@pytest.fixture(scope="module")
def policy():
    return 2.5 * torch.randn(300, 300, generator=torch.Generator().manual_seed(0))


def test_the_ratio_is_exactly_one_with_the_kept_tokens_alone(policy):
    raw, tempered, kept = example.ratios(policy, 0.9, batch=16, length=20, top_p=0.8).values()
    assert (kept == 1).all()
    assert (tempered < 0.9).double().mean() > 0.5, "without the kept tokens a top_p of 0.8 shows"
    assert (raw == 1).double().mean() < 0.1


def test_a_request_draws_the_same_in_another_batch(policy):
    tokens = example.rollout(policy, 8, 12, temperature=0.9, top_p=0.8)[0]
    alone = example.rollout(policy, 3, 12, temperature=0.9, top_p=0.8)[0]
    assert torch.equal(tokens[:3], alone)
