"""Operations that torch makes of others, and of which ones it chooses by shapes and strides.

They are replaced whole, below autograd and above it.  Above, a call that is differentiated becomes one of the
operations that all batches have.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rlkernel.consistency import sharded
from rlkernel.consistency.aten_call import FLOATS, Short
from rlkernel.consistency.aten_products import product

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def linear(original: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """One product of all rows: torch gives a bias to some shapes in the product and to others behind it."""
    if sharded.is_on():
        return sharded.linear(original, x, weight, bias)
    given = (x, weight) if bias is None else (x, weight, bias)
    if not _are_plain(given) or not _fit(x, weight, bias):
        return original(x, weight, bias)
    flat = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        found = original(flat, weight, bias)
    else:
        found = product(flat, weight.t(), bias)
    return found if x.dim() == 2 else found.view(*x.shape[:-1], weight.shape[0])


def norm(original: Callable[..., Tensor], *args: Any) -> Tensor:
    """Of torch's own parts, which are replaced: what C++ takes has their bits."""
    return original(*args)


def _fit(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """What does not is torch's own to refuse."""
    fits = x.dim() > 0 and weight.dim() == 2 and x.shape[-1] == weight.shape[1] and x.dtype == weight.dtype
    return fits and (bias is None or (bias.shape == weight.shape[:1] and bias.dtype == x.dtype))


def attention_math(
    original: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    dropout_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """What torch writes out where its kernel does not take the shapes: its operation takes them here.

    A head dim of the values that is not the queries', as in DeepSeek's attention, is filled up with zeros,
    which change no sum.  The attention's weights, which nobody reads, are empty.
    """
    tensors = (query, key, value)
    masked = attn_mask is not None and attn_mask.requires_grad
    if not _are_plain(tensors) or masked or dropout_p or dropout_mask is not None or not _attends(*tensors):
        given = query, key, value, attn_mask, dropout_p, is_causal, dropout_mask
        return original(*given, scale=scale, enable_gqa=enable_gqa)
    three = query.dim() == 3
    if three:
        query, key, value = (x.unsqueeze(1) for x in tensors)
        attn_mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
    dim, value_dim = query.shape[-1], value.shape[-1]
    query, key, value = (_filled(x, max(dim, value_dim)) for x in (query, key, value))
    scale = dim**-0.5 if scale is None else scale
    out, _ = _flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)
    out = out[..., :value_dim]
    return (out.squeeze(1) if three else out), query.new_empty(0)


def _filled(x: Tensor, dim: int) -> Tensor:
    x = x if x.shape[-1] == dim else torch.nn.functional.pad(x, (0, dim - x.shape[-1]))
    return x if x.stride(-1) == 1 else x.contiguous()


def _attends(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the shapes are those of one attention, with keys that query heads may share."""
    alike = query.dim() == key.dim() == value.dim() and query.dim() in (3, 4) and query.numel() > 0
    if not alike or not query.is_cpu or not (query.dtype == key.dtype == value.dtype):
        return False
    heads = key.dim() == 3 or (
        key.shape[1] == value.shape[1] and key.shape[1] > 0 and query.shape[1] % key.shape[1] == 0
    )
    same = query.shape[0] == key.shape[0] == value.shape[0] and key.shape[-2] == value.shape[-2] > 0
    return heads and same and query.shape[-1] == key.shape[-1]


def _are_plain(tensors: tuple[Tensor, ...]) -> bool:
    """Whether nothing but autograd looks on: what records or transforms operations gets to see torch's."""
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) and x.dtype in FLOATS for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and forward_ad._current_level < 0
        and torch._C._get_tracing_state() is None
    )


SERVED: dict[str, Callable[..., Any]] = {
    "linear": Short("linear", linear),
    "layer_norm": Short("layer_norm_of_rows", norm),
    "rms_norm": Short("rms_norm_in_order", norm),
    "_scaled_dot_product_attention_math": attention_math,
}
