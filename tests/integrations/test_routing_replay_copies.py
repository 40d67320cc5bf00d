import copy
import io

import pytest
import torch
from replay_cases import IDS, assert_same, checkpointed, moe, other_routes

from rlkernel import routing_replay

WITH = {
    "record": lambda model: routing_replay.record(model, deterministic=True),
    "replay": lambda model: routing_replay.replay(model, other_routes(model), min_overlap=0),
    "deterministic": routing_replay.deterministic,
}


def pickled(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])  # of checkpointed ones transformers has no file
@pytest.mark.parametrize("kind", WITH)
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_copy_of_a_model_has_routers_of_its_own(kind, copied, family):
    model = moe.make(family)
    plain = moe.step(model, IDS)
    model = checkpointed(model) if copied is copy.deepcopy else model
    with WITH[kind](model):
        moe.step(model, IDS)
        model.zero_grad()
        other = copied(model)
        assert_same(moe.step(other, IDS), plain)
        assert all(p.grad is None for p in model.parameters())
    assert_same(moe.step(other, IDS), plain)
    assert_same(moe.step(copied(other), IDS), plain)
