"""Routing replay on mixtures of experts of transformers: a model's own record changes no bit of it."""

import contextlib
import copy
import importlib
import importlib.util
from pathlib import Path

import pytest
import torch
from replay_cases import IDS, assert_same, checkpointed, chosen, hf_routers, moe, other_routes, record

import rlkernel
from rlkernel import routing_replay

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")


@pytest.mark.parametrize("family", moe.EVERY)
def test_a_family(family):
    """Its own record changes no bit, another's is taken, checkpointed too, and all is left as it was."""
    model = moe.make(family)
    before = moe.state(model)
    wanted = moe.step(model, IDS)
    with routing_replay.record(model) as recording:
        assert_same(moe.step(model, IDS), wanted)
    assert torch.equal(recording.routes.ids, chosen(model, lambda: moe.step(model, IDS, False)))
    with routing_replay.replay(model, recording) as replay:
        assert_same(moe.step(model, IDS), wanted)
    assert replay.overlap.tolist() == [1.0] * recording.routes.layers
    routes = other_routes(model)
    with routing_replay.replay(model, routes, min_overlap=0):
        other = copy.deepcopy(moe.step(model, IDS))
        assert torch.equal(chosen(model, lambda: moe.step(model, IDS)), routes.ids)
    assert not torch.equal(other[0], wanted[0])
    assert moe.state(model) == before
    with routing_replay.replay(checkpointed(model), routes, min_overlap=0):
        assert_same(moe.step(model, IDS), other)
    for router in hf_routers.routers(model):
        assert any(bool(grad.any()) for name, grad in other[1].items() if name.startswith(router.path))


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_the_experts_may_be_summed_in_another_way(implementation):
    model = moe.make("qwen3_moe", torch.bfloat16, implementation=implementation)
    wanted = moe.step(model, IDS)
    with routing_replay.replay(model, record(model)):
        assert_same(moe.step(model, IDS), wanted)


def test_every_router_that_is_known_is_tried_and_told():
    found = {type(hf_routers.routers(moe.make(family))[0].module).__name__ for family in moe.EVERY}
    assert found == set(hf_routers.ROUTERS)
    page = (Path(__file__).parents[2] / "docs/routing_replay.md").read_text()
    told = page.partition("<!-- routers -->")[2].partition("<!-- /routers -->")[0]
    assert [name for name in sorted(found) if f"`{name}`" not in told] == []


@pytest.mark.parametrize("family", ["mixtral", "deepseek_v3"])
def test_every_attribute_is_left_as_it_was(family):
    model = checkpointed(moe.make(family))
    before = moe.state(model)
    routes = record(model)
    for patch in (
        routing_replay.record(model),
        routing_replay.replay(model, routes, deterministic=True),
        routing_replay.deterministic(model),
    ):
        assert moe.state(model) == before
        with patch:
            moe.step(model, IDS)
            assert moe.state(model) != before
        assert moe.state(model) == before
        with pytest.raises(ZeroDivisionError), patch:
            raise ZeroDivisionError
        assert moe.state(model) == before


def normalised(scores):
    return scores / scores.sum(-1, keepdim=True)


WEIGHTS = {  # of the experts' logits and of the recorded ones
    "mixtral": lambda logits, ids: normalised(logits.softmax(-1).gather(-1, ids)),
    "qwen3_moe": lambda logits, ids: normalised(logits.softmax(-1).gather(-1, ids)),
    "qwen2_moe": lambda logits, ids: logits.softmax(-1).gather(-1, ids),
    "olmoe": lambda logits, ids: logits.softmax(-1).gather(-1, ids),
    "deepseek_v3": lambda logits, ids: 2.5 * normalised(logits.sigmoid().gather(-1, ids)),
    "gpt_oss": lambda logits, ids: logits.gather(-1, ids).softmax(-1),
    # also of experts in groups that its own choice would leave out
    "deepseek_v2": lambda logits, ids: 3.0 * logits.softmax(-1).gather(-1, ids),
}


@pytest.mark.parametrize("family", WEIGHTS)
def test_a_routers_gradient_is_that_of_its_formula(family):
    """By autograd from the formula alone, in fp64."""
    options = {"routed_scaling_factor": {"deepseek_v3": 2.5, "deepseek_v2": 3.0}.get(family, 1.0)}
    model = moe.make(family, num_hidden_layers=2, mlp_only_layers=[0], **options)
    routes = other_routes(model)
    router = hf_routers.routers(model)[0].module.double()
    hidden = torch.randn(IDS.numel(), 32, dtype=torch.float64, requires_grad=True)
    weight = router.weight.detach().clone().requires_grad_()
    seen = hidden.detach().clone().requires_grad_()
    ids = routes.ids[0]
    bias = getattr(router, "bias", torch.zeros(1))
    wanted = WEIGHTS[family](seen @ weight.T + bias.detach(), ids)
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    wanted.backward(upstream)
    with routing_replay.replay(model, routes, min_overlap=0):
        _, found, experts = router(hidden)
        found.backward(upstream)
    assert torch.equal(experts, ids)
    # most routers compute their softmax or sigmoid in fp32
    for got, want in ((found, wanted), (router.weight.grad, weight.grad), (hidden.grad, seen.grad)):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


def test_a_few_tokens_are_replayed_under_batch_invariant():
    """Of which the overlap is judged over all layers together."""
    model, ids = moe.make("qwen3_moe").eval(), moe.tokens(1, 4)
    with rlkernel.batch_invariant(), torch.no_grad():
        with routing_replay.record(model) as routes:
            want = model(input_ids=ids).logits
        with routing_replay.replay(model, routes.routes):
            assert torch.equal(model(input_ids=ids).logits, want)


def test_tokens_without_a_record_route_freely():
    model = moe.make("qwen3_moe")
    free = chosen(model, lambda: moe.step(model, IDS))
    routes = other_routes(model)
    mask = torch.arange(IDS.numel()) % 3 != 0
    with routing_replay.replay(model, routes.only(torch.zeros(IDS.numel()))):
        assert torch.equal(chosen(model, lambda: moe.step(model, IDS)), free)
    with routing_replay.replay(model, routes.only(mask), min_overlap=0):
        mixed = chosen(model, lambda: moe.step(model, IDS))
    assert torch.equal(mixed[:, mask], routes.ids[:, mask])
    assert torch.equal(mixed[0, ~mask], free[0, ~mask])  # later layers see other hidden states


def test_generation_is_recorded_as_its_sequences():
    """A prompt and its tokens one by one over a KV cache: the trainer replays them over whole sequences."""
    model = moe.make("mixtral").eval()
    with routing_replay.record(model) as recording:
        ids = model.generate(IDS, max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert len(recording.passes) == 4 and ids.shape[1] == IDS.shape[1] + 4
    length = ids.shape[1] - 1  # the last token never ran
    assert recording.routes.tokens == len(ids) * length
    rows = recording.routes.split([length] * len(ids))
    with routing_replay.replay(model, routing_replay.pad_like(rows, torch.ones_like(ids))) as replay:
        moe.step(model, ids)
    assert replay.overlap.min() > 0.99
    again = record(model, ids[:, :-1])
    assert float(again.overlap(recording.routes).min()) > 0.99


def test_a_padded_and_a_packed_batch_replay_the_same_sequences():
    model = moe.make("qwen3_moe").double()
    rows = [moe.tokens(1, length, length)[0] for length in (5, 8, 3)]
    alone = [record(model, row[None]) for row in rows]
    routes = [other_routes(model, row[None], seed) for seed, row in enumerate(rows)]
    assert all(not a.equal(b) for a, b in zip(alone, routes, strict=True))
    single = []
    for row, own in zip(rows, routes, strict=True):
        with routing_replay.replay(model, own, min_overlap=0):
            single.append(moe.step(model, row[None], False)[0][0])
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = (ids != 0).long()
    with routing_replay.replay(model, routing_replay.pad_like(routes, mask), min_overlap=0):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert routing_replay.pad(routes).equal(routing_replay.pad_like(routes, mask))
    torch.testing.assert_close(logits[mask.bool()], torch.cat(single))
    packed, ends = routing_replay.pack(routes)
    assert ends.tolist() == [0, 5, 13, 16]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    with routing_replay.replay(model, packed, min_overlap=0):
        logits = model(input_ids=torch.cat(rows)[None], position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(logits[0], torch.cat(single))


def test_ties_go_to_the_lowest_expert():
    model = moe.make("qwen3_moe")
    with torch.no_grad():
        for router in hf_routers.routers(model):
            router.module.weight.zero_()
    with routing_replay.record(model, deterministic=True) as recording:
        moe.step(model, IDS)
    lowest = torch.arange(moe.TOP_K).expand_as(recording.routes.ids)
    assert torch.equal(recording.routes.ids, lowest)
    with routing_replay.deterministic(model):
        assert torch.equal(chosen(model, lambda: moe.step(model, IDS))[0], lowest[0])
    free = recording.routes.only(torch.zeros(IDS.numel()))
    with routing_replay.replay(model, free, deterministic=True):
        assert torch.equal(chosen(model, lambda: moe.step(model, IDS))[0], lowest[0])


@pytest.mark.parametrize("family", moe.SIX)
def test_experts_are_summed_from_the_first_slot_to_the_last(family):
    """In bf16, where every product of the model's own sum is rounded, and its order is bits."""
    model = moe.make(family, torch.bfloat16)
    stock = moe.step(model, IDS)
    with routing_replay.deterministic(model):
        found = copy.deepcopy(moe.step(model, IDS))
    assert not torch.equal(found[0], stock[0])
    experts = hf_routers.routers(model)[-1].block.experts
    hidden = torch.randn(5, 32).bfloat16()
    ids, weights = torch.tensor([[3, 0], [5, 7], [1, 2], [7, 6], [0, 4]]), torch.rand(5, 2).bfloat16()
    slots = [experts(hidden, ids[:, k : k + 1], torch.ones_like(weights[:, :1])) for k in range(2)]
    wanted = sum(slot.float() * weights[:, k, None].float() for k, slot in enumerate(slots))
    with routing_replay.deterministic(model):
        assert torch.equal(experts(hidden, ids, weights), wanted.bfloat16())
    model = moe.make(family, torch.float64)
    wanted = moe.step(model, IDS)
    wanted = wanted[0], copy.deepcopy(wanted[1])
    with routing_replay.deterministic(model):
        found = moe.step(model, IDS)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_a_compiled_block_routes_outside_of_its_graphs():
    model = moe.make("qwen3_moe")
    routes = other_routes(model)
    block = hf_routers.routers(model)[0].block
    hidden = torch.randn(3, 8, 32)
    with torch.no_grad():
        free = block(hidden)
        compiled = torch.compile(block, backend="eager")
        assert torch.equal(compiled(hidden), free)
        for own in (routes, routes[torch.arange(IDS.numel()).flip(0)]):
            with routing_replay.replay(model, own, min_overlap=0):
                assert torch.equal(compiled(hidden), block(hidden))
                assert not torch.equal(compiled(hidden), free)
            assert torch.equal(compiled(hidden), free)


@pytest.fixture
def one_rank():
    distributed = pytest.importorskip("torch.distributed")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "lora", "lora, routers and experts trained"])
def test_what_wraps_a_model_changes_nothing(wrapper, request):
    model = checkpointed(moe.make("qwen3_moe"))
    routes = other_routes(model)
    with routing_replay.replay(model, routes, min_overlap=0):
        wanted = copy.deepcopy(moe.step(model, IDS))
    if wrapper.startswith("lora"):
        peft = pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not need")
        more = {"modules_to_save": ["gate"], "target_parameters": ["mlp.experts.gate_up_proj"]}
        options = more if "trained" in wrapper else {}
        model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"], **options))
    else:
        request.getfixturevalue("one_rank")
        if wrapper == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (1,))
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
    assert routing_replay.moe_layers(model) == [0, 2]
    with routing_replay.replay(model, routes, min_overlap=0):
        logits, grads = moe.step(model, IDS)
        if wrapper.startswith("lora"):
            with model.disable_adapter(), torch.no_grad():  # the reference, by the original routers
                assert torch.equal(model(input_ids=IDS, use_cache=False).logits, logits)
    assert torch.equal(logits, wanted[0])
    found = 0
    for name, grad in grads.items():
        for part in ("module.", "base_model.model.", "modules_to_save.default."):
            name = name.replace(part, "")
        if name in wanted[1]:
            found += 1
            assert torch.equal(grad.full_tensor() if hasattr(grad, "full_tensor") else grad, wanted[1][name])
    assert found == {"lora": 0, "lora, routers and experts trained": 2}.get(wrapper, len(wanted[1]))


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_mixture_of_experts_has_the_same_bits_in_generation_and_training(family):
    """With operators that no batch changes, choices and sums that none changes, and the rollout's routes."""
    model = moe.make(family, attn_implementation="sdpa").eval()

    def logits_of_both(mode):
        with torch.no_grad(), mode(), routing_replay.record(model, deterministic=True) as recording:
            out = model.generate(
                IDS, max_new_tokens=4, do_sample=False, eos_token_id=None, return_dict_in_generate=True,
                output_logits=True,
            )  # fmt: skip
        ids = torch.nn.functional.pad(out.sequences, (2, 0))
        mask = torch.nn.functional.pad(torch.ones_like(out.sequences), (2, 0))
        rows = recording.routes.split([out.sequences.shape[1] - 1] * len(ids))
        routes = routing_replay.pad_like(rows, mask)
        with mode(), routing_replay.replay(model, routes, deterministic=True):
            places = (mask.cumsum(1) - 1).clamp_min(0)
            logits = model(input_ids=ids, attention_mask=mask, position_ids=places, use_cache=False).logits
        return torch.stack(out.logits, 1), logits[:, -5:-1].detach()

    rollout, trainer = logits_of_both(rlkernel.batch_invariant)
    assert torch.equal(rollout, trainer)
    rollout, trainer = logits_of_both(contextlib.nullcontext)
    assert not torch.equal(rollout, trainer)


def test_the_example_tells_what_a_replay_leaves():
    path = Path(__file__).parents[2] / "examples/routing_replay.py"
    spec = importlib.util.spec_from_file_location("routing_replay_example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    overlap, free, replayed = example.compare(layers=4, batch=8, length=12)
    assert 0.9 < float(overlap.min()) < 1
    assert replayed.kl.k3 < 0.5 * free.kl.k3


def test_the_numbers_of_layers_are_those_of_all_layers():
    assert routing_replay.moe_layers(moe.make("qwen3_moe")) == [0, 2]
    assert routing_replay.moe_layers(moe.make("mixtral")) == [0, 1, 2]
