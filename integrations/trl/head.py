"""TRL's fused head: hidden states and lm_head to logprobs."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearLogprobStatistics
from rlkernel.integrations.trl.contract import HEAD, OUTPUTS
from rlkernel.integrations.trl.lm_heads import gathered_again, in_hidden_dtype, unsupported
from rlkernel.integrations.trl.support import Rows
from rlkernel.integrations.trl.trl_patch import TrlPatch
from rlkernel.ops.linear_logprob import linear_logprob, linear_logprob_statistics
from rlkernel.ops.logprob import logprob
from rlkernel.types import Statistic


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
        head = {
            "bias": bias, "temperature": temperature, "logit_scale": logit_scale,
            "softcap": final_logit_softcapping, "return_entropy": "entropy" in outputs,
        }  # fmt: skip
        results = self.scored(hidden, weight, targets, outputs, head)
        if isinstance(results, tuple):
            return results
        self.patch.left(HEAD, results)
        return self.original.apply(
            hidden, weight, bias, targets, temperature, chunk_size,
            final_logit_softcapping, logit_scale, outputs,
        )  # fmt: skip

    def scored(
        self, hidden: Tensor, weight: Tensor, targets: Tensor, outputs: tuple[str, ...], head: dict[str, Any]
    ) -> tuple[Tensor | None, ...] | str:
        """The same with the options of ``linear_logprob``, or why the call is left to TRL."""
        if reason := unsupported(hidden=hidden, weight=weight):
            return reason
        self.patch.count(self.patch.calls, HEAD)
        skipped = self.patch.prefix.unlabelled(len(hidden)) if self.patch.prefix else 0
        also: tuple[Any, ...] = tuple(name for name in OUTPUTS[1:] if name in outputs)
        support = None
        if self.patch.support is not None and not also:
            support = self.patch.support.rows(len(hidden), hidden.device)
        if self.patch.batch_invariant:  # logits as a model has them, and with it an engine
            head = {**head, "logits_dtype": hidden.dtype}
        hidden, targets = hidden[skipped:], targets[skipped:]
        scores: Any
        with in_hidden_dtype((hidden, weight)), gathered_again(self.utils, weight, head["bias"]):
            if self.patch.batch_invariant and _changes_logits(head):
                # also with statistics: a reference's head, which is asked for none, has the same numbers
                scores = of_logits(hidden, weight, targets, support, also, **head)
            elif support is not None:
                scores = linear_logprob(hidden, weight, targets, **support.options(), **head)
            else:
                scores = linear_logprob_statistics(hidden, weight, targets, statistics=also, **head)
        results = (scores.logprobs, *(getattr(scores, name, None) for name in OUTPUTS))
        if not skipped:
            return results
        return tuple(x if x is None else torch.nn.functional.pad(x, (skipped, 0)) for x in results)


def _changes_logits(head: dict[str, Any]) -> bool:
    """Whether a model rounds its logits behind the product, where ``linear_logprob`` stays in fp32."""
    return head["bias"] is not None or head["logit_scale"] != 1 or head["softcap"] is not None


def of_logits(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    support: Rows | None,
    statistics: tuple[Statistic, ...] = (),
    *,
    bias: Tensor | None,
    temperature: float,
    logit_scale: float,
    softcap: float | None,
    return_entropy: bool,
    logits_dtype: torch.dtype,
) -> LinearLogprobStatistics:
    """Of logits that are scaled and bounded as models do it, in their dtype.  They are kept, [N, V]."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(logits_dtype)
    if logit_scale != 1:
        logits = logits * logit_scale
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    options = {} if support is None else support.options()
    scores = logprob(logits, targets, temperature=temperature, return_entropy=return_entropy, **options)
    return LinearLogprobStatistics(*scores, *_statistics(logits, targets, temperature, statistics))


@torch.no_grad()
def _statistics(
    logits: Tensor, targets: Tensor, temperature: float, names: tuple[Statistic, ...]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    if not names:
        return None, None, None
    z = logits.float() / temperature
    of_targets = z.gather(-1, targets.long().clamp(min=0).unsqueeze(-1)).squeeze(-1)  # -100 is ignored
    return (
        z.mean(-1) if "mean_logits" in names else None,
        of_targets >= z.amax(-1) if "is_top1" in names else None,
        (2 * z.log_softmax(-1)).logsumexp(-1) if "log_sum_sq_probs" in names else None,
    )
