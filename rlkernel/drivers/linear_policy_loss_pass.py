"""A policy loss as ``linear_policy_loss`` calls it: on all tokens, or on the sequences around some rows."""

import bisect
import functools
from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall
from rlkernel.calls.logprob import RowGrads
from rlkernel.calls.policy_loss import PolicyLossCall, PolicyLossResults


class PolicyPass:
    """One policy loss over rows of shape ``mask.shape``, by a backend's module of ``policy_loss``.

    Row gradients are those of the loss itself, its denominator included.
    """

    def __init__(self, impl: ModuleType, call: LinearPolicyLossCall) -> None:
        self.impl, self.call, self.items, self.reach = impl, call.policy, call.items, call.reach
        self.with_entropy = call.with_entropy

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each sequence begins among the rows, and the last one ends; packed, it reads the offsets."""
        if self.call.cu_seqlens is not None:
            return [int(x) for x in self.call.cu_seqlens.tolist()]
        count, length = self.call.mask.shape
        return [i * length for i in range(count + 1)]

    @functools.cached_property
    def scale(self) -> Tensor:
        """What the mean divides by and multiplies with, which the mask and the correction decide."""
        zeros, old = self.call.logprobs, self.call.old_logprobs
        entropy = zeros if self.with_entropy else None
        return self._per_item(self._run(self.call, zeros if old is None else old, entropy).scale)

    def whole(self, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor, RowGrads]:
        """Loss, metrics and the gradients of every row's logprob and entropy."""
        results = self._run(self.call, logprobs, entropy)
        grads = _scaled(results, self._per_item(results.scale))
        return self._per_item(results.loss), results.metrics, grads

    def part(self, logprobs: Tensor, entropy: Tensor | None, first: int, last: int) -> tuple[int, RowGrads]:
        """Gradients of the rows of all sequences around ``[first, last)``, and which row is the first of
        these."""
        s0 = bisect.bisect_right(self.starts, first) - 1
        s1 = bisect.bisect_left(self.starts, last, lo=s0 + 1)
        a, b = self.starts[s0], self.starts[s1]
        mask, offsets = self.call.mask, self.call.cu_seqlens
        rows = slice(s0, s1) if offsets is None else slice(a, b)
        # an empty sequence more where there are as many as tokens, and a shape would not tell them apart
        alike = offsets is not None and s1 - s0 == b - a

        def cut(x: Tensor) -> Tensor:
            if x is offsets:
                ends = x[s0 : s1 + 1] - a
                return torch.cat([ends, ends[-1:]]) if alike else ends
            if x.shape == mask.shape:
                return x[rows]
            return torch.cat([x[s0:s1], x.new_zeros(1)]) if alike else x[s0:s1]

        call = PolicyLossCall._make(cut(x) if isinstance(x, Tensor) else x for x in self.call)
        results = self._run(call, logprobs[a:b], None if entropy is None else entropy[a:b])
        return a, _scaled(results, self.scale)

    def _run(self, call: PolicyLossCall, logprobs: Tensor, entropy: Tensor | None) -> PolicyLossResults:
        shape = call.mask.shape
        entropy = None if entropy is None else entropy.view(shape)
        results: PolicyLossResults = self.impl.forward(
            call._replace(logprobs=logprobs.view(shape), entropy=entropy)
        )
        return results

    def _per_item(self, x: Tensor) -> Tensor:
        return x if self.items is None else x / self.items.to(x)


def _scaled(results: PolicyLossResults, scale: Tensor) -> RowGrads:
    def row(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.mul_(scale).view(-1)

    return RowGrads(row(results.grad_logprobs), row(results.grad_entropy))
