"""Which models of transformers can run packed batches exactly."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, cast

import torch
from torch import nn

from rlkernel.prefix.batch import PrefixBatch

LAYER_TYPES = ("full_attention", "sliding_attention")
MIXERS = (
    "deltanet", "lightningattention", "linearattention", "mamba", "recurrent", "rwkv", "shortconv", "xlstm",
)  # fmt: skip
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


def causal_lm(model: nn.Module) -> Any:
    """The transformers model inside DDP, FSDP, DeepSpeed and PEFT wrappers and torch.compile's.

    Raises:
        ValueError: there is none.
    """
    from transformers import PreTrainedModel

    found: Any = model
    while not isinstance(found, PreTrainedModel):
        if any(base.__name__ in WRAPPERS for base in type(found).__mro__):
            found = found.module
        elif isinstance(
            compiled := getattr(found, "__dict__", {}).get("_modules", {}).get("_orig_mod"), nn.Module
        ):
            found = compiled
        elif callable(getattr(found, "get_base_model", None)):  # PEFT
            found = found.get_base_model()
        else:
            raise ValueError(
                "model must be a transformers model, alone or in DDP, FSDP, DeepSpeed or PEFT, got "
                f"{type(found).__name__}"
            )
    return found


def behind(model: nn.Module, cache: Any) -> dict[str, Any]:
    """The argument that gives a model its cache; transformers 5.24 has another name for it."""
    takes = inspect.signature(causal_lm(model).forward).parameters
    return {"cache" if "cache" in takes else "past_key_values": cache}


def family(model: nn.Module) -> type:
    """The transformers class of a model; FSDP 2 puts a class of its own in front of it."""
    return next(base for base in type(model).__mro__ if not base.__module__.startswith("torch."))


def is_sharded(model: nn.Module) -> bool:
    """Whether ranks hold parts of the parameters (FSDP, ZeRO-3), which each call gathers: all ranks must call
    the model equally often."""
    kinds = ("FSDPModule", "FullyShardedDataParallel")
    if any(base.__name__ in kinds for module in model.modules() for base in type(module).__mro__):
        return True
    return any(hasattr(parameter, "ds_status") for parameter in model.parameters())


def is_compiled(module: Any) -> bool:
    """Whether torch.compile made a module, or compiled its call in place."""
    if not isinstance(module, nn.Module):
        return False
    return "_orig_mod" in module._modules or module._compiled_call_impl is not None


def as_written(model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """Inside, what is compiled of a model runs as it was written."""
    if any(map(is_compiled, model.modules())):
        return torch.compiler.set_stance("force_eager")
    return contextlib.nullcontext()  # the other one imports the compiler


def _is_split(model: nn.Module) -> bool:
    """Whether layers compute with parts of their parameters (tensor parallelism)."""
    meshes = [p.device_mesh for p in model.parameters() if type(p).__name__ == "DTensor"]  # type: ignore[attr-defined]
    return bool(meshes) and (
        not is_sharded(model) or any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes)
    )


def check_model(model: nn.Module, batch: PrefixBatch | None = None) -> list[str]:
    """Why a model cannot run packed batches (or this one); empty when it can.

    Needs no forward pass.  What only a pass can show, ``packed_logprobs`` and ``every_layer`` raise.
    """
    try:
        found = causal_lm(model)
    except ValueError as error:
        return [str(error)]
    text = found.config.get_text_config()
    reasons = []
    if not family(found)._can_set_attn_implementation():  # type: ignore[attr-defined]
        reasons.append("its attention does not go through transformers' AttentionInterface")
    if _option(found.config, "is_encoder_decoder"):
        reasons.append("it is an encoder-decoder, whose attention is not all causal")
    if _option(text, "is_causal") is False or _option(text, "use_bidirectional_attention") in (True, "all"):
        reasons.append("its attention is not causal")
    if other := set(_option(text, "layer_types") or []) - set(LAYER_TYPES):
        types = ", ".join(sorted(other))
        reasons.append(f"layer_types must be {' or '.join(LAYER_TYPES)}, got {types}")
    if mixers := {type(m).__name__ for m in found.modules() if _mixes_tokens(m)}:
        reasons.append(f"{', '.join(sorted(mixers))} mix tokens of neighbouring rows")
    if _option(text, "attn_temperature_tuning"):
        reasons.append("attn_temperature_tuning counts rows, not positions")
    dropout = _option(text, "attention_dropout") or _option(text, "attn_pdrop")
    if found.training and dropout:
        reasons.append(f"attention dropout must be 0 in training, got {dropout}")
    if batch is not None and (kind := _rope_of_the_longest(text, batch)):
        reasons.append(f"{kind} RoPE changes beyond its limit with the longest sequence of a call")
    inner = [m for m in found.modules() if m is not found]
    checkpointing = found.training and any(getattr(m, "gradient_checkpointing", False) for m in inner)
    if checkpointing and any(map(is_compiled, inner)):
        reasons.append("its layers are compiled, as which gradient checkpointing would run them again")
    if _is_split(found):
        reasons.append("its layers are split over ranks by tensor parallelism")
    return [f"{family(found).__name__}: {reason}" for reason in reasons]


def _option(config: Any, name: str) -> Any:
    try:
        return getattr(config, name, None)
    except RuntimeError:  # an option of each layer; its attention checks it
        return None


def _mixes_tokens(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return isinstance(module, nn.Conv1d) or any(word in name for word in MIXERS)


def _rope_of_the_longest(text: Any, batch: PrefixBatch) -> str | None:
    """The kind of RoPE whose frequencies here are not those of a shorter sample alone."""
    rope = _option(text, "rope_parameters") or _option(text, "rope_scaling") or {}
    for parameters in [x for x in rope.values() if isinstance(x, dict)] or [rope]:  # one a layer type
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in ("dynamic", "longrope"):
            limit = parameters.get("original_max_position_embeddings") or text.max_position_embeddings
            if batch.longest > limit:  # also by tokens that have no row here
                return cast(str, kind)
    return None
