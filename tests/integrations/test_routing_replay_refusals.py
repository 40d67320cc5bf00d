"""What routing replay refuses: routes of another pass, other shapes, routers and models it does not know."""

import pytest
from replay_cases import IDS, hf_routers, moe, record, transformers

from rlkernel import routing_replay
from rlkernel.integrations._patch import PatchError
from rlkernel.routing_replay import Routes

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`")


@pytest.mark.parametrize("fault", ["layers", "shifted", "other tokens", "other model"])
def test_routes_that_are_not_this_passs_are_an_error(fault):
    model = moe.make("qwen3_moe", num_hidden_layers=6)
    ids = moe.tokens(4, 16)
    routes = record(model, ids)
    wrong = {
        "layers": lambda: routes.take_layers([1, 0, *range(2, routes.layers)]),
        "shifted": lambda: routes[1:].padded(right=1),
        "other tokens": lambda: record(model, moe.tokens(4, 16, 5)),
        "other model": lambda: record(moe.make("qwen3_moe", seed=1, num_hidden_layers=6), ids),
    }[fault]()
    message = r"at least min_overlap = 0.62 of their experts.*layers.0.mlp.gate 0\.\d\d, .*order of layers"
    with pytest.raises(ValueError, match=message), routing_replay.replay(model, wrong):
        moe.step(model, ids, False)
    with routing_replay.replay(model, wrong, min_overlap=0) as replay:
        moe.step(model, ids, False)
    assert replay.overlap is None
    with routing_replay.replay(model, wrong, min_overlap=1e-9) as replay:
        moe.step(model, ids, False)
    assert float(replay.overlap.min()) < 0.62


def test_shapes_that_do_not_fit_are_named():
    model = moe.make("qwen3_moe")
    routes = record(model)
    with pytest.raises(ValueError, match=r"top_k, num_experts = \(2, 2, 8\), the model's, got \(1, 2, 8\)"):
        routing_replay.replay(model, routes.take_layers([0]))
    other = Routes.of(routes.ids, 16)
    with pytest.raises(ValueError, match=r"= \(2, 2, 8\), the model's, got \(2, 2, 16\)"):
        routing_replay.replay(model, other)
    message = r"shape \[layers, tokens, top_k\] = \(2, 24, 2\) in this pass, got \(2, 23, 2\)"
    with pytest.raises(ValueError, match=message), routing_replay.replay(model, routes[:-1]):
        moe.step(model, IDS, False)
    with pytest.raises(ValueError, match=r"min_overlap must be in \[0, 1\], got 2"):
        routing_replay.replay(model, routes, min_overlap=2)
    with pytest.raises(ValueError, match="the model must have run inside of routing_replay.record"):
        routing_replay.replay(model, routing_replay.record(model))


def test_models_that_are_not_covered_are_refused_by_name():
    dense = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**moe.COMMON))
    with pytest.raises(ValueError, match="mixture of experts, got LlamaForCausalLM, which has no router"):
        routing_replay.record(dense)
    config = transformers.PhimoeConfig(**moe.COMMON | {"num_local_experts": 4})
    unknown = transformers.AutoModelForCausalLM.from_config(config)
    message = "got PhimoeSparseMoeBlock at model.layers.0.mlp, whose router is not known"
    with pytest.raises(ValueError, match=message):
        routing_replay.record(unknown)


def test_a_router_of_another_transformers_is_refused(monkeypatch):
    model = moe.make("mixtral")
    kind = type(hf_routers.routers(model)[0].module)
    stock = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, hidden_states, bias=None: stock(self, hidden_states))
    with pytest.raises(PatchError, match=r"MixtralTopKRouter.forward must take \(self, hidden_states\), got"):
        routing_replay.record(model)


def test_a_router_that_chooses_otherwise_is_refused(monkeypatch):
    model = moe.make("mixtral")
    kind = type(hf_routers.routers(model)[0].module)
    stock = kind.forward
    ways = {
        "must choose its experts by torch.topk": lambda self, hidden_states: hidden_states.sort(),
        "must return the experts that torch.topk chose": lambda self, hidden_states: (
            *stock(self, hidden_states)[:2],
            None,
        ),
        "must choose its experts once": lambda self, hidden_states: (
            stock(self, hidden_states) and stock(self, hidden_states)
        ),
    }
    for message, forward in ways.items():
        monkeypatch.setattr(kind, "forward", forward)
        with pytest.raises(PatchError, match=message), routing_replay.record(model):
            model(input_ids=IDS)


def test_contexts_on_one_model_do_not_nest():
    model = moe.make("mixtral")
    routes = record(model)
    before = moe.state(model)
    message = "one with of record, replay and deterministic at a time, got routing_replay.record inside of"
    with routing_replay.replay(model, routes), pytest.raises(ValueError, match=message):
        routing_replay.record(model)
    with routing_replay.deterministic(model), pytest.raises(ValueError, match="at a time"):
        routing_replay.replay(model, routes)
    assert moe.state(model) == before
