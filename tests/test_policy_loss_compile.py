"""policy_loss under torch.compile: one node of the graph, whatever it is asked for."""

import pytest
import torch
from bitwise import assert_equal

import rlkernel
from rlkernel.ops.policy_loss import rule as names
from rlkernel.ops.policy_loss.rollout_correction import CORRECTIONS
from rlkernel.reference.policy_loss import make_inputs

OPTIONS = {
    "plain": {},
    "everything": {"beta": 0.1, "entropy_coef": 0.01, "correction": "icepop", "delta": 2.0},
    "sequence": {"importance_sampling_level": "sequence", "loss_agg_mode": "seq-mean-token-mean"},
    "items": {"num_items_in_batch": torch.tensor(40)},
    "clip_cov": {"loss_type": "clip_cov", "clip_cov_lb": 0.0, "cov_ratio": 0.1},
    "kl_cov": {"loss_type": "kl_cov", "cov_ratio": 0.1},
}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()  # each loss type is another trace, and it counts them


def gradients(inputs, function):
    inputs = {k: v.clone().requires_grad_(k in ("logprobs", "entropy")) for k, v in inputs.items()}
    out = function(inputs)
    leaves = [inputs["logprobs"], *([inputs["entropy"]] if "entropy" in inputs else [])]
    return out.loss.detach(), out.metrics, *torch.autograd.grad(out.loss, leaves, allow_unused=True)


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("name", OPTIONS)
def test_one_graph_gives_the_same_bits(name, packed):
    inputs = make_inputs(3, 12, extras=name == "everything")
    if packed:
        inputs = {k: v.flatten() for k, v in inputs.items()} | {"cu_seqlens": torch.tensor([0, 12, 24, 36])}

    def step(x):
        return rlkernel.policy_loss(**(x | {"logprobs": x["logprobs"] * 1}), **OPTIONS[name])

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for got, want in zip(gradients(inputs, compiled), gradients(inputs, step), strict=True):
        if want is not None:
            assert_equal(name, got, want)


@pytest.mark.parametrize("loss_type", names.LOSS_TYPES)
def test_every_loss_type_traces(loss_type):
    options = {"dro_beta": 0.5} if loss_type == "dro" else {}
    compiled = torch.compile(
        lambda x: rlkernel.policy_loss(**x, loss_type=loss_type, **options).loss,
        fullgraph=True,
        backend="aot_eager",
    )
    assert compiled(make_inputs(2, 6)).isfinite()


def test_every_correction_traces():
    inputs = make_inputs(2, 6, extras=True)
    del inputs["ref_logprobs"], inputs["entropy"]

    def step(x, name):
        return rlkernel.policy_loss(**x, correction=name).loss

    for name in CORRECTIONS:
        torch._dynamo.reset()
        compiled = torch.compile(step, fullgraph=True, backend="eager")
        assert_equal(name, compiled(inputs, name), step(inputs, name))


def test_one_packed_sequence_of_a_length_that_is_a_symbol():
    inputs = {k: v.flatten() for k, v in make_inputs(1, 12, per_token=False).items()}
    inputs["cu_seqlens"] = torch.tensor([0, 12])

    def step(x):
        return rlkernel.policy_loss(**x).loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    assert inputs["advantages"].shape == (1,)
    assert_equal("loss", compiled(inputs), step(inputs))


def test_bounds_may_be_symbols():
    """All numbers are where ``dynamic`` is True."""
    inputs = make_inputs(2, 6, extras=True)
    bounds = {"clip_ratio_c": 3.0, "kl_input_clamp": 20.0, "delta": 2.0}

    def step(bounds):
        return rlkernel.policy_loss(**inputs, beta=0.1, correction="icepop", **bounds).loss

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    assert_equal("loss", compiled(bounds), step(bounds))


@pytest.mark.parametrize("extras", [False, True])
def test_opcheck(extras, monkeypatch):
    from rlkernel.ops.policy_loss import op

    inputs = make_inputs(3, 7, extras=extras)
    inputs = {k: v.requires_grad_(k in ("logprobs", "entropy")) for k, v in inputs.items()}
    options = {"beta": 0.1, "entropy_coef": 0.01, "correction": "icepop"} if extras else {}
    calls = []
    monkeypatch.setattr(op, "pick", lambda call, pick=op.pick: (calls.append(call), pick(call))[1])
    rlkernel.policy_loss(**inputs, **options)
    torch.library.opcheck(op.node, op.flat(calls[0]))
