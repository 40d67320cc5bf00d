"""What rlkernel.patch_trl() replaces in an earlier TRL, what it leaves, and what it refuses."""

import sys
import warnings

import earlier
import pytest
import torch

import rlkernel
from rlkernel.integrations._patch import PatchError

METHOD = "_get_per_token_logps_and_entropies"
METHODS = [(earlier.trl.GRPOTrainer, earlier.SCORES), (earlier.trl.DPOTrainer, "_compute_loss")]


def test_comes_and_goes():
    before = [vars(owner)[name] for owner, name in METHODS]
    with rlkernel.patch_trl() as patch:
        for (owner, name), original in zip(METHODS, before, strict=True):
            assert vars(owner)[name] is not original
            assert patch.replaced[f"{owner.__module__}.{owner.__name__}.{name}"] == "rlkernel.linear_logprob"
        assert rlkernel.patch_trl() is patch
    assert [vars(owner)[name] for owner, name in METHODS] == before


@pytest.mark.parametrize("options", [{"support": 8}, {"batch_invariant": True}])
def test_what_needs_the_fused_head_is_refused(options):
    before = [vars(owner)[name] for owner, name in METHODS]
    ((name, value),) = options.items()
    with pytest.raises(PatchError, match=f"{name} must be left alone before TRL 1.15, got {value}"):
        rlkernel.patch_trl(**options)
    assert [vars(owner)[name] for owner, name in METHODS] == before


def test_a_method_of_somebody_else_is_refused(monkeypatch):
    def other(self, model):
        return None

    monkeypatch.setattr(earlier.trl.RLOOTrainer, METHOD, other)
    with pytest.raises(
        PatchError, match=r"RLOOTrainer\._get_per_token_logps.* must take \(self, model, input_ids"
    ):
        rlkernel.patch_trl()


def somebody_elses(logits, index):
    return logits.float().log_softmax(-1).gather(-1, index.unsqueeze(-1)).squeeze(-1)


def rows_of_somebody_else(logits, index, temperature=1.0, row_mask=None):
    logprobs = somebody_elses(logits / temperature, index)
    return logprobs if row_mask is None else logprobs.masked_fill(row_mask == 0, 0)


HELPER = rows_of_somebody_else if earlier.VERSION.release >= (1, 14) else somebody_elses


@pytest.mark.parametrize("modules", [["utils"], ["grpo_trainer", "dpo_trainer"]])
@pytest.mark.parametrize("algorithm", ["GRPO", "DPO"])
def test_a_helper_that_somebody_replaced_in_one_place(model_path, monkeypatch, algorithm, modules):
    """As axolotl does in ``utils``, after the trainers have taken theirs from it."""
    stock = earlier.trained(algorithm, model_path, max_steps=2)
    for module in modules:
        monkeypatch.setattr(f"trl.trainer.{module}.selective_log_softmax", HELPER)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained(algorithm, model_path, max_steps=2)
    assert all(name.startswith(f"{algorithm}Trainer.") for name in patch.calls) and not patch.fallbacks
    earlier.check_same(patched, stock)
    assert [vars(sys.modules[f"trl.trainer.{m}"])["selective_log_softmax"] for m in modules] == [
        HELPER for _ in modules
    ]


def test_a_helper_that_somebody_replaces_afterwards(model_path, monkeypatch):
    stock = earlier.trained("RLOO", model_path, max_steps=2)
    with rlkernel.patch_trl() as patch, monkeypatch.context() as later:
        later.setattr("trl.trainer.rloo_trainer.selective_log_softmax", HELPER)
        with pytest.warns(UserWarning, match="rloo_trainer.selective_log_softmax is somebody else's"):
            patched = earlier.trained("RLOO", model_path, max_steps=2)
    assert not patch.calls[f"RLOOTrainer.{METHOD}"]
    earlier.check_same(patched, stock, weight=1e-4)


def test_an_adapter_of_the_head_is_left_to_trl(model_path):
    from peft import LoraConfig

    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "lm_head"]), "max_steps": 2}
    torch.manual_seed(0)
    stock = earlier.trained("DPO", model_path, **options)
    torch.manual_seed(0)
    with pytest.warns(
        UserWarning, match=r"leaves DPOTrainer._compute_loss to TRL: .*must be a torch.nn.Linear"
    ):
        patch = rlkernel.patch_trl()
        patched = earlier.trained("DPO", model_path, **options)
        patch.undo()
    assert patch.calls["selective_log_softmax"] or patch.calls["selective_log_softmax_and_entropy"]
    earlier.check_same(patched, stock)


def test_an_adapter_beside_the_head_is_not(model_path):
    """The reference is the model without its adapter, inside the same loss."""
    from peft import LoraConfig

    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj", "v_proj"])}
    torch.manual_seed(0)
    stock = earlier.trained("DPO", model_path, **options)
    torch.manual_seed(0)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained("DPO", model_path, **options)
    assert patch.calls == {"DPOTrainer._compute_loss": 3} and not patch.fallbacks
    earlier.check_same(patched, stock)


@pytest.mark.parametrize("algorithm", ["DPO", "KTO"])
def test_an_adapter_with_a_head_of_its_own(model_path, algorithm):
    """The reference, inside the same loss, is the model without the adapter, and without its lm_head."""
    from peft import LoraConfig

    options = {"peft_config": LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"])}
    torch.manual_seed(0)
    stock = earlier.trained(algorithm, model_path, **options)
    torch.manual_seed(0)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained(algorithm, model_path, **options)
    served = algorithm == "DPO" or earlier.VERSION.release >= (1, 9)
    assert patch.calls[f"{algorithm}Trainer._compute_loss"] == (3 if served else 0) and not patch.fallbacks
    earlier.check_same(patched, stock, 1e-4)


def test_outputs_with_logits_are_left_to_trl(model_path):
    def metrics(prediction):
        return {"width": prediction.predictions.shape[-1]}

    with warnings.catch_warnings(), rlkernel.patch_trl() as patch:
        warnings.filterwarnings("error", message=".*leaves.*")
        found = earlier.make("DPO", model_path, compute_metrics=metrics).evaluate()
    assert found["eval_width"] == 2048
    assert patch.fallbacks == {"DPOTrainer._compute_loss: the logits are asked for": 1}


def test_weighting_is_left_to_trl(model_path):
    stock = earlier.trained("DPO", model_path, use_weighting=True)
    with pytest.warns(UserWarning, match="use_weighting reads the logits"):
        patch = rlkernel.patch_trl()
        patched = earlier.trained("DPO", model_path, use_weighting=True)
        patch.undo()
    earlier.check_same(patched, stock)


def test_a_model_that_changes_its_logits_is_left_to_trl(model_path):
    """Which its first call shows.  This one takes no logits_to_keep either, so that TRL chooses the rows."""
    from transformers import AutoModelForCausalLM

    def strange():
        model = AutoModelForCausalLM.from_pretrained(model_path)
        forward = model.forward

        def scaled(input_ids=None, attention_mask=None, **kwargs):
            output = forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)
            output.logits = output.logits * 1.5
            return output

        model.forward = scaled
        return model

    stock = earlier.trained("RLOO", strange(), beta=0.0)
    with pytest.warns(UserWarning, match="its logits must be scaled by 1.0"):
        patch = rlkernel.patch_trl()
        patched = earlier.trained("RLOO", strange(), beta=0.0)
        patch.undo()
    assert not patch.calls["RLOOTrainer._get_per_token_logps_and_entropies"]
    earlier.check_same(patched, stock)


def test_a_model_that_keeps_all_logits(model_path):
    from transformers import AutoModelForCausalLM

    def without_logits_to_keep():
        model = AutoModelForCausalLM.from_pretrained(model_path)
        forward = model.forward
        model.forward = lambda input_ids=None, attention_mask=None, **kwargs: forward(
            input_ids=input_ids, attention_mask=attention_mask, **kwargs
        )
        return model

    stock = earlier.trained("GRPO", without_logits_to_keep(), beta=0.0, temperature=0.7)
    with rlkernel.patch_trl() as patch:
        patched = earlier.trained("GRPO", without_logits_to_keep(), beta=0.0, temperature=0.7)
    assert patch.calls == {f"GRPOTrainer.{earlier.SCORES}": 3} and not patch.fallbacks
    earlier.check_same(patched, stock)


def test_a_reference_is_left_with_its_policy(model_path):
    """Whose values are the reference's own at first, and would differ by rounding."""
    from transformers import AutoModelForCausalLM

    class OtherLinear(torch.nn.Linear):
        def forward(self, hidden):
            return super().forward(hidden)

    model = AutoModelForCausalLM.from_pretrained(model_path)
    model.lm_head.__class__ = OtherLinear
    with pytest.warns(UserWarning, match="its lm_head must be a torch.nn.Linear"):
        patch = rlkernel.patch_trl()
        earlier.make("DPO", model, max_steps=1).train()
        patch.undo()
    assert not patch.calls["DPOTrainer._compute_loss"]
