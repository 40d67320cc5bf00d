"""DFT, a loss of SFT in which a token weighs as much as it is likely: without logits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from rlkernel.integrations._replacing import shown
from rlkernel.integrations.llamafactory import contract
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.integrations.llamafactory.scoring import scored
from rlkernel.integrations.trl.logits_head import ASKED_FOR

LOSS, DFT = "compute_loss", "dft_loss_func"
WHOLE = {
    "use_eaft_loss": "EAFT weighs by the likeliest logits",
    "use_asft_loss": "ASFT compares whole distributions",
}


def plan(patch: LlamafactoryPatch) -> None:
    """Add what is replaced to a patch."""
    import llamafactory.train.sft.trainer as home
    import llamafactory.train.trainer_utils as utils

    trainer = home.CustomSeq2SeqTrainer
    contract.checked(utils, DFT)
    original = contract.checked(trainer, LOSS)
    patch.replace(trainer, LOSS, _loss(original, patch, utils), expected=original)


def _loss(original: Callable[..., Any], patch: LlamafactoryPatch, utils: ModuleType) -> Callable[..., Any]:
    dft = vars(utils)[DFT]

    def compute_loss(self: Any, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if self.compute_loss_func is not dft or "labels" not in inputs:
            if reason := next((why for name, why in WHOLE.items() if _has(self, name)), None):
                patch.left(original.__qualname__, reason)
            return original(self, model, inputs, *args, **kwargs)
        if args[:1] == (True,) or kwargs.get("return_outputs"):
            patch.left(original.__qualname__, ASKED_FOR, quiet=True)
            return original(self, model, inputs, *args, **kwargs)

        def call() -> Any:  # which takes the labels out of its inputs
            return original(self, model, dict(inputs), *args, **kwargs)

        return scored(patch, original, call, model, inputs["labels"])

    return shown(compute_loss, original, "linear_logprob")


def _has(trainer: Any, option: str) -> bool:
    return bool(getattr(trainer.finetuning_args, option, False))
