"""What a backend is asked for ``linear_policy_loss``, and what it answers."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head, Needs
from rlkernel.calls.policy_loss import (
    PolicyRule,
)


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
    old_logprobs: Tensor | None
    advantages: Tensor
    mask: Tensor
    cu_seqlens: Tensor | None
    ref_logprobs: Tensor | None
    rollout_logprobs: Tensor | None
    staleness: Tensor | None
    token_counts: Tensor | None
    items: Tensor | None  # what the loss is divided by
    rule: PolicyRule
    reach: str  # whether the derivative of a token needs the logprobs of its "token" or of its "sequence"
    return_entropy: bool
    algorithm: str
    weight_dtype: torch.dtype
    needs: Needs
    narrow: bool = False  # whether the weight's gradient must have the weight's dtype, and not a wider one

    @property
    def head(self) -> Head:
        return Head(*(self.bias, self.temperature, *self[5:10]))

    @property
    def with_entropy(self) -> bool:
        return self.return_entropy or self.rule.entropy_coef != 0


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
