"""A policy loss as ``linear_policy_loss`` calls it: on all tokens, or on the sequences around some rows."""

import bisect
import functools
from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.linear_policy_loss import LinearPolicyLossCall
from rlkernel.calls.policy_loss import PolicyLossCall, PolicyLossResults

Part = tuple[Tensor, Tensor | None]


class PolicyPass:
    """One policy loss over rows of shape ``mask.shape``, by a backend's module of ``policy_loss``.

    Row gradients are those of the loss itself, its denominator included.
    """

    def __init__(self, impl: ModuleType, call: LinearPolicyLossCall) -> None:
        self.impl, self.rule, self.items, self.reach = impl, call.rule, call.items, call.reach
        self.mask, self.offsets = call.mask, call.cu_seqlens
        self.tensors = (
            call.old_logprobs, call.advantages, call.mask, call.cu_seqlens, call.ref_logprobs,
            call.rollout_logprobs, call.staleness, call.token_counts,
        )  # fmt: skip
        self.entropy_gradient = self.rule.entropy_coef != 0
        self.entropy = call.with_entropy

    @functools.cached_property
    def starts(self) -> list[int]:
        """Where each sequence begins among the rows, and the last one ends; packed, it reads the offsets."""
        if self.offsets is not None:
            return [int(x) for x in self.offsets.tolist()]
        count, length = self.mask.shape
        return [i * length for i in range(count + 1)]

    @functools.cached_property
    def scale(self) -> Tensor:
        """What the mean divides by and multiplies with, which the mask and the correction decide."""
        old = self.tensors[0]
        like = old if old is not None else self._zeros()
        entropy = self._zeros() if self.entropy else None
        return self._per_item(self._run(like, entropy, self.tensors).scale)

    def whole(self, logprobs: Tensor, entropy: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Loss, metrics and the gradients of every row's logprob and entropy."""
        got = self._run(logprobs, entropy, self.tensors)
        return self._per_item(got.loss), got.metrics, *_scaled(got, self._per_item(got.scale))

    def part(self, logprobs: Tensor, entropy: Tensor | None, first: int, last: int) -> tuple[int, Part]:
        """Gradients of the rows of all sequences around ``[first, last)``, and which row is the first of
        these."""
        s0 = bisect.bisect_right(self.starts, first) - 1
        s1 = bisect.bisect_left(self.starts, last, lo=s0 + 1)
        a, b = self.starts[s0], self.starts[s1]
        rows = slice(s0, s1) if self.offsets is None else slice(a, b)

        # an empty sequence more where there are as many as tokens, and a shape would not tell them apart
        alike = self.offsets is not None and s1 - s0 == b - a

        def cut(x: Tensor | None) -> Tensor | None:
            if x is None:
                return None
            if x is self.offsets:
                ends = x[s0 : s1 + 1] - a
                return torch.cat([ends, ends[-1:]]) if alike else ends
            if x.shape == self.mask.shape:
                return x[rows]
            return torch.cat([x[s0:s1], x.new_zeros(1)]) if alike else x[s0:s1]

        tensors = tuple(map(cut, self.tensors))
        shape = self.mask[rows].shape
        entropy = None if entropy is None else entropy[a:b].view(shape)
        return a, _scaled(self._run(logprobs[a:b].view(shape), entropy, tensors), self.scale)

    def _run(
        self, logprobs: Tensor, entropy: Tensor | None, tensors: tuple[Tensor | None, ...]
    ) -> PolicyLossResults:
        shape = tensors[2].shape  # type: ignore[union-attr]
        entropy = None if entropy is None else entropy.view(shape)
        of_entropy = self.entropy_gradient and entropy is not None
        call = (logprobs.view(shape), entropy, *tensors, None, self.rule, of_entropy)
        results: PolicyLossResults = self.impl.forward(PolicyLossCall._make(call))
        return results

    def _zeros(self) -> Tensor:
        advantages = self.tensors[1]
        assert advantages is not None
        return advantages.new_zeros(self.mask.shape)

    def _per_item(self, x: Tensor) -> Tensor:
        return x if self.items is None else x / self.items.to(x)


def _scaled(results: PolicyLossResults, scale: Tensor) -> Part:
    of_entropy = results.grad_entropy
    flat = (results.grad_logprobs * scale).view(-1)
    return flat, None if of_entropy is None else (of_entropy * scale).view(-1)
