"""Trainings by SWIFT, stock and under rlkernel.patch_swift(): the same logs and weights, and no logits."""

import pytest
import swift_cases
from swift_cases import check_left, check_trained, nothing_left_behind, upstream

import rlkernel

assert nothing_left_behind and upstream  # fixtures of every test here
GRPO = "GRPOTrainer._get_per_token_logps_and_entropies_single"
DPO, KTO, CPO = (
    "DPOTrainer.concatenated_forward",
    "KTOTrainer.forward",
    "RLHFTrainerMixin.concatenated_forward",
)
ADVANTAGES = "compute_advantages"


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss_type": "dapo", "beta": 0.0, "top_entropy_quantile": 0.5, "gradient_accumulation_steps": 2},
        {"advantage_estimator": "rloo", "importance_sampling_level": "sequence", "overlong_filter": True},
    ],
    ids=["grpo", "dapo", "rloo-gspo"],
)
def test_grpo(files, options):
    check_trained("grpo", files, [GRPO, ADVANTAGES], **options)


def test_grpo_without_padding(files):
    with swift_cases.without_flash_attention():
        patch = check_trained("grpo", files, [GRPO, ADVANTAGES], padding_free=True)
    assert patch.calls[GRPO] == 7


def test_grpo_of_an_adapter(files):
    """Whose reference is the model without it."""
    check_trained("grpo", files, [GRPO, ADVANTAGES], tuner_type="lora", lora_rank=2, learning_rate=1e-1)


@pytest.mark.parametrize(
    "options",
    [{}, {"rpo_alpha": 0.5, "ld_alpha": 0.5, "loss_type": "ipo"}, {"per_device_train_batch_size": 1}],
    ids=["dpo", "rpo-ld-ipo", "one"],
)
def test_dpo(files, options):
    patch = check_trained("dpo", files, [DPO], **options)
    assert patch.calls[DPO] == 6  # of the policy and of the reference


def test_dpo_without_padding(files):
    """A row of which SWIFT asks for the logits of completions alone."""
    with swift_cases.without_flash_attention():
        check_trained("dpo", files, [DPO], padding_free=True)


def test_dpo_evaluates(files):
    options = {"eval_strategy": "steps", "eval_steps": 2, "val_dataset": str(files / "rows.jsonl")}
    patch = check_trained("dpo", files, [DPO], **options)
    assert patch.calls[DPO] > 6


def test_kto(files):
    assert check_trained("kto", files, [KTO]).calls[KTO] == 6


def test_kto_without_padding(files):
    with swift_cases.without_flash_attention():
        check_trained("kto", files, [KTO], padding_free=True)


@pytest.mark.parametrize("kind, options", [("cpo", {}), ("orpo", {}), ("cpo", {"loss_type": "simpo"})])
def test_cpo_and_orpo(files, kind, options):
    assert check_trained(kind, files, [CPO], **options).calls[CPO] == 3


@pytest.mark.parametrize("kind", ["grpo", "dpo", "cpo"])
def test_no_logits_are_made(files, kind):
    stock = swift_cases.widest(kind, files)
    with rlkernel.workspace.limited(2**20), rlkernel.patch_swift() as patch:  # of tiles of 32 rows
        ours = swift_cases.widest(kind, files)
    assert patch.calls and not patch.fallbacks
    assert stock >= 48 and ours <= 32, (stock, ours)


@pytest.mark.parametrize("parts", [["fused_head"], ["logprobs"]])
def test_parts_by_themselves(files, parts):
    stock = swift_cases.stock("dpo", files)
    with rlkernel.patch_swift(parts) as patch:
        ours = swift_cases.trained("dpo", files)
    assert set(patch.calls) == {DPO if parts == ["fused_head"] else "selective_log_softmax"}
    assert not patch.fallbacks
    swift_cases.check_same(ours, stock)


def scale(trainer):
    """A model that does something to its logits that its config does not tell."""
    forward = trainer.model.forward

    def scaled(*args, **kwargs):
        output = forward(*args, **kwargs)
        output.logits = output.logits * 1.5
        return output

    trainer.model.forward = scaled


@pytest.mark.parametrize("kind, name", [("grpo", GRPO), ("orpo", CPO)])
def test_a_model_that_changes_its_logits_is_left_to_swift(files, kind, name):
    check_left(
        kind, files, name, "its logits must be scaled by 1.0", scale, beta=0.1 if kind == "orpo" else 0.0
    )


def test_an_adapter_of_the_head_is_left_to_swift(files):
    options = {"tuner_type": "lora", "lora_rank": 2, "target_modules": ["q_proj", "lm_head"]}
    check_left("dpo", files, DPO, "its lm_head must be a torch.nn.Linear", **options)
