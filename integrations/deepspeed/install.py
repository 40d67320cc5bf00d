"""Put rlkernel under DeepSpeed: what is replaced by what, and how it is asked for."""

from __future__ import annotations

from types import ModuleType

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.deepspeed import chat, contract
from rlkernel.integrations.deepspeed.by_rows import KLDiv
from rlkernel.integrations.deepspeed.deepspeed_patch import DeepSpeedPatch
from rlkernel.integrations.deepspeed.distillation import chunked_jsd
from rlkernel.integrations.deepspeed.vocab_parallel import CrossEntropy, Entropy, LinearCrossEntropy, LogProbs


def patch(*, trainer_module: ModuleType | None = None, strict: bool = True) -> DeepSpeedPatch:
    """Put rlkernel under DeepSpeed until ``undo()``, or until the end of the ``with`` block.

    A second call while the patch is on returns the same object; a ``with`` over it leaves the patch on.  What
    is left to DeepSpeed after all is counted, warned of once a reason, and summed up in the log by
    ``undo()``.

    Args:
        trainer_module: the module of DeepSpeed-Chat's trainer, ``dschat.rlhf.ppo_trainer``, whose PPO then
            runs on rlkernel too and never builds logits.
        strict: take only the versions of DeepSpeed that have been run.  ``False`` takes any whose functions
            have the names and parameters of what is replaced.

    Raises:
        ValueError: an argument is off.
        ImportError: DeepSpeed is not installed.
        PatchError: the version of DeepSpeed is not supported, or what is to be replaced is not what that
            version has, or the patch is on for another trainer.  Nothing is replaced then.
    """
    if trainer_module is not None and not isinstance(trainer_module, ModuleType):
        raise ValueError(f"trainer_module must be a module or None, got {type(trainer_module).__name__}")
    if not isinstance(strict, bool):
        raise ValueError(f"strict must be True or False, got {strict!r}")
    if (active := DeepSpeedPatch.in_place()) is not None:
        if trainer_module not in (None, active.trainer_module):
            found = getattr(active.trainer_module, "__name__", None)
            raise PatchError(
                f"trainer_module must be what the patch in place has, {found}, got "
                f"{trainer_module.__name__}: undo it first"
            )
        return active.share()
    contract.require_version(strict)
    try:
        from deepspeed.runtime.rollout import opsd
        from deepspeed.sequence import cross_entropy, linear_cross_entropy, vocab_parallel_ops
    except ImportError as error:
        raise PatchError(
            f"DeepSpeed must have what is replaced, as {contract.SUPPORTED} has: {error}"
        ) from error

    result = DeepSpeedPatch(trainer_module)
    for module, kind, parameters in (
        (linear_cross_entropy, LinearCrossEntropy, contract.LINEAR_PARAMETERS),
        (cross_entropy, CrossEntropy, contract.CROSS_ENTROPY_PARAMETERS),
        (vocab_parallel_ops, LogProbs, contract.LOGPROBS_PARAMETERS),
        (vocab_parallel_ops, Entropy, contract.ENTROPY_PARAMETERS),
        (vocab_parallel_ops, KLDiv, contract.KL_PARAMETERS),
    ):
        original = contract.checked(module, kind.name, parameters)
        result.replace(module, kind.name, kind(original, result), expected=original)
    jsd = contract.checked(opsd, contract.JSD, contract.JSD_PARAMETERS)
    result.replace_everywhere("deepspeed", contract.JSD, chunked_jsd(jsd, result), expected=jsd)
    if trainer_module is not None:
        chat.plan(result, trainer_module)
    return result.apply()
