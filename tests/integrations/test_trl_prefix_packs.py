"""rlkernel.patch_trl(prefix_sharing=True): old logprobs come from the packs that the loss will use.

Products of other rows are rounded otherwise, so a ratio that is 1 in TRL is 1 only in the very same pack.
Here the values of a model depend on its whole input, which shows on every processor.
"""

import pytest
import test_trl_prefix
import tiny
import torch
import transformers
import trl_prefix_cases
import trl_trainers
from trl_prefix_cases import COMPLETION, METHOD, patch_trl, samples

from rlkernel.integrations import hf

nothing_left_behind = trl_prefix_cases.nothing_left_behind


@pytest.fixture(autouse=True)
def unverified(monkeypatch):
    """A model whose values depend on its whole input is none that would be packed."""
    monkeypatch.setattr(hf, "verify", lambda model: [])


model_path, make_trainer = trl_trainers.model_path, trl_trainers.make_trainer


def by_the_whole_row(module, inputs, output):
    """Scales the embeddings by all tokens of a packed row and their order."""
    (ids,) = inputs
    if len(ids) > 1:  # generation
        return output
    place = torch.arange(1, ids.shape[1] + 1, device=ids.device)
    return output * (1 + (ids[0] * place).sum() % 97 / 97).to(output.dtype)


def train(make_trainer, algorithm="GRPO", **options):
    with patch_trl() as patch:
        trainer = make_trainer(
            algorithm,
            base=trl_trainers.recording(algorithm),
            **{"learning_rate": 0.0, "max_steps": 3} | options,
        )
        trainer.model.get_input_embeddings().register_forward_hook(by_the_whole_row)
        trainer.train()
    assert trainer.passes and patch.calls[METHOD]
    return trainer, patch


def ratios(passes):
    return max((seen.logps - seen.old)[seen.mask].abs().max().item() for seen in passes)


# how TRL comes to score old logprobs: samples of a generation over several optimiser steps, or several times
SCHEDULES = {
    "several steps": {"steps_per_generation": 3},
    "groups in two micro-batches": {
        "steps_per_generation": 4, "per_device_train_batch_size": 6, "gradient_accumulation_steps": 2,
    },
    "several epochs": {"num_iterations": 2, "per_device_train_batch_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ratio_is_1_while_nothing_is_learned(make_trainer, schedule, dtype):
    trainer, patch = train(make_trainer, model_init_kwargs={"dtype": dtype}, **SCHEDULES[schedule])
    assert not patch.fallbacks and patch.prefix.ratio > 1.3
    assert ratios(trainer.passes) == 0


def test_ratio_of_rloo(make_trainer):
    trainer, patch = train(make_trainer, "RLOO", steps_per_generation=3)
    assert not patch.fallbacks and len(trainer.passes) == 3
    for seen in trainer.passes:
        assert torch.equal((seen.logps * seen.mask).sum(1), seen.old_sums)


def test_micro_batches_that_are_left_to_trl(make_trainer):
    """Two samples of a micro-batch share too little where both were sampled behind other prompts."""
    options = {"per_device_train_batch_size": 2, "num_generations": 3, "steps_per_generation": 3}
    trainer, patch = train(make_trainer, **options)
    assert patch.calls[METHOD] and patch.fallbacks[f"{METHOD}: fewer than 1.1 tokens a row"]
    assert ratios(trainer.passes) == 0


def test_rewards_that_draw_random_numbers(make_trainer):
    """The order is settled before TRL draws it; what the rewards draw in between is theirs."""

    def noisy(completions, **_):
        return torch.rand(len(completions)).tolist()

    trainer, _ = train(make_trainer, reward=noisy, steps_per_generation=3)
    assert ratios(trainer.passes) == 0


def test_a_loss_that_is_left_to_trl_as_it_is_wrapped(make_trainer):
    """The model is compiled around the loss alone, and old logprobs come from the model inside."""
    options = {"torch_compile": True, "torch_compile_backend": "eager", "num_iterations": 2}
    with patch_trl() as patch, torch.compiler.set_stance("force_eager"):
        make_trainer(**options, max_steps=4).train()
    reason = f"{METHOD}: torch.compile would compile anew for every batch"
    assert patch.fallbacks[reason] == 2 + 4  # old logprobs, and the losses
    assert not patch.calls[METHOD]


def test_experts_run_with_the_last_tokens_in_both(make_trainer, tmp_path):
    test_trl_prefix.make_moe(vocab=len(tiny.make_tokenizer())).save_pretrained(tmp_path / "moe")
    trainer, patch = train(make_trainer, model=str(tmp_path / "moe"), steps_per_generation=3)
    assert trainer.aux_loss_enabled and not patch.fallbacks
    assert ratios(trainer.passes) == 0
    trainer.passes.clear()
    with patch_trl() as patch:
        trainer.evaluate()
    assert len(trainer.passes) == 1 and patch.calls[METHOD] == 2
    assert ratios(trainer.passes) == 0


@pytest.mark.parametrize("adapter", ["new", "trained before"])
def test_reference_of_an_adapter_needs_no_packs_of_the_loss(make_trainer, model_path, adapter):
    """Old logprobs run once a micro-batch, the reference's in as few passes as hold its rows."""
    peft = pytest.importorskip("peft", reason="needs PEFT, which rlkernel does not depend on")
    config = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False)
    options = {"per_device_train_batch_size": 2, "steps_per_generation": 4, "max_steps": 4, "beta": 0.1}
    if adapter == "new":  # the reference is the model without it
        options["peft_config"] = config
    else:  # the reference is a copy of it, called "ref"
        base = transformers.AutoModelForCausalLM.from_pretrained(model_path)
        options["model"] = peft.get_peft_model(base, config)
    trainer, patch = train(make_trainer, **options)
    assert not patch.fallbacks and patch.calls[METHOD] == 4 + 4 + 1  # old, policy, reference
    assert ratios(trainer.passes) == 0
    apart = (trainer.passes[0].old - trainer.passes[0].ref).abs().max()
    assert apart > 1e-3  # the reference's packs, and without the adapter its weights, are others


def test_aux_loss_of_several_chunks_is_trls(make_trainer, tmp_path):
    test_trl_prefix.make_moe(vocab=len(tiny.make_tokenizer())).save_pretrained(tmp_path / "moe")
    trainer = make_trainer(model=str(tmp_path / "moe"), steps_per_generation=2, per_device_train_batch_size=4)
    trainer.model.train()
    ids, mask = samples()
    inputs = ids % 40 * mask, mask, COMPLETION, 4

    def scores():
        with torch.no_grad():
            return getattr(trainer, METHOD)(trainer.model, *inputs, compute_aux_loss=True)

    stock = scores()
    with patch_trl() as patch:
        packed = scores()
    assert patch.fallbacks == {f"{METHOD}: the aux loss of several chunks": 1}
    torch.testing.assert_close(packed[2], stock[2])


@pytest.mark.parametrize("algorithm", ["GRPO", "RLOO"])
def test_interleaved_groups_in_chunks(make_trainer, algorithm):
    """Parts hold whole groups: samples 0 2 4 6, then 1 3 5 7, an order that is not its own inverse."""
    trainer = make_trainer(algorithm)
    ids, mask = samples()
    ids, mask = (x.view(2, 4, -1).transpose(0, 1).flatten(0, 1) for x in (ids % 40 * mask, mask))

    def chunks():
        method = getattr(type(trainer), METHOD)
        with torch.no_grad():
            return method(trainer, trainer.model, ids, mask, COMPLETION, 2, compute_entropy=True)[:2]

    stock = chunks()
    with patch_trl() as patch:
        packed = chunks()
    assert patch.calls[METHOD] == 1 and patch.prefix.tokens["packed"] > 2 * ids.shape[1]  # several parts
    for mine, other in zip(packed, stock, strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-6, atol=5e-6)
