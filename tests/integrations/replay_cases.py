"""Calls of models of experts that the tests of routing replay share."""

import importlib
import importlib.util

import pytest
import torch

from rlkernel import routing_replay
from rlkernel.routing_replay import Routes

transformers = pytest.importorskip("transformers", reason="needs transformers, which rlkernel does not need")
moe = pytest.importorskip("moe_models")
hf_routers = importlib.import_module("rlkernel.integrations.hf.routers")

IDS = moe.tokens()


def checkpointed(model, reentrant=False):
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model


def record(model, ids=IDS):
    with routing_replay.record(model) as recording, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return recording.routes


def chosen(model, run):
    """The experts that the blocks of experts are handed while ``run()``: ``[layers, tokens, top_k]``."""
    found, hooks = [], []
    for router in hf_routers.routers(model):
        experts = router.block.experts
        hooks.append(experts.register_forward_pre_hook(lambda module, args: found.append(args[1].clone())))
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(found)


def other_routes(model, ids=IDS, seed=7):
    """Routes that the model would not choose: as many tokens, each with experts at random."""
    layers = len(hf_routers.routers(model))
    scores = torch.rand(layers, ids.numel(), moe.EXPERTS, generator=torch.Generator().manual_seed(seed))
    return Routes.of(scores.topk(moe.TOP_K).indices, moe.EXPERTS)


def assert_same(found, wanted):
    assert torch.equal(found[0], wanted[0])
    assert found[1].keys() == wanted[1].keys() and found[1]
    assert [name for name in wanted[1] if not torch.equal(found[1][name], wanted[1][name])] == []
