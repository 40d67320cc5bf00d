"""What the attention of a packed batch must be called with."""

from __future__ import annotations

import sys
import weakref
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rlkernel.integrations.hf.models import LAYER_TYPES
from rlkernel.prefix.batch import PrefixBatch

# What reaches an attention function and changes nothing that it computes.
IGNORED = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
        "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
        "position_ids", "return_dict", "seq_idx",
    }
)  # fmt: skip

# arguments of a model that change its mask or its positions by something else than text
NOT_TEXT = ("audio", "image", "input_features", "pixel_values", "token_type_ids", "video")

OPTIONS = ("dropout", "output_attentions", "s_aux", "scaling", "sliding_window", "softcap", "use_cache")

# of a batch: positions that were compared with its own, and at which version
_seen_positions: weakref.WeakKeyDictionary[PrefixBatch, tuple[weakref.ref[Tensor], int | None]] = (
    weakref.WeakKeyDictionary()
)


def check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not isinstance(batch, PrefixBatch):
        refuse(module, f"prefix_batch must be a PrefixBatch, got {type(batch).__name__}")
    if args:
        refuse(module, f"attention options must be given by name, got {len(args)} by position")
    if query.shape[0] != 1:
        refuse(
            module, f"input_ids must be the batch's, of shape (1, {batch.total}), got {query.shape[0]} rows"
        )
    if query.shape[2] != batch.total:
        refuse(module, f"input_ids must have the batch's {batch.total} tokens, got {query.shape[2]}")
    if key.shape[2] != batch.total:
        refuse(
            module,
            f"keys must be the batch's own {batch.total} rows, got {key.shape[2]}: there is no cache and no "
            "cross-attention in a packed batch",
        )
    if mask is not None and mask.shape[:3] != (1, 1, 1):
        refuse(module, f"attention_mask must be the batch's stand-in, got one of shape {tuple(mask.shape)}")
    if kwargs.get("use_cache"):
        refuse(module, "use_cache must be False for a packed batch, got True")
    if kwargs.get("output_attentions"):
        refuse(module, "output_attentions must be False for a packed batch, got True")
    if kwargs.get("dropout"):
        refuse(module, f"attention dropout must be 0 in training, got {kwargs['dropout']}")
    if not is_causal(module, kwargs):
        refuse(module, "attention must be causal, got is_causal=False")
    other = set(_config_layer_types(module)) - set(LAYER_TYPES)
    if other:
        refuse(module, f"layer_types must be {' or '.join(LAYER_TYPES)}, got {', '.join(sorted(other))}")
    layer_type = _layer_type(module)
    window = kwargs.get("sliding_window")
    if layer_type is not None and (layer_type == "sliding_attention") != (window is not None):
        refuse(
            module, f"sliding_window must be given to sliding_attention only, got {window} in {layer_type}"
        )
    for name, value in kwargs.items():
        if name not in OPTIONS and name not in IGNORED and value is not None:
            refuse(module, f"{name} must be None, got {type(value).__name__}: its effect is not known")
    if not _are_positions(kwargs.get("position_ids"), batch):
        refuse(module, "position_ids must be the batch's, got others")
    first = not getattr(module, "layer_idx", 0) and not torch.compiler.is_compiling()
    if first and (given := _given_beside_text()):
        refuse(module, f"{given} must be None for a packed batch: its mask is of text alone")


def is_causal(module: nn.Module, kwargs: dict[str, Any]) -> bool:
    """As transformers' own functions read it: what the call says, or else its module."""
    said = kwargs.get("is_causal")
    return bool(getattr(module, "is_causal", True) if said is None else said)


def _are_positions(found: Tensor | None, batch: PrefixBatch) -> bool:
    want = batch.position_ids
    if found is None or found is want or torch.compiler.is_compiling():
        return True
    version = None if found.is_inference() else found._version  # counts changes in place
    seen, seen_version = _seen_positions.get(batch, (None, None))
    if seen is not None and seen() is found and version is not None and seen_version == version:
        return True
    if found.shape[-1:] != want.shape[-1:] or not bool((found.to(want.device) == want).all()):
        return False
    _seen_positions[batch] = (
        weakref.ref(found),
        version,
    )  # the comparison waits for the GPU: once, not in every layer
    return True


def _given_beside_text() -> str | None:
    """The argument by which the model that is running was given images, sounds or other tokens than text.

    A model with images makes its own mask of them, and a packed batch's stand-in takes the place of it. Its
    arguments do not reach the attention; the frames of the call have them.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_name == "forward" and any(_is_beside_text(name) for name in names):
            values = frame.f_locals
            for name in filter(_is_beside_text, names):
                value = values.get(name)
                if value is not None and not (name.endswith("token_type_ids") and not bool(value.any())):
                    return name
    return None


def _is_beside_text(name: str) -> bool:
    return any(word in name for word in NOT_TEXT)


def refuse(module: nn.Module, reason: str) -> NoReturn:
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f" of layer {layer}")
    raise ValueError(f"{where}: {reason}")


def _config_layer_types(module: nn.Module) -> list[str]:
    return getattr(getattr(module, "config", None), "layer_types", None) or []


def _layer_type(module: nn.Module) -> str | None:
    """What the mask of this layer would have been; None where the model does not say."""
    types, layer = _config_layer_types(module), getattr(module, "layer_idx", None)
    if types:
        return types[layer] if isinstance(layer, int) and layer < len(types) else None
    config: Any = getattr(module, "config", None)
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if has_window else None
