"""TRL's fused head: hidden states and lm_head to logprobs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations.trl.contract import FLOATS, HEAD, OUTPUTS
from rlkernel.integrations.trl.trl_patch import TrlPatch
from rlkernel.ops.linear_logprob import linear_logprob, linear_logprob_statistics


class Head:
    """Stands in for TRL's ``ChunkedLogProbFunction``, of which only ``apply`` is used."""

    def __init__(self, original: Any, patch: TrlPatch, utils: ModuleType) -> None:
        self.original, self.patch, self.utils = original, patch, utils

    def __repr__(self) -> str:
        return "rlkernel.linear_logprob"

    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] = OUTPUTS,
    ) -> tuple[Tensor | None, ...]:
        """``(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1)``, None where not asked for."""
        if reason := _head_unsupported(hidden, weight):
            self.patch.left(HEAD, reason)
            return self.original.apply(
                hidden, weight, bias, targets, temperature, chunk_size,
                final_logit_softcapping, logit_scale, outputs,
            )  # fmt: skip
        self.patch.count(self.patch.calls, HEAD)
        skipped = self.patch.prefix.unlabelled(len(hidden)) if self.patch.prefix else 0
        support = None
        if self.patch.support is not None and not set(outputs) & set(OUTPUTS[1:]):
            support = self.patch.support.rows(len(hidden), hidden.device)
        if support is not None:
            with _hidden_dtype(hidden, weight), _gathered_again(self.utils, weight, bias):
                kept = linear_logprob(
                    hidden, weight, targets, bias=bias, temperature=temperature, logit_scale=logit_scale,
                    softcap=final_logit_softcapping, return_entropy="entropy" in outputs,
                    support_ids=support.ids, support_offsets=support.offsets,
                )  # fmt: skip
            return kept.logprobs, kept.entropy, None, None, None
        with _hidden_dtype(hidden, weight), _gathered_again(self.utils, weight, bias):
            scores = linear_logprob_statistics(
                hidden[skipped:], weight, targets[skipped:], bias=bias, temperature=temperature,
                logit_scale=logit_scale, softcap=final_logit_softcapping, return_entropy="entropy" in outputs,
                statistics=tuple(name for name in OUTPUTS[1:] if name in outputs),
            )  # fmt: skip
        results = (scores.logprobs, *(getattr(scores, name) for name in OUTPUTS))
        if not skipped:
            return results
        return tuple(x if x is None else torch.nn.functional.pad(x, (skipped, 0)) for x in results)


def _head_unsupported(hidden: Tensor, weight: Tensor) -> str | None:
    """Why this call is left to TRL, or None."""
    for name, tensor in (("hidden", hidden), ("weight", weight)):
        if tensor.dtype not in FLOATS:
            return f"{name} is {tensor.dtype}"
    return None


def _hidden_dtype(hidden: Tensor, weight: Tensor) -> contextlib.AbstractContextManager[Any]:
    """TRL computes in autocast's dtype, else in hidden's; linear_logprob in the wider of both.

    Naming the dtype through autocast spares a converted copy of the head and keeps the head's gradient in its
    dtype.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) or hidden.dtype.itemsize >= weight.dtype.itemsize:
        return contextlib.nullcontext()
    return torch.autocast(kind, dtype=hidden.dtype)


@contextlib.contextmanager
def _gathered_again(utils: ModuleType, *head: Tensor | None) -> Iterator[None]:
    """Under ZeRO-3, backward finds the head gathered as forward did.

    TRL's fused head gathers the partitioned parameters around forward only, and their memory is gone when
    backward runs. What the op saves of them is replaced by a request to gather them again.
    """
    partitioned = {p.data_ptr(): p for p in head if p is not None and hasattr(p, "ds_status")}
    if not partitioned:
        yield
        return

    def pack(saved: Tensor) -> Tensor | tuple[Tensor]:
        parameter = partitioned.get(saved.data_ptr())
        return saved if parameter is None or parameter.shape != saved.shape else (parameter,)

    def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with utils.maybe_gather_lm_head_ctx(packed[0]):
            return packed[0].data  # keeps the memory for this backward when the parameter lets go of it

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
