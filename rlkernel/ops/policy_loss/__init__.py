"""Policy-gradient losses: the clipped family, sequence ratios, weighted likelihoods, correction."""

import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls import policy_loss as calls
from rlkernel.opaque import Op
from rlkernel.ops._typed import typed
from rlkernel.ops.policy_loss import covariance
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.ops.policy_loss.inputs import check_values, checked
from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection, within_second_moment
from rlkernel.types import (
    Correction,
    ImportanceSamplingLevel,
    KlFactor,
    LossAggMode,
    LossType,
    PolicyKlEstimator,
    PolicyPreset,
)


@typed
def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    loss_type: LossType = "grpo",
    loss_agg_mode: LossAggMode = "token-mean",
    importance_sampling_level: ImportanceSamplingLevel = "token",
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    clip_ratio_c: float | None = None,
    log_ratio_clip: float | None = None,
    tau_pos: float = 1.0,
    tau_neg: float = 1.05,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
    cov_ratio: float = 2e-4,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
    ppo_kl_coef: float = 1.0,
    dro_beta: float | None = None,
    seed: int = 0,
    beta: float = 0.0,
    ref_logprobs: Tensor | None = None,
    kl_estimator: PolicyKlEstimator = "k3",
    use_bias_correction_kl: bool | KlFactor = False,
    kl_input_clamp: float | None = None,
    kl_output_clamp: float | None = None,
    rollout_logprobs: Tensor | None = None,
    correction: RolloutCorrection | Correction | None = None,
    staleness: Tensor | None = None,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
    num_items_in_batch: float | Tensor | None = None,
    token_counts: Tensor | None = None,
    loss_scale_factor: float | None = None,
    dp_size: int = 1,
    cu_seqlens: Tensor | None = None,
) -> calls.PolicyLossOutput:
    """A policy loss and its gradient in one pass over the tokens.

    Equal to ``aggregate(w * term(r, A, logprobs) + beta * KL(logprobs, ref) - entropy_coef * entropy)`` over
    the tokens of the mask, where ``r = exp(logprobs - old_logprobs)`` at level "token"; the exponential of
    the sequence's mean difference at "sequence", whose gradient reaches every token of it (TRL's GSPO); the
    same value with the gradient of the token alone at "sequence_token" (verl's GSPO).  ``w`` is the weight of
    the rollout correction.  Terms, by ``loss_type``:

        grpo, ppo, dapo, dr_grpo, bnpo   -min(min(r, delta) A, clamp(r, 1 - epsilon, 1 + epsilon_high) A),
                                         and at most -clip_ratio_c A where A < 0
        cispo        -stop(clamp(r, 1 - epsilon, 1 + epsilon_high)) A logprobs         (verl, MiniMax)
        cispo_cap    -stop(min(r, epsilon_high)) A logprobs                            (TRL)
        cispo_mask   -stop(r, or 0 unless 1 - epsilon < r < 1 + epsilon_high) A logprobs         (SkyRL)
        reinforce, gpg  -A logprobs
        importance_sampling  -r A
        sapo         -4 / tau sigmoid(tau (r - 1)) A, tau = tau_pos where A > 0, else tau_neg
        gmpo         -r A, with each difference clipped to [-epsilon, epsilon_high] on the side of A's sign
        dppo_tv, dppo_kl  -stop(min(r, clip_ratio_c)) A logprobs where the probability has not moved further
                     than epsilon, epsilon_high in the direction of A (clip_ratio_c defaults to 20): by
                     |p - q|, or by the KL of the choice between this token and any other
        vespo        -stop(exp(lambda + k log w - lambda w)) A logprobs, w the product of the sequence's
                     ratios and correction weights, which multiply nothing else; k, lambda by A's sign
        clip_cov     grpo's, without cov_ratio of the tokens, picked by a hash of token and ``seed`` among
                     those that are not clipped and whose covariance (A - mean A)(logprob - mean logprob)
                     lies in (clip_cov_lb, clip_cov_ub)
        kl_cov       -r A, plus ppo_kl_coef |logprobs - old_logprobs| for the cov_ratio of the tokens with the
                     largest covariance; of equal ones the first
        dro          -A logprobs + dro_beta / 2 (logprobs - old_logprobs)^2

    The names that share a term differ in their paper's aggregation: ``policy_loss_preset`` has it.

    A token with -inf for its log-probability, or its old one, is outside of its support: it adds nothing, but
    counts as a token; so does the KL of one whose reference is -inf.  Metric "outside_support" counts them.

    The gradient of each token's term has the same bits whatever other sequences surround it (batch-invariant)
    and the loss the same bits in every run: sums run in a fixed order, without atomics.

    Args:
        logprobs: [B, L], or [N] with ``cu_seqlens``; fp16, bf16, fp32 or fp64.
        old_logprobs: of the policy that the step started from, the same shape; None: ``logprobs`` themselves.
        advantages: one for each token or one for each sequence, [B] or [S]; with as many packed sequences as
            tokens [1, N] or [S, 1].
        mask: nonzero where a token counts; what the others hold is never read into arithmetic.
        loss_agg_mode: "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm" (divided by
            ``loss_scale_factor``, which defaults to L), "seq-mean-token-mean".
        log_ratio_clip: bound of |log r|, beyond which the gradient is 0; verl has 20.
        kl_estimator: "k1", "abs", "k2", "k3", or with "+" the same value with k2's gradient.
        use_bias_correction_kl: multiply the KL by a ratio, which has its gradient.  True or "ratio": by r, as
            TRL.  "token": by the token's own, at any level (slime).  "score": by ``exp(x - stop(x))`` of the
            logprob, which is 1, so that the gradient is that of the KL on policy (NeMo-RL).  "rollout": by
            ``exp(logprobs - rollout_logprobs)``, 0 where that is not finite (NeMo-RL).
        kl_input_clamp, kl_output_clamp: bounds of ``|logprobs - ref_logprobs|`` and of the estimate times its
            ratio, beyond which neither has a gradient; that of a "+" stays.  verl, SkyRL and NeMo-RL have 20
            and 10.
        correction: see ``RolloutCorrection``; a name for one of its presets.
        staleness: [B, L] or [N], or one for each sequence: versions of the policy since a token was sampled;
            no gradient.
        seed: of clip_cov's choice; 64 bits, signed or not, of which the low 32 count.
        num_items_in_batch: tokens (for the "seq-" modes sequences) of the whole batch, which the mean divides
            by: > 0, a number or a tensor of one, which on a GPU is not synchronised.  None: those that are
            here.  "token-sum" divides by nothing.
        dp_size: of data-parallel ranks that average gradients; the loss is multiplied by it.
        token_counts: [B] or [S]: with "seq-mean-token-mean" what each sequence's sum is divided by instead of
            its own tokens: those of its prompt's or its rollout's sequences, wherever they are.
            ``num_items_in_batch`` is then the number of prompts or rollouts.  At least 1; 0 is right where
            none of them has a token, and divides by 1.
        cu_seqlens: [S + 1] offsets of packed sequences, which rise from 0; tokens behind the last are
            padding.

    Returns:
        calls.PolicyLossOutput: ``loss``, and ``metrics`` in the order of ``rlkernel.POLICY_METRICS``.

    Raises:
        ValueError: an argument is off.  ``cu_seqlens``, ``num_items_in_batch`` and ``token_counts`` are
            looked at on a CPU, and on a GPU in debug mode, in which a NaN among the advantages that count
            raises too; else metric "not_finite" counts it, and a number of items that is not > 0, or a count
            of tokens that is negative or not finite, makes the loss NaN.

    Sources: PPO arXiv 1707.06347, GRPO 2402.03300, DAPO 2503.14476, Dr. GRPO 2503.20783, GSPO 2507.18071,
    CISPO 2506.13585, SAPO 2511.20347, GMPO 2507.20673, GPG 2504.02546, DPPO 2602.04879, Clip-Cov and KL-Cov
    2505.22617, DRO 2405.19107, dual clip 1912.09729, two-sided clip 2505.07291; VESPO as TRL has it; KL
    estimators by Schulman, "Approximating KL divergence".

    Examples:
        >>> logprobs = torch.full((2, 3), -1.0, requires_grad=True)
        >>> advantages, mask = torch.tensor([1.0, -1.0]), torch.ones(2, 3)
        >>> out = rlkernel.policy_loss(logprobs, logprobs.detach(), advantages, mask)
        >>> out.loss.backward()
        >>> logprobs.grad
        tensor([[-0.1667, -0.1667, -0.1667],
                [ 0.1667,  0.1667,  0.1667]])
    """
    call, items = checked(**locals())  # all arguments
    if correction is not None:
        call = within_second_moment(call, correction)
    if loss_type in ("clip_cov", "kl_cov"):
        if not clip_cov_lb < clip_cov_ub:
            raise ValueError(f"clip_cov_lb must be < clip_cov_ub = {clip_cov_ub}, got {clip_cov_lb}")
        bounds = clip_cov_lb, clip_cov_ub, call.rule.low, call.rule.high
        pick = calls.CovariancePick(loss_type == "clip_cov", cov_ratio, *bounds, seed & 0xFFFFFFFF)
        tensors = call.logprobs.detach(), call.old_logprobs, call.advantages, call.mask, call.cu_seqlens
        call = call._replace(selected=covariance.selected(calls.PolicySelectCall(*tensors, pick)))
    loss, metrics = op(call)
    if items is not None:
        loss = loss / items
    return calls.PolicyLossOutput(loss, metrics)


DEFAULTS: dict[str, Any] = inspect.unwrap(policy_loss).__kwdefaults__


def policy_loss_preset(name: PolicyPreset) -> dict[str, Any]:
    """The arguments with which ``policy_loss`` is the loss of a paper: ``policy_loss(..., **preset)``.

    Raises:
        ValueError: the name is not known; lists those that are.

    Examples:
        >>> rlkernel.policy_loss_preset("dr_grpo")
        {'loss_type': 'dr_grpo', 'loss_agg_mode': 'seq-mean-token-sum-norm'}
    """
    return dict(policy_rule.choice("name", name, policy_rule.PRESETS))


def _forward(impl: ModuleType, call: calls.PolicyLossCall) -> calls.PolicyLossResults:
    check_values(call)
    return impl.forward(call)


def _backward(
    impl: ModuleType | None,
    call: calls.PolicyLossCall,
    results: calls.PolicyLossResults,
    grads: tuple[Tensor | None, ...],
) -> tuple[Tensor, Tensor | None]:
    assert grads[0] is not None
    factor = grads[0] * results.scale
    of_entropy = results.grad_entropy
    return results.grad_logprobs * factor, None if of_entropy is None else of_entropy * factor


def _like(call: calls.PolicyLossCall) -> calls.PolicyLossResults:
    new, like = call.logprobs.new_empty, torch.empty_like
    of_entropy = like(call.logprobs) if call.entropy_gradient else None
    return calls.PolicyLossResults(
        new(()), new(len(calls.POLICY_METRICS)), new(()), like(call.logprobs), of_entropy
    )


op = Op(
    "policy_loss",
    calls.PolicyLossCall,
    calls.PolicyLossResults,
    outputs=2,
    pick=("logprobs", "advantages", "mask"),
    forward=_forward,
    backward=_backward,
    like=_like,
    gradients=("logprobs", "entropy"),
    differentiable=("loss",),
    saves=("scale", "grad_logprobs", "grad_entropy"),
    traced=True,
)
