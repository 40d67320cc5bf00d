"""What DeepSpeed has over a vocabulary that ranks share out and ``logprob`` has not, in the memory of a few
rows: the KL divergence, and log-probabilities of several tokens a row.

``logprob`` reads logits once for their maximum and the logarithm of their sum, which its gather brings to all
ranks.  The terms of a divergence take a second reading, and the gradients one in backward.  DeepSpeed reads
them once more forward, and its temporaries have 64 MiB each.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall
from rlkernel.drivers import vocab_parallel
from rlkernel.integrations.deepspeed.contract import KL, unsupported_dtype
from rlkernel.integrations.deepspeed.shards import Replacement, shard_of, sizes
from rlkernel.ops import _vocab_parallel
from rlkernel.ops.logprob import op
from rlkernel.runtime.modes import once_differentiable

# Logits of a step: on a CPU what its temporaries leave in the caches, on a GPU enough to be busy.
CPU_STEP, GPU_STEP = 2**18, 2**22


class KLDiv(Replacement):
    name, op = KL, "logprob"

    def apply(self, student_logits: Tensor, teacher_logits: Tensor, reverse: bool, tp_group: Any) -> Tensor:
        if self.left(unsupported_dtype(student_logits=student_logits, teacher_logits=teacher_logits)):
            return self.original.apply(student_logits, teacher_logits, reverse, tp_group)
        # KL(A || B) weighs by A: the teacher, or reversed the student
        pair = (student_logits, teacher_logits) if reverse else (teacher_logits, student_logits)
        rows, vocab = student_logits.shape[:-1].numel(), student_logits.shape[-1]
        shard = shard_of(tp_group, sizes(student_logits, tp_group))
        return _Divergence.apply(*(x.reshape(rows, vocab) for x in pair), shard)


class _Softmax(NamedTuple):
    """Of all ranks: ``log_softmax = logits - row_max - log_sum``, [N] each.

    ``undefined``: rows that are -inf everywhere, which have no distribution and no gradient.
    """

    row_max: Tensor
    log_sum: Tensor
    undefined: Tensor

    @classmethod
    def of(cls, logits: Tensor, shard: dict[str, Any]) -> _Softmax:
        group, start = _vocab_parallel.named(shard.get("group"), shard.get("vocab_start"))
        ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        dense = logits if logits.stride(-1) == 1 else logits.contiguous()
        call = LogprobCall(dense, ids, 1.0, -1, False, group=group, vocab_start=start)
        results = op.forward(op.pick(call), call)
        return cls(results.row_max, results.log_sum, results.lse == -torch.inf)

    def log_softmax(self, logits: Tensor, rows: slice) -> Tensor:
        return logits[rows].float().sub(self.row_max[rows, None]).sub_(self.log_sum[rows, None])


class _Divergence(torch.autograd.Function):
    """KL(a || b) [N] of a and b [N, V], some rows at a time in both directions."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, shard: dict[str, Any]) -> Tensor:
        of_a, of_b = _Softmax.of(a, shard), _Softmax.of(b, shard)
        kl = of_a.row_max.new_empty(len(a), dtype=torch.float64)
        for rows in _steps(a):
            log_p, log_q = of_a.log_softmax(a, rows), of_b.log_softmax(b, rows)
            nothing, missing = log_p == -torch.inf, log_q == -torch.inf
            terms = log_p.exp().mul_(log_p.sub_(log_q)).masked_fill_(missing, torch.inf)
            kl[rows] = terms.masked_fill_(nothing, 0).sum(-1, dtype=torch.float64)
        kl = _summed(kl, shard)
        ctx.save_for_backward(a, b, *of_a, *of_b, kl.float())
        return kl.float()  # callers may write to it

    @staticmethod
    @once_differentiable("vocab_parallel_kl_div")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> Any:
        a, b, *statistics, kl = saved
        of_a, of_b = _Softmax(*statistics[:3]), _Softmax(*statistics[3:])
        undefined = (of_a.undefined | of_b.undefined)[:, None]
        grad = grad.float()[:, None]
        wants_a, wants_b, _ = ctx.needs_input_grad
        grad_a, grad_b = (torch.empty_like(x) if w else None for x, w in ((a, wants_a), (b, wants_b)))
        for rows in _steps(a):
            log_p, log_q = of_a.log_softmax(a, rows), of_b.log_softmax(b, rows)
            p, none = log_p.exp(), undefined[rows]
            if grad_b is not None:
                grad_b[rows] = log_q.exp().sub_(p).mul_(grad[rows]).masked_fill_(none, 0)
            if grad_a is not None:
                none = none | (log_p == -torch.inf)
                ratio = log_p.sub_(log_q).sub_(kl[rows, None])
                grad_a[rows] = ratio.mul_(p).mul_(grad[rows]).masked_fill_(none, 0)
        return grad_a, grad_b, None


def logprobs_of(logits: Tensor, ids: Tensor, ignore_index: int, shard: dict[str, Any]) -> Tensor:
    """Of several tokens ``ids`` [..., K] a row; 0 where they are ignored."""
    rows, (vocab, count) = logits.shape[:-1].numel(), (logits.shape[-1], ids.shape[-1])
    found = _Several.apply(logits.reshape(rows, vocab), ids.reshape(rows, count), ignore_index, shard)
    return found.view(ids.shape)


class _Several(torch.autograd.Function):
    """[N, K] of the logits [N, V] and as many ids."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, ignore_index: int, shard: dict[str, Any]) -> Tensor:
        softmax, kept = _Softmax.of(logits, shard), ids != ignore_index
        local = ids - shard.get("vocab_start", 0)
        mine = kept & (local >= 0) & (local < logits.shape[1])
        local = torch.where(mine, local, 0)
        above = torch.zeros_like(ids, dtype=torch.float32)
        if logits.shape[1]:
            above = logits.gather(-1, local).float().sub_(softmax.row_max[:, None]).masked_fill_(~mine, 0)
        logprobs = _summed(above, shard) - softmax.log_sum[:, None]
        ctx.save_for_backward(logits, local, mine, kept, *softmax)
        return logprobs.masked_fill_(~kept, 0)

    @staticmethod
    @once_differentiable("vocab_parallel_logprobs")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> Any:
        logits, local, mine, kept, *statistics = saved
        softmax, grad = _Softmax(*statistics), grad.float().masked_fill(~kept, 0)
        total, found = grad.sum(-1, keepdim=True), torch.empty_like(logits)
        none = ~kept.any(-1, keepdim=True) | softmax.undefined[:, None]
        at_ids = grad.masked_fill(~mine | none, 0)
        for rows in _steps(logits):
            of_row = softmax.log_softmax(logits, rows).exp_().mul_(-total[rows]).masked_fill_(none[rows], 0)
            if logits.shape[1]:
                of_row.scatter_add_(-1, local[rows], at_ids[rows])
            found[rows] = of_row
        return found, None, None, None


def _summed(x: Tensor, shard: dict[str, Any]) -> Tensor:
    """Over the ranks, in their order."""
    if "group" not in shard:
        return x
    total, *others = vocab_parallel.gathered(x, shard["group"])
    for other in others:
        total = total + other
    return total


def _steps(logits: Tensor) -> Iterator[slice]:
    rows, vocab = logits.shape
    most = CPU_STEP if logits.device.type == "cpu" else GPU_STEP
    step = max(1, most // max(1, vocab))
    for start in range(0, rows, step):
        yield slice(start, start + step)
