"""The doors to other frameworks, each of which is imported when its door is used, and not before."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor, nn
from typing_extensions import Unpack

from rlkernel.prefix.batch import PrefixBatch
from rlkernel.types import (
    ArealPart,
    Dropout,
    LlamafactoryPart,
    MegatronPart,
    OpenRlhfPart,
    Require,
    SglangPart,
    SkyrlPart,
    SwiftPart,
    VerlPart,
    VllmOp,
)

if TYPE_CHECKING:  # they need the frameworks
    from rlkernel.integrations.areal.areal_patch import ArealPatch
    from rlkernel.integrations.axolotl.axolotl_patch import AxolotlPatch
    from rlkernel.integrations.deepspeed.deepspeed_patch import DeepSpeedPatch
    from rlkernel.integrations.hf.logprobs import PackedLogprobs
    from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
    from rlkernel.integrations.megatron.megatron_patch import MegatronPatch
    from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch
    from rlkernel.integrations.sglang.sglang_patch import SglangPatch
    from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch
    from rlkernel.integrations.swift.swift_patch import SwiftPatch
    from rlkernel.integrations.trl.trl_patch import TrlPatch
    from rlkernel.integrations.verl.verl_patch import VerlPatch
    from rlkernel.integrations.vllm.vllm_patch import VllmPatch


class PackedOptions(TypedDict, total=False):
    temperature: float
    return_aux_loss: bool
    max_tokens: int | None
    passes: int | None
    fp32_head: bool


def patch_areal(parts: Iterable[ArealPart] | None = None, *, strict: bool = True) -> ArealPatch:
    """Replace AReaL's log-probabilities, lm_head and advantages; see ``rlkernel.integrations.areal.patch``.

    Examples:
        >>> with rlkernel.patch_areal() as patch:
        ...     len(patch.parts)
        3
    """
    from rlkernel.integrations import areal

    return areal.patch(parts, strict=strict)


def patch_axolotl(
    *,
    prefix_sharing: bool | Require = False,
    prefix_min_ratio: float | None = None,
    dropout: Dropout = "own",
    vllm: bool | Require = True,
    strict: bool = True,
) -> AxolotlPatch:
    """Put rlkernel under axolotl's trainers, as its plugin does; see ``rlkernel.integrations.axolotl.patch``.

    Examples:
        >>> with rlkernel.patch_axolotl() as patch:
        ...     len(patch.replaced) > len(patch.trl.replaced)
        True
    """
    from rlkernel.integrations import axolotl

    return axolotl.patch(
        prefix_sharing=prefix_sharing,
        prefix_min_ratio=prefix_min_ratio,
        dropout=dropout,
        vllm=vllm,
        strict=strict,
    )


def patch_deepspeed(*, trainer_module: ModuleType | None = None, strict: bool = True) -> DeepSpeedPatch:
    """Replace DeepSpeed's losses, and DeepSpeed-Chat's PPO; see ``rlkernel.integrations.deepspeed.patch``.

    Examples:
        >>> with rlkernel.patch_deepspeed() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import deepspeed

    return deepspeed.patch(trainer_module=trainer_module, strict=strict)


def patch_llamafactory(
    parts: Iterable[LlamafactoryPart] | None = None, *, strict: bool = True
) -> LlamafactoryPatch:
    """Replace what LLaMA-Factory does with logits; see ``rlkernel.integrations.llamafactory.patch``.

    Examples:
        >>> with rlkernel.patch_llamafactory() as patch:
        ...     len(patch.parts)
        5
    """
    from rlkernel.integrations import llamafactory

    return llamafactory.patch(parts, strict=strict)


def patch_megatron(parts: Iterable[MegatronPart] | None = None, *, strict: bool = True) -> MegatronPatch:
    """Replace Megatron-Core's losses and its models' output layers; see
    ``rlkernel.integrations.megatron.patch``.

    Examples:
        >>> with rlkernel.patch_megatron() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import megatron

    return megatron.patch(parts, strict=strict)


def patch_openrlhf(parts: Iterable[OpenRlhfPart] | None = None, *, strict: bool = True) -> OpenRlhfPatch:
    """Replace OpenRLHF's actor head, losses and advantages; see ``rlkernel.integrations.openrlhf.patch``.

    Examples:
        >>> with rlkernel.patch_openrlhf() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import openrlhf

    return openrlhf.patch(parts, strict=strict)


def patch_sglang(
    parts: Iterable[SglangPart] | None = None, *, strict: bool = True, batch_invariant: bool = False
) -> SglangPatch:
    """Put rlkernel under SGLang's sampler and its prompts' log-probabilities; see
    ``rlkernel.integrations.sglang.patch``.

    Examples:
        >>> with rlkernel.patch_sglang() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import sglang

    return sglang.patch(parts, strict=strict, batch_invariant=batch_invariant)


def patch_skyrl(parts: Iterable[SkyrlPart] | None = None, *, strict: bool = True) -> SkyrlPatch:
    """Replace SkyRL's log-probabilities, losses and advantages; see ``rlkernel.integrations.skyrl.patch``.

    Examples:
        >>> with rlkernel.patch_skyrl() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import skyrl

    return skyrl.patch(parts, strict=strict)


def patch_swift(parts: Iterable[SwiftPart] | None = None, *, strict: bool = True) -> SwiftPatch:
    """Replace the logits of SWIFT's trainers, its loss of GKD and its advantages.

    See ``rlkernel.integrations.swift.patch``.

    Examples:
        >>> with rlkernel.patch_swift() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import swift

    return swift.patch(parts, strict=strict)


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
    """Replace TRL's log-probability operators by rlkernel's; see ``rlkernel.integrations.trl.patch``.

    Examples:
        >>> with rlkernel.patch_trl() as patch:
        ...     len(patch.replaced) > 0
        True
    """
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


def patch_verl(parts: Iterable[VerlPart] | None = None, *, strict: bool = True) -> VerlPatch:
    """Replace verl's log-probabilities, losses and advantages; see ``rlkernel.integrations.verl.patch``.

    Examples:
        >>> with rlkernel.patch_verl() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import verl

    return verl.patch(parts, strict=strict)


def patch_vllm(
    ops: Iterable[VllmOp] | None = None,
    *,
    strict: bool = False,
    return_support: int = 0,
    batch_invariant: bool = False,
) -> VllmPatch:
    """Put rlkernel under vLLM's sampler; see ``rlkernel.integrations.vllm.patch``.

    Examples:
        >>> with rlkernel.patch_vllm() as patch:
        ...     len(patch.replaced) > 0
        True
    """
    from rlkernel.integrations import vllm

    return vllm.patch(ops, strict=strict, return_support=return_support, batch_invariant=batch_invariant)


def unpatch_all() -> list[str]:
    """Undo every patch that is on, of whatever framework, the last one first; returns their names.

    Raises:
        PatchError: what some of them replaced has been replaced again since.  The others are undone.

    Examples:
        >>> rlkernel.unpatch_all()
        []
    """
    from rlkernel.integrations import _patch

    return _patch.undo_all()


def register_hf(name: str = "rlkernel") -> str:
    """Register packed attention with transformers; see ``rlkernel.integrations.hf.register_hf``.

    Examples:
        >>> rlkernel.register_hf()
        'rlkernel'
    """
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
    """Logprobs of a packed batch; see ``rlkernel.integrations.hf.packed_logprobs``.

    Examples:
        >>> sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
        >>> config = transformers.LlamaConfig(num_hidden_layers=1, **sizes)
        >>> model = transformers.AutoModelForCausalLM.from_config(config)
        >>> model.set_attn_implementation(rlkernel.register_hf())
        >>> batch = rlkernel.PrefixBatch.pack([[5, 6, 7]], [[[1, 2], [3]]])
        >>> batch.unpack(rlkernel.packed_logprobs(model, batch).logprobs).shape
        torch.Size([2, 2])
    """
    from rlkernel.integrations import hf

    return hf.packed_logprobs(model, batch, return_entropy=return_entropy, **options)
