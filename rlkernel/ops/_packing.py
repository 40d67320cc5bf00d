"""Packed sequences, by one rule for every op that takes ``cu_seqlens``.

Offsets rise from 0 to at most N, and the tokens behind the last sequence are padding: they count nowhere,
whatever the mask says of them, and what an op gives for them is 0.
"""

from typing import Any

import torch
from torch import Tensor

from rlkernel.ops import _validate
from rlkernel.runtime import debug


def typed(name: str, x: Tensor, tokens: str, device: torch.device) -> None:
    """``x`` is [S + 1] integers beside ``tokens``; what they are is for ``check``.  Raises ValueError."""
    is_tensor = isinstance(x, Tensor)
    if not is_tensor or x.dtype not in (torch.int32, torch.int64) or x.dim() != 1 or not len(x):
        got = f"{_validate.name(x.dtype)} {tuple(x.shape)}" if is_tensor else type(x).__name__
        raise ValueError(f"{name} must be an int32 or int64 tensor [S + 1], got {got}")
    _validate.same_device(name, x, tokens, device)


def offsets(name: str, x: Tensor, tokens: str, device: torch.device) -> Tensor:
    """``x`` as int64, side by side."""
    typed(name, x, tokens, device)
    return x.to(torch.int64).contiguous()


def sequences(name: str, x: Tensor, padded: str, cu_seqlens: Tensor | None) -> tuple[Tensor | None, int]:
    """The offsets of the sequences of ``x`` as int64, and how many they are; ``padded``: the shape that ``x``
    has without offsets.  Raises ValueError."""
    form(name, x, cu_seqlens, f"{padded}, or [N] with cu_seqlens")
    if cu_seqlens is None:
        return None, x.shape[0]
    cu_seqlens = offsets("cu_seqlens", cu_seqlens, name, x.device)
    return cu_seqlens, cu_seqlens.shape[0] - 1


def form(name: str, x: Tensor, cu_seqlens: Tensor | None, padded: str = "[B, L]") -> None:
    """``x`` is [B, L], or [N] with ``cu_seqlens``.  Raises ValueError."""
    dims, want = (2, padded) if cu_seqlens is None else (1, "[N] with cu_seqlens")
    if x.dim() != dims:
        raise ValueError(f"{name} must be {want}, got {tuple(x.shape)}")


def check(offsets: Tensor | None, total: int) -> int | None:
    """Looks at the offsets themselves: on a CPU, and on a GPU in debug mode.  Raises ValueError.

    Returns the last one, None where there is none or it may not look.
    """
    if offsets is None or not debug.may_read(offsets):
        return None
    last = int(offsets[-1])
    if int(offsets[0]) != 0 or last > total or bool((offsets.diff() < 0).any()):
        shown = offsets.tolist() if len(offsets) < 9 else f"{offsets[:4].tolist()}..{offsets[-4:].tolist()}"
        raise ValueError(f"cu_seqlens must rise from 0 to at most {total}, got {shown}")
    return last


def padded(cu_seqlens: Tensor, mask: Tensor | None, tokens: Tensor, *each: Any) -> tuple[Any, ...]:
    """The offsets, looked at, and the mask, with the padding as one more sequence of which no token counts.

    Behind them ``each``: of what is a tensor, with a value for each sequence, one more too.
    """
    if check(cu_seqlens, len(tokens)) == len(tokens):
        return cu_seqlens, mask, *each
    longer = with_padding(cu_seqlens, mask, tokens)
    return *longer, *(one_more(x) if isinstance(x, Tensor) else x for x in each)


def with_padding(offsets: Tensor, mask: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The offsets with the padding as one more sequence, and the mask, in which none of its tokens counts."""
    total = like.shape[0]
    inside = torch.arange(total, device=like.device) < offsets[-1]
    return torch.cat([offsets, offsets.new_full((1,), total)]), inside if mask is None else mask & inside


def one_more(x: Tensor) -> Tensor:
    """What each sequence has, and a 0 for the padding."""
    return torch.nn.functional.pad(x, (0, 1))  # autocast of a CPU refuses to concatenate fp16


def per_sequence(
    name: str, x: Tensor, other: str, tokens: Tensor, count: int, noun: str = "value"
) -> tuple[Tensor, bool]:
    """``x`` as ``tokens``' shape or [count], and whether it is the latter.

    Raises:
        ValueError: it is neither; or [N] where there are as many packed sequences as tokens.
    """
    packed = tokens.dim() == 1
    if not packed and (x.shape == tokens.shape or x.shape == (count,)):  # as most are
        return x, x.shape != tokens.shape
    shape = tuple(x.shape)
    if packed and shape == (count,) == tuple(tokens.shape) and count > 1:
        want = f"[1, {count}], one for each token, or [{count}, 1], one for each sequence"
        raise ValueError(f"{name} must be {want}, where there are as many sequences as tokens, got {shape}")
    if shape == tuple(tokens.shape) or (packed and shape == (1, *tokens.shape)):
        return x.reshape(tokens.shape), False
    if not _validate.among(shape, (count,), (count, 1)):
        want = f"{other}' shape {tuple(tokens.shape)} or one {noun} for each of {count} sequences"
        raise ValueError(f"{name} must have {want}, got {shape}")
    return x.reshape(count), True
