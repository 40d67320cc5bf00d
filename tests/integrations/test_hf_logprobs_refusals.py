"""What packed_logprobs leaves behind, which is nothing, and what it refuses."""

import pytest
import torch
from packed_cases import models, pack, packed_model

import rlkernel
from rlkernel.integrations.hf import lm_head

pytestmark = pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable`", "ignore:None of the inputs")


def test_nothing_is_left_behind():
    model, batch = packed_model(), pack()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    rlkernel.packed_logprobs(model, batch)
    for layer in (model.model.norm, model.lm_head):  # in front of the head, and in it

        def fails(*_):
            raise RuntimeError("in the middle")

        hook = layer.register_forward_hook(fails)
        with pytest.raises(RuntimeError, match="in the middle"):
            rlkernel.packed_logprobs(model, batch)
        hook.remove()
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before
    assert model(batch.input_ids).logits.shape == (1, batch.total, models.VOCAB)
    own = model.lm_head.forward = lambda hidden: torch.nn.functional.linear(hidden, model.lm_head.weight)
    rlkernel.packed_logprobs(model, batch)
    assert model.lm_head.forward is own


def test_a_model_that_is_not_on_packed_attention():
    with pytest.raises(ValueError, match=r"set_attn_implementation\('rlkernel'\), got 'sdpa'"):
        rlkernel.packed_logprobs(models.make("llama"), pack())


def test_a_batch_of_something_else():
    with pytest.raises(ValueError, match="batch must be a PrefixBatch, got dict"):
        rlkernel.packed_logprobs(packed_model(), {})


def test_a_model_that_does_more_to_its_logits(monkeypatch):
    model = packed_model()
    real = type(model).forward

    def doubled(self, *args, **kwargs):
        out = real(self, *args, **kwargs)
        out.logits = out.logits * 2
        return out

    monkeypatch.setattr(type(model), "forward", doubled)
    with pytest.raises(
        ValueError, match=r"logits must be scaled by 1.0 and capped at None.*got \[-80.0, -6.0"
    ):
        rlkernel.packed_logprobs(model, pack())
    model.config.logit_scale = 2.0  # as Cohere's
    rlkernel.packed_logprobs(model, pack())


def test_logits_are_looked_at_once(monkeypatch):
    model, looks = packed_model(), []
    real = lm_head.LmHead._check_probe
    monkeypatch.setattr(lm_head.LmHead, "_check_probe", lambda *a: looks.append(1) or real(*a))
    for _ in range(3):
        rlkernel.packed_logprobs(model, pack())
    assert len(looks) == 1


@pytest.mark.parametrize("option, value", (("logit_scale", 2.0), ("final_logit_softcapping", 5.0)))
def test_a_config_that_changes_after_a_good_call(option, value):
    """The look at the logits is of one scale and one softcap."""
    model = packed_model()
    first = rlkernel.packed_logprobs(model, pack()).logprobs
    setattr(model.config, option, value)  # which the model does not do
    for _ in range(2):
        with pytest.raises(
            ValueError, match="its logits must be scaled by .* and capped at .*, as its config"
        ):
            rlkernel.packed_logprobs(model, pack())
    setattr(model.config, option, None)
    assert torch.equal(rlkernel.packed_logprobs(model, pack()).logprobs, first)


def test_a_head_that_is_called_twice_or_never(monkeypatch):
    model = packed_model()
    real = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, **k: (real(self, **k), real(self, **k))[1])
    with pytest.raises(ValueError, match="must call its lm_head once, got a second call"):
        rlkernel.packed_logprobs(model, pack())
    monkeypatch.setattr(type(model), "forward", lambda self, **k: self.model(**k))
    with pytest.raises(ValueError, match="must call its lm_head once, got no call"):
        rlkernel.packed_logprobs(model, pack())


def test_a_head_of_another_kind():
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) + x.sum()

    model = packed_model()
    model.lm_head = Adapted(32, models.VOCAB)
    with pytest.raises(ValueError, match=r"its lm_head must be a torch.nn.Linear, got .*Adapted"):
        rlkernel.packed_logprobs(model, pack())


def test_refused_models_say_why():
    with pytest.raises(ValueError, match="model must run packed batches exactly: .* dropout must be 0"):
        rlkernel.packed_logprobs(packed_model(attention_dropout=0.1), pack())
