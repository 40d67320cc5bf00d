"""Rewards less a penalty for leaving the reference policy."""

import math

import torch
from torch import Tensor

from rlkernel.calls.kl_shaped_rewards import KL_ESTIMATORS, KlShapedRewardsCall, KlShapedRewardsResults
from rlkernel.opaque import Op
from rlkernel.ops import _packing, _validate
from rlkernel.ops._typed import typed
from rlkernel.ops.policy_loss.rule import optional
from rlkernel.types import KlEstimator


@typed
def kl_shaped_rewards(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None = None,
    *,
    beta: float,
    kl_estimator: KlEstimator = "k1",
    kl_input_clamp: float | None = None,
    kl_output_clamp: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Per-token rewards ``rewards - beta * kl`` for an advantage estimator that sees tokens, such as ``gae``.

    With ``d = logprobs - ref_logprobs`` of a token whose mask is set, ``kl`` is

        k1   d                    abs  |d|
        k2   d**2 / 2             k3   exp(-d) - 1 + d, without cancellation as d goes to 0

    A reward per sequence is given to the last token of it whose mask is set.  The result is 0 where the mask
    is not set, whatever stands there.  A token's bits depend on its sequence alone.

    Args:
        rewards: per token [B, L] or packed [N]; or per sequence [B] or [S]; with as many packed sequences as
            tokens [1, N] or [S, 1].
        logprobs: [B, L], or [N] with ``cu_seqlens``, of the policy that sampled the tokens.
        ref_logprobs: of the reference policy, the same shape.
        mask: of the same shape, nonzero where a token counts; None means everywhere.
        beta: weight of the penalty, >= 0.
        kl_estimator: "k1", "abs", "k2" or "k3" (Schulman, joschu.net/blog/kl-approx.html).
        kl_input_clamp, kl_output_clamp: bounds, > 0, of ``|d|`` and of ``|kl|``.  verl and SkyRL have 20 and
            10 with "k3" alone, OpenRLHF the second, 10, with every estimator.
        cu_seqlens: [S + 1] integers that rise from 0; sequence s is ``[cu_seqlens[s], cu_seqlens[s + 1])``,
            and tokens behind the last are padding.

    Returns:
        A tensor of ``logprobs``' shape in fp32 (fp64 when an input is fp64), without a gradient.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows verl's ``apply_kl_penalty``.

    Examples:
        >>> rewards, logprobs = torch.tensor([[0.0, 1.0]]), torch.tensor([[-1.0, -2.0]])
        >>> rlkernel.kl_shaped_rewards(rewards, logprobs, torch.tensor([[-1.5, -2.0]]), beta=0.1)
        tensor([[-0.0500,  1.0000]])
    """
    for name, x in (("rewards", rewards), ("logprobs", logprobs), ("ref_logprobs", ref_logprobs)):
        _validate.constant(name, x)
    _validate.like("ref_logprobs", ref_logprobs, "logprobs", logprobs)
    _packing.form("logprobs", logprobs, cu_seqlens)
    rows = len(logprobs) if cu_seqlens is None else cu_seqlens.numel() - 1
    rewards, per_sequence = _packing.per_sequence("rewards", rewards, "logprobs", logprobs, rows, "reward")
    _validate.same_device("rewards", rewards, "logprobs", logprobs.device)
    mask = _validate.mask(mask, "logprobs", logprobs)
    beta = _validate.number("beta", beta, 0.0)
    _validate.choice("kl_estimator", kl_estimator, KL_ESTIMATORS)
    kl_input = optional("kl_input_clamp", kl_input_clamp, math.inf)
    if beta == 0:  # 0 * inf is NaN: what has no weight is bounded to 0
        kl_input = 0.0
    kl_output = optional("kl_output_clamp", kl_output_clamp, math.inf)
    if cu_seqlens is not None:
        cu_seqlens = _packing.offsets("cu_seqlens", cu_seqlens, "logprobs", logprobs.device)
    dtype = torch.promote_types(torch.promote_types(rewards.dtype, logprobs.dtype), ref_logprobs.dtype)
    dtype = torch.promote_types(dtype, torch.float32)
    rewards, logprobs, ref_logprobs = (_validate.rows(x, dtype) for x in (rewards, logprobs, ref_logprobs))
    if cu_seqlens is not None:
        each = rewards if per_sequence else None
        cu_seqlens, mask, each = _packing.padded(cu_seqlens, mask, logprobs, each)
        rewards = each if per_sequence else rewards
    call = KlShapedRewardsCall(
        rewards, logprobs, ref_logprobs, mask, beta, kl_estimator, kl_input, kl_output, per_sequence,
        cu_seqlens,
    )  # fmt: skip
    return op(call)[0]


op = Op(
    "kl_shaped_rewards",
    KlShapedRewardsCall,
    KlShapedRewardsResults,
    pick=("rewards", "logprobs", "ref_logprobs"),
    forward=_validate.finite_in_debug("logprobs", "ref_logprobs"),
    like=lambda call: KlShapedRewardsResults(call.logprobs.new_empty(call.logprobs.shape)),
    look=lambda call: _packing.check(call.cu_seqlens, len(call.logprobs)),
)
