"""The names of Thinking Machines' ``batch_invariant_ops``: ``import rlkernel.batch_invariant_ops as ...``.

https://github.com/thinking-machines-lab/batch_invariant_ops
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.consistency.mode import batch_invariant, suspended


class AttentionBlockSize(NamedTuple):
    block_m: int
    block_n: int


def enable_batch_invariant_mode() -> None:
    batch_invariant.enable()


def disable_batch_invariant_mode() -> None:
    batch_invariant.disable()


def is_batch_invariant_mode_enabled() -> bool:
    return batch_invariant.is_enabled()


@contextmanager
def set_batch_invariant_mode(enabled: bool = True) -> Iterator[None]:
    with batch_invariant() if enabled else suspended():
        yield


def get_batch_invariant_attention_block_size() -> AttentionBlockSize:
    return AttentionBlockSize(block_m=16, block_n=16)


def matmul_persistent(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    from rlkernel.ops.matmul import matmul

    return matmul(a, b, bias)


def log_softmax(input: Tensor, dim: int = -1) -> Tensor:
    if dim not in (-1, input.dim() - 1):
        raise ValueError(f"dim must be the last dimension of {input.dim()}, got {dim}")
    with batch_invariant():
        return torch.log_softmax(input, dim)


def mean_dim(input: Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> Tensor:
    if dtype is None and not (input.is_floating_point() or input.is_complex()):
        dtype = torch.float32  # as theirs; torch.mean refuses integers
    with batch_invariant():
        return torch.mean(input, dim, keepdim, dtype=dtype)
