"""What a backend is asked for ``linear_policy_loss``, and what it answers."""

from typing import TYPE_CHECKING, Generic, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head, LinearGrads, Needs
from rlkernel.calls.policy_loss import PolicyLossCall

if TYPE_CHECKING:
    from rlkernel.calls.logprob import Entropy

    class LinearPolicyLossOutput(NamedTuple, Generic[Entropy]):
        loss: Tensor
        metrics: Tensor
        logprobs: Tensor
        entropy: Entropy

else:

    class LinearPolicyLossOutput(NamedTuple):
        """``loss`` [] is differentiable; ``metrics`` [15] are named by ``POLICY_METRICS``.

        ``logprobs`` and ``entropy`` (None unless it is part of the loss or asked for) have the shape of the
        target ids, are 0 where the mask is not set, and are constants: no gradient passes through them.
        """

        loss: Tensor
        metrics: Tensor
        logprobs: Tensor
        entropy: Tensor | None


class LinearPolicyLossCall(NamedTuple):
    """Checked and normalised; tokens of the head are flat, those of the loss have the shape of the mask."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None
    target_ids: Tensor  # [N], ``ignore_index`` outside of the mask
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    ignore_index: int
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype
    policy: PolicyLossCall  # of these tokens: zeros stand for what the head gives
    items: Tensor | None  # what the loss is divided by
    reach: str  # whether the derivative of a token needs the logprobs of its "token" or of its "sequence"
    return_entropy: bool
    algorithm: str
    weight_dtype: torch.dtype
    needs: Needs
    narrow: bool = False  # whether the weight's gradient must have the weight's dtype, and not a wider one

    @property
    def head(self) -> Head:
        return Head(
            self.bias, self.temperature, self.logit_scale, self.softcap, self.ignore_index, self.logits_dtype,
            self.compute_dtype,
        )  # fmt: skip

    @property
    def with_entropy(self) -> bool:
        return self.return_entropy or self.policy.rule.entropy_coef != 0


class LinearPolicyLossResults(NamedTuple):
    """``logprobs`` and ``entropy`` [N], and the loss's gradients of hidden, weight and bias where they are
    wanted; that of the weight may be wider than the weight."""

    loss: Tensor
    metrics: Tensor
    logprobs: Tensor
    entropy: Tensor | None
    grad_hidden: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None

    @property
    def grads(self) -> LinearGrads:
        return LinearGrads(self.grad_hidden, self.grad_weight, self.grad_bias)
