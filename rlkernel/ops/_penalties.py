"""Penalties on tokens that have appeared."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.ops import _validate


class Penalties(NamedTuple):
    """Penalties of each request on the tokens that its prompt and its output hold already.

    Equal to, for a token that appears c times in the output,

        z = (z / repetition if z > 0 else z * repetition)   if it is in the prompt or the output
        z = z - frequency * c - presence * (c > 0)

    ``prompt_token_ids`` [B, P] and ``output_token_ids`` [B, L] are integers, padded with any id outside
    [0, V); ``repetition`` > 0 (1: none), ``frequency`` and ``presence`` (0: none) are numbers or [B].
    Follows vLLM's ``apply_all_penalties`` and OpenAI's definition of the last two.
    """

    output_token_ids: Tensor
    prompt_token_ids: Tensor | None = None
    repetition: float | Tensor = 1.0
    frequency: float | Tensor = 0.0
    presence: float | Tensor = 0.0

    def apply(self, z: Tensor) -> Tensor:
        """The logits ``z`` [B, V] after the penalties; raises ValueError for what is off."""
        said = _counts("output_token_ids", self.output_token_ids, z)
        seen = said > 0
        if self.prompt_token_ids is not None:
            seen = seen | (_counts("prompt_token_ids", self.prompt_token_ids, z) > 0)
        factor = _column("repetition", self.repetition, z)
        z = torch.where(seen, torch.where(z > 0, z / factor, z * factor), z)
        z = z - _column("frequency", self.frequency, z) * said
        return z - _column("presence", self.presence, z) * (said > 0)


def _counts(argument: str, ids: Tensor, z: Tensor) -> Tensor:
    """How often each token appears [B, V]."""
    rows, vocab = z.shape
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        got = _validate.name(ids.dtype) if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"penalties.{argument} must be an int32 or int64 tensor, got {got}")
    if ids.dim() != 2 or ids.shape[0] != rows:
        raise ValueError(f"penalties.{argument} must be [{rows}, L], got {tuple(ids.shape)}")
    _validate.same_device(f"penalties.{argument}", ids, "logits", z.device)
    counts = torch.zeros(rows, vocab + 1, dtype=torch.int32, device=z.device)
    inside = (ids >= 0) & (ids < vocab)
    counts.scatter_add_(1, torch.where(inside, ids, vocab).long(), torch.ones_like(ids, dtype=torch.int32))
    return counts[:, :vocab]


def _column(argument: str, value: float | Tensor, z: Tensor) -> Tensor:
    if not isinstance(value, Tensor):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"penalties.{argument} must be a number or a tensor, got {type(value).__name__}")
        if argument == "repetition" and not value > 0:
            raise ValueError(f"penalties.repetition must be > 0, got {value}")
        return z.new_full((1, 1), value)
    if value.shape not in ((), (z.shape[0],)):
        want = f"one value or have shape {(z.shape[0],)}"
        raise ValueError(f"penalties.{argument} must be {want}, got {tuple(value.shape)}")
    return value.to(z.device, z.dtype).reshape(-1, 1)
