"""DeepSpeed's losses over a vocabulary that ranks share out: what stands where its autograd functions stood.

Each has their ``apply``.  The functions around them, which DeepSpeed's users call, check the shards and the
targets, reduce over sequence-parallel ranks and divide; they stay as they are.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._shards import shard
from rlkernel.integrations.deepspeed import by_rows
from rlkernel.integrations.deepspeed.contract import (
    CROSS_ENTROPY,
    ENTROPY,
    LINEAR,
    LOGPROBS,
    unsupported_dtype,
)
from rlkernel.integrations.deepspeed.shards import Replacement, shard_of, sizes
from rlkernel.ops.linear_logprob import linear_logprob
from rlkernel.ops.logprob import logprob


class LinearCrossEntropy(Replacement):
    name, op = LINEAR, "linear_logprob"

    def apply(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, tp_group: Any,
        vocab_start_index: int, vocab_end_index: int, ignore_index: int, chunk_rows: int,
        compute_dtype: torch.dtype,
    ) -> Tensor:  # fmt: skip
        if self.left(unsupported_dtype(hidden=hidden, weight=weight)):
            return self.original.apply(
                hidden, weight, bias, target, tp_group, vocab_start_index, vocab_end_index, ignore_index,
                chunk_rows, compute_dtype,
            )  # fmt: skip
        own = torch.promote_types(hidden.dtype, weight.dtype) == compute_dtype
        with contextlib.nullcontext() if own else torch.autocast(hidden.device.type, dtype=compute_dtype):
            logprobs = linear_logprob(
                hidden, weight, target, bias=bias, ignore_index=ignore_index,
                **shard(tp_group, vocab_start_index),
            ).logprobs  # fmt: skip
        return -logprobs


class CrossEntropy(Replacement):
    name, op = CROSS_ENTROPY, "logprob"

    def apply(
        self, vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any, vocab_start_index: int,
        vocab_end_index: int, ignore_index: int,
    ) -> Tensor:  # fmt: skip
        if self.left(unsupported_dtype(logits=vocab_parallel_logits)):
            return self.original.apply(
                vocab_parallel_logits, target, tp_group, vocab_start_index, vocab_end_index, ignore_index
            )
        here = shard(tp_group, vocab_start_index)
        return -logprob(vocab_parallel_logits, target, ignore_index=ignore_index, **here).logprobs


class LogProbs(Replacement):
    name, op = LOGPROBS, "logprob"

    def apply(
        self, vocab_parallel_logits: Tensor, index: Tensor, tp_group: Any, vocab_start_index: int,
        ignore_index: int,
    ) -> Tensor:  # fmt: skip
        if self.left(unsupported_dtype(logits=vocab_parallel_logits)):
            return self.original.apply(
                vocab_parallel_logits, index, tp_group, vocab_start_index, ignore_index
            )
        here = shard(tp_group, vocab_start_index)
        if index.shape[-1] != 1:
            return by_rows.logprobs_of(vocab_parallel_logits, index, ignore_index, here)
        out = logprob(vocab_parallel_logits, index[..., 0], ignore_index=ignore_index, **here)
        return _where_defined(out.logprobs, out.lse)


class Entropy(Replacement):
    name, op = ENTROPY, "logprob"

    def apply(self, vocab_parallel_logits: Tensor, tp_group: Any) -> Tensor:
        if self.left(unsupported_dtype(logits=vocab_parallel_logits)):
            return self.original.apply(vocab_parallel_logits, tp_group)
        no_target = torch.zeros(
            vocab_parallel_logits.shape[:-1], dtype=torch.int64, device=vocab_parallel_logits.device
        )
        here = shard_of(tp_group, sizes(vocab_parallel_logits, tp_group))
        out = logprob(vocab_parallel_logits, no_target, return_entropy=True, **here)
        assert out.entropy is not None
        return _where_defined(out.entropy, out.lse)


def _where_defined(values: Tensor, lse: Tensor) -> Tensor:
    """A row that is -inf everywhere is NaN, and here has no gradient."""
    return torch.where(lse.detach() == -torch.inf, values.detach(), values)
