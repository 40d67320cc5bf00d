"""The doors to other frameworks, each of which is imported when its door is used, and not before."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor, nn
from typing_extensions import Unpack

from rlkernel.prefix.batch import PrefixBatch
from rlkernel.types import Dropout, Require, VllmOp

if TYPE_CHECKING:  # they need the frameworks
    from rlkernel.integrations.deepspeed.deepspeed_patch import DeepSpeedPatch
    from rlkernel.integrations.hf.logprobs import PackedLogprobs
    from rlkernel.integrations.trl.trl_patch import TrlPatch
    from rlkernel.integrations.vllm.vllm_patch import VllmPatch


class PackedOptions(TypedDict, total=False):
    temperature: float
    return_aux_loss: bool
    max_tokens: int | None
    passes: int | None
    fp32_head: bool


def patch_deepspeed(*, trainer_module: ModuleType | None = None, strict: bool = True) -> DeepSpeedPatch:
    """Replace DeepSpeed's losses, and DeepSpeed-Chat's PPO; see ``rlkernel.integrations.deepspeed.patch``."""
    from rlkernel.integrations import deepspeed

    return deepspeed.patch(trainer_module=trainer_module, strict=strict)


def patch_trl(
    *,
    prefix_sharing: bool | Require = False,
    prefix_min_ratio: float | None = None,
    dropout: Dropout = "own",
    vllm: bool | Require = True,
    support: int = 0,
    batch_invariant: bool = False,
    strict: bool = True,
) -> TrlPatch:
    """Replace TRL's log-probability operators by rlkernel's; see ``rlkernel.integrations.trl.patch``."""
    from rlkernel.integrations import trl

    return trl.patch(
        prefix_sharing=prefix_sharing,
        prefix_min_ratio=prefix_min_ratio,
        dropout=dropout,
        vllm=vllm,
        support=support,
        batch_invariant=batch_invariant,
        strict=strict,
    )


def patch_vllm(
    ops: Iterable[VllmOp] | None = None,
    *,
    strict: bool = False,
    return_support: int = 0,
    batch_invariant: bool = False,
) -> VllmPatch:
    """Put rlkernel under vLLM's sampler; see ``rlkernel.integrations.vllm.patch``."""
    from rlkernel.integrations import vllm

    return vllm.patch(ops, strict=strict, return_support=return_support, batch_invariant=batch_invariant)


def unpatch_all() -> list[str]:
    """Undo every patch that is on, of whatever framework, the last one first; returns their names.

    Raises:
        PatchError: what some of them replaced has been replaced again since.  The others are undone.
    """
    from rlkernel.integrations import _patch

    return _patch.undo_all()


def register_hf(name: str = "rlkernel") -> str:
    """Register packed attention with transformers; see ``rlkernel.integrations.hf.register_hf``."""
    from rlkernel.integrations import hf

    return hf.register_hf(name)


@overload
def packed_logprobs(
    model: nn.Module,
    batch: PrefixBatch,
    *,
    return_entropy: Literal[True],
    **options: Unpack[PackedOptions],
) -> PackedLogprobs[Tensor]: ...


@overload
def packed_logprobs(
    model: nn.Module,
    batch: PrefixBatch,
    *,
    return_entropy: Literal[False] = False,
    **options: Unpack[PackedOptions],
) -> PackedLogprobs[None]: ...


@overload
def packed_logprobs(
    model: nn.Module, batch: PrefixBatch, *, return_entropy: bool, **options: Unpack[PackedOptions]
) -> PackedLogprobs: ...


def packed_logprobs(
    model: nn.Module, batch: PrefixBatch, *, return_entropy: bool = False, **options: Any
) -> PackedLogprobs:
    """Logprobs of a packed batch; see ``rlkernel.integrations.hf.packed_logprobs``."""
    from rlkernel.integrations import hf

    return hf.packed_logprobs(model, batch, return_entropy=return_entropy, **options)
