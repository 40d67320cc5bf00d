"""Routing replay and the passes of training: what is computed again takes the routes of its own pass."""

import copy

import pytest
import torch
from replay_cases import IDS, assert_same, checkpointed, hf_routers, moe, other_routes, record

from rlkernel import routing_replay

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")

REENTRANT = (False, True)


@pytest.mark.parametrize("reentrant", REENTRANT, ids=("not reentrant", "reentrant"))
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_checkpointing_computes_the_same_routes_again(family, reentrant):
    """Micro-batches of several routes, whose backwards run in another order, and after the ``with``."""
    model = moe.make(family)
    batches = [moe.tokens(2, 6, seed) for seed in (1, 2)]
    routes = [other_routes(model, ids, seed) for seed, ids in enumerate(batches)]

    def grads(order):
        model.zero_grad(set_to_none=True)
        with routing_replay.replay(model, routes[0], min_overlap=0) as replay:
            losses = []
            for ids, own in zip(batches, routes, strict=True):
                replay.use(own)
                losses.append(model(input_ids=ids, use_cache=False).logits.square().sum())
            losses[order[0]].backward()
        with routing_replay.replay(model, other_routes(model, batches[0], 9), min_overlap=0):
            losses[order[1]].backward()
        return moe.gradients(model)

    wanted = {order: copy.deepcopy(grads(order)) for order in ((0, 1), (1, 0))}
    checkpointed(model, reentrant)
    model.enable_input_require_grads()  # reentrant checkpoints need it
    for order, want in wanted.items():
        found = grads(order)
        assert [name for name in want if not torch.equal(found[name], want[name])] == []


def test_torchs_own_wrapper_of_checkpoints_computes_the_same_routes_again():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper

    model = moe.make("qwen3_moe")
    routes = other_routes(model)
    with routing_replay.replay(model, routes, min_overlap=0):
        wanted = copy.deepcopy(moe.step(model, IDS))
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = checkpoint_wrapper.checkpoint_wrapper(layer)
    with routing_replay.replay(model, routes, min_overlap=0):
        found = moe.step(model, IDS)
    assert torch.equal(found[0], wanted[0])
    plain = {name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in found[1].items()}
    assert [name for name, grad in wanted[1].items() if not torch.equal(plain[name], grad)] == []


def test_several_passes_of_one_micro_batch_replay_the_same_routes():
    """The policy's pass, and those of old and reference logprobs without a gradient, in any order."""
    model = checkpointed(moe.make("qwen3_moe"))
    reference = moe.make("qwen3_moe")
    routes = other_routes(model)
    with routing_replay.replay(model, routes, min_overlap=0):
        wanted = copy.deepcopy(moe.step(model, IDS))
    with (
        routing_replay.replay(model, routes, min_overlap=0),
        routing_replay.replay(reference, routes, min_overlap=0),
    ):
        logits = model(input_ids=IDS, use_cache=False).logits
        with torch.no_grad():
            old = model(input_ids=IDS, use_cache=False).logits
            assert torch.equal(reference(input_ids=IDS, use_cache=False).logits, old)
        model.zero_grad(set_to_none=True)
        (logits * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
    assert torch.equal(logits, old)
    assert_same((logits, moe.gradients(model)), wanted)


def test_a_checkpoint_that_replay_does_not_know_of_is_an_error():
    model = moe.make("qwen3_moe")
    routes = record(model)
    with routing_replay.replay(model, routes):
        loss = checkpointed(model)(input_ids=IDS, use_cache=False).logits.sum()
        with pytest.raises(RuntimeError, match="layers.2.mlp.gate must be computed again by a checkpoint"):
            loss.backward()


def test_later_passes_over_the_same_routes_are_not_compared_again():
    model = moe.make("qwen3_moe")
    routes = record(model)
    with routing_replay.replay(model, routes) as replay:
        moe.step(model, IDS, False)
        with torch.no_grad():
            for router in hf_routers.routers(model):
                router.module.weight.neg_()
        moe.step(model, IDS, False)
        replay.use(routes)
        with pytest.raises(ValueError, match="min_overlap"):
            moe.step(model, IDS, False)
        assert float(replay.overlap.max()) < 0.5
