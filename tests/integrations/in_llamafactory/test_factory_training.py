"""LLaMA-Factory's trainers, stock and under rlkernel.patch_llamafactory(): the same, without logits."""

import factory
import pytest

import rlkernel

CALLS = {
    "dpo": "CustomDPOTrainer.concatenated_forward",
    "kto": "CustomKTOTrainer.forward",
    "sft": "CustomSeq2SeqTrainer.compute_loss",
}
WITHOUT = ("orpo", "simpo")  # losses without a reference


def both(stage, path, *, lora=False, settings=None, model=None, reference=None, **finetuning):
    """What a training logged and its weights, stock and patched; and the patch."""
    found = []
    model = model or (lambda: factory.model_of(path))

    def train():
        needs = stage in ("dpo", "kto") and not lora and finetuning.get("pref_loss") not in WITHOUT
        mine = model()
        given = factory.with_lora(mine) if lora else mine
        other = model() if needs else None
        found.append(factory.trained(stage, given, other, settings=settings, **finetuning))

    train()
    with rlkernel.patch_llamafactory() as patch:
        train()
    return found[1], found[0], patch


@pytest.mark.parametrize(
    "stage, options",
    [
        ("dpo", {}),
        ("dpo", {"pref_ftx": 0.5, "pref_bco_weight": 0.5, "dpo_label_smoothing": 0.2}),
        ("dpo", {"ld_alpha": 0.5}),
        ("dpo", {"pref_loss": "orpo", "pref_ftx": 0.5}),
        ("dpo", {"pref_loss": "simpo"}),
        ("dpo", {"lora": True}),
        ("dpo", {"settings": {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}}),
        ("kto", {}),
        ("kto", {"pref_ftx": 0.5, "kto_rejected_weight": 0.7}),
        ("kto", {"lora": True}),
        ("sft", {"use_dft_loss": True}),
        ("sft", {"use_dft_loss": True, "settings": {"gradient_accumulation_steps": 2, "max_steps": 2}}),
    ],
    ids=str,
)
def test_trains_the_same(model_path, stage, options):
    ours, stock, patch = both(stage, model_path, **options)
    assert patch.calls[CALLS[stage]] and not patch.fallbacks and not patch.refused, patch
    factory.check_same(ours, stock)
