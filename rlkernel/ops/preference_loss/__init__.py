"""Preference losses: DPO and its family, KTO, ORPO, SimPO, CPO."""

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls import preference_loss as calls
from rlkernel.opaque import Op
from rlkernel.ops import _packing, _validate
from rlkernel.ops._typed import typed
from rlkernel.ops.preference_loss import inputs
from rlkernel.ops.preference_loss.rule import PRESETS, build
from rlkernel.runtime import debug
from rlkernel.types import FDivergence, PreferenceLossType, PreferencePreset

_TENSORS = {
    "logprobs", "ref_logprobs", "mask", "log_sum_sq_probs", "nll_mask", "labels", "kl", "running_delta",
    "cu_seqlens",
}  # fmt: skip


@typed
def preference_loss(
    logprobs: Tensor,
    ref_logprobs: Tensor | None,
    mask: Tensor,
    *,
    loss_type: PreferenceLossType | Sequence[PreferenceLossType] = "sigmoid",
    loss_weights: Sequence[float] | None = None,
    beta: float = 0.1,
    label_smoothing: float | Sequence[float] = 0.0,
    gamma: float = 0.5,
    discopop_tau: float = 0.05,
    f_divergence_type: FDivergence = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
    ld_alpha: float | None = None,
    use_weighting: bool = False,
    log_sum_sq_probs: Tensor | None = None,
    nll_coef: float | None = None,
    nll_mask: Tensor | None = None,
    labels: Tensor | None = None,
    kl: float | Tensor | None = None,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    running_delta: Tensor | None = None,
    num_items_in_batch: float | Tensor | None = None,
    num_tokens_in_batch: float | Tensor | None = None,
    dp_size: int = 1,
    cu_seqlens: Tensor | None = None,
) -> calls.PreferenceLossOutput:
    """A preference loss and its gradient from the log-probabilities of tokens.

    Equal to the mean over pairs (``kto``, ``apo_zero_unpaired``: over sequences) of the losses below, each
    times its weight, plus ``nll_coef`` times the mean of ``-logprobs`` over the chosen tokens.  ``x`` is a
    sequence's sum of ``logprobs - ref_logprobs``, ``m`` its mean of ``logprobs``, ``n`` its number of tokens,
    ``c`` and ``r`` mean chosen and rejected, ``s = f'(exp(x))`` is the score of the f-divergence (``x``
    itself for reverse_kl), ``z = beta (s_c - s_r)``, ``l(z) = -logsigmoid(z)`` and ``l_e(z) = (1 - e) l(z) +
    e l(-z)`` with e = label_smoothing:

        sigmoid, cpo       l_e(z); cpo has no reference and adds the likelihood
        sigmoid_norm       l_e(beta (s_c / n_c - s_r / n_r))
        hinge              max(0, 1 - z)
        ipo                (s_c / n_c - s_r / n_r - 1 / (2 beta))^2
        ipo_sum            (s_c - s_r - 1 / (2 beta))^2                           (the paper's, OpenRLHF's)
        exo_pair           sigmoid(z) (-l(z) - log(1 - e)) + sigmoid(-z) (-l(-z) - log e)
        robust             ((1 - e) l(z) - e l(-z)) / (1 - 2 e)
        discopop           l(z) (1 - w) + exp(-z) w, w = sigmoid(z / discopop_tau)
        nca_pair           l(beta x_c) + l(-beta x_c) / 2 + l(-beta x_r) / 2
        bco_pair           l(beta x_c - delta) + l(delta - beta x_r)
        sppo_hard          (x_c - 1 / (2 beta))^2 + (x_r + 1 / (2 beta))^2
        apo_zero           sigmoid(-beta x_c) + sigmoid(beta x_r)
        apo_down           sigmoid(beta x_c) + sigmoid(-beta (x_c - x_r))
        aot, aot_unpaired  l_e of the differences of sorted log-ratios
        sft                the likelihood of the chosen tokens
        simpo              l_e(beta (m_c - m_r) - gamma)
        orpo               beta l(m_c - m_r - log(1 - exp(m_c)) + log(1 - exp(m_r))), plus the likelihood
        kto                desirable_weight sigmoid(-beta (x - kl)), undesirable_weight sigmoid(beta (x - kl))
        apo_zero_unpaired  the same with kl = 0

    A token with a log-probability of -inf under the policy or the reference is outside of its support: it
    leaves ``mask``, and metric "outside_support" counts it.  A ``nll_mask`` of its own, which the reference
    has no part in, it leaves where it is -inf under the policy.

    Sums over tokens are fp64 in a fixed order.  A sequence's sum has the same bits whatever surrounds it
    (batch-invariant); loss and gradient have the same bits in every run, and with ``num_items_in_batch`` a
    pair's gradient does not depend on the other pairs, except through aot's order, bco's delta and the
    likelihood's mean.

    Args:
        logprobs: [2B, L], chosen rows first, or [N] with ``cu_seqlens``; for an unpaired loss [S, L]; fp16,
            bf16, fp32 or fp64.
        ref_logprobs: of the reference policy, the same shape, or the sums of sequences, [2B] or [S]; None: 0.
        mask: nonzero where a token counts; what the others hold is never read into arithmetic.  A pair with a
            side without a token does not count.
        loss_type: one of the names above, or several, whose losses are added.
        loss_weights: one number for each of several losses; None: 1.
        label_smoothing: one number, or one for each of several losses.
        gamma: margin of simpo.
        f_divergence_type: "reverse_kl", "forward_kl", "js_divergence" or "alpha_divergence", for the losses
            of z, ipo, sigmoid_norm and simpo, where ``x = m``.
        ld_alpha: LD-DPO: weight in [0, 1] of the tokens of the longer side beyond the length of the other.
        use_weighting: WPO: a pair's loss is multiplied by exp(mean of logprobs - log_sum_sq_probs) of both
            sides, which has no gradient.
        log_sum_sq_probs: [2B, L] or [N], the logarithm of the sum of squared probabilities, for
            ``use_weighting``.
        nll_coef: weight of the likelihood; None: 1 for orpo and cpo, else 0.
        nll_mask: nonzero where a token counts in the likelihood, such as the prompt for orpo; None: ``mask``.
        labels: [S], of an unpaired loss: nonzero where a sequence is desirable.
        kl: of kto: an estimate of the divergence from the reference, one or [S]; no gradient.  None: 0.
        running_delta: [2], of bco_pair: the mean reward of earlier batches, and their number.  This batch is
            added before delta, the mean, is used; the new state is returned.  None: delta = 0, as TRL.
        num_items_in_batch: pairs (unpaired: sequences) of the whole batch, which the mean divides by: > 0, a
            number or a tensor of one, which on a GPU is not synchronised.  None: those that are here.
        num_tokens_in_batch: tokens of the whole batch that the likelihood's mean divides by.
        dp_size: of data-parallel ranks that average gradients; the loss is multiplied by it.
        cu_seqlens: [S + 1] offsets of packed sequences, chosen ones first; tokens behind the last are
            padding.

    Returns:
        calls.PreferenceLossOutput: ``loss``, ``metrics`` in the order of ``rlkernel.PREFERENCE_METRICS``,
            ``chosen_rewards`` and ``rejected_rewards`` (beta x; of orpo and simpo beta m), ``logps``,
            ``running_delta``.

    Raises:
        ValueError: an argument is off.  ``cu_seqlens`` and the numbers of items and tokens are looked at on a
            CPU, and on a GPU in debug mode (else one that is not > 0 makes the loss NaN), in which a
            log-probability that counts and is not finite raises too; else metric "not_finite" counts its
            pair.

    Sources: DPO arXiv 2305.18290, robust DPO 2403.00409, IPO 2310.12036, EXO 2402.00856, NCA
    2402.05369, BCO 2404.04656, SPPO 2405.00675, AOT 2406.05882, APO 2408.06266, DiscoPOP 2406.08414, f-DPO
    2309.16240, LD-DPO 2409.06411, WPO 2406.11827, KTO 2402.01306, ORPO 2403.07691, SimPO 2405.14734, CPO
    2401.08417; names and conventions as ``DPOConfig`` and ``KTOConfig`` of TRL.

    Examples:
        >>> logprobs, ref_logprobs = torch.tensor([[-1.0, -1.0], [-3.0, -2.0]]), torch.full((2, 2), -1.5)
        >>> out = rlkernel.preference_loss(logprobs, ref_logprobs, torch.ones(2, 2), beta=0.1)
        >>> out.loss, out.chosen_rewards, out.rejected_rewards
        (tensor(0.5544), tensor([0.1000]), tensor([-0.2000]))
    """
    options = {name: x for name, x in locals().items() if name not in _TENSORS}
    _validate.floating("logprobs", logprobs)
    cu_seqlens, rows = _packing.sequences("logprobs", logprobs, "[2B, L]", cu_seqlens)
    items, known_items = _validate.item_count("num_items_in_batch", num_items_in_batch, logprobs.device)
    nll_items, known_tokens = _validate.item_count(
        "num_tokens_in_batch", num_tokens_in_batch, logprobs.device
    )
    known = {"num_items_in_batch": known_items, "num_tokens_in_batch": known_tokens}
    rule = build(**options | known, has_reference=ref_logprobs is not None)
    if rule.paired and rows % 2:
        raise ValueError(f"logprobs must hold chosen and as many rejected sequences, got {rows} in all")
    logprobs = _validate.dense(logprobs, torch.promote_types(logprobs.dtype, torch.float32))
    ref_logprobs, sums = inputs.reference(ref_logprobs, logprobs, rows)
    mask = _validate.flags("mask", mask, "logprobs", logprobs)
    nll_mask = None if nll_mask is None else _validate.flags("nll_mask", nll_mask, "logprobs", logprobs)
    log_sum_sq_probs = inputs.aligned(log_sum_sq_probs, use_weighting, logprobs)
    labels = inputs.labels(labels, rule.paired, rows, logprobs)
    kl = inputs.kl(kl, rule, rows, logprobs)
    running_delta = inputs.delta(running_delta, rule, logprobs)
    if sums and logprobs.shape == (rows,):  # a token of padding: else they would pass for those of tokens
        logprobs, mask = _packing.one_more(logprobs), _packing.one_more(mask)
        nll_mask, log_sum_sq_probs = (
            None if x is None else _packing.one_more(x) for x in (nll_mask, log_sum_sq_probs)
        )
    given, ref = (mask, nll_mask), None if sums else ref_logprobs
    mask, nll_mask = inputs.supported(logprobs.detach(), ref, mask, nll_mask)
    call = calls.PreferenceLossCall(
        logprobs=logprobs, ref_logprobs=ref_logprobs, mask=mask, nll_mask=nll_mask,
        log_sum_sq_probs=log_sum_sq_probs, cu_seqlens=cu_seqlens, labels=labels, kl=kl, items=items,
        nll_items=nll_items, running_delta=running_delta, rule=rule,
    )  # fmt: skip
    total, metrics, rewards, logps, delta = op(call)
    outside = given[0] ^ mask
    if nll_mask is not None:
        assert given[1] is not None
        outside |= given[1] ^ nll_mask
    if cu_seqlens is not None:  # padding counts nowhere
        outside &= torch.arange(len(outside), device=outside.device) < cu_seqlens[-1]
    metrics = torch.cat([metrics, torch.count_nonzero(outside)[None]])
    if labels is None:
        chosen, rejected = rewards[: rows // 2], rewards[rows // 2 :]
    else:
        chosen, rejected = rewards.where(labels, 0), rewards.where(~labels, 0)
    return calls.PreferenceLossOutput(total, metrics, chosen, rejected, logps, delta)


DEFAULTS: dict[str, Any] = inspect.unwrap(preference_loss).__kwdefaults__


def preference_loss_preset(name: PreferencePreset) -> dict[str, Any]:
    """The arguments with which ``preference_loss`` is the loss of a paper: ``preference_loss(...,
    **preset)``.

    Raises:
        ValueError: the name is not known; lists those that are.

    Examples:
        >>> rlkernel.preference_loss_preset("simpo")
        {'loss_type': 'simpo', 'beta': 2.0, 'gamma': 1.0}
    """
    return dict(PRESETS[_validate.choice("name", name, PRESETS)])


def _forward(impl: ModuleType, call: calls.PreferenceLossCall) -> calls.PreferenceLossResults:
    logprobs, ref_logprobs, mask = call.logprobs, call.ref_logprobs, call.mask
    _packing.check(call.cu_seqlens, logprobs.shape[0])
    if debug.enabled():
        _validate.finite("logprobs", logprobs, mask)
        if ref_logprobs is not None and ref_logprobs.shape == logprobs.shape:
            _validate.finite("ref_logprobs", ref_logprobs, mask)
    return impl.forward(call)


def _like(call: calls.PreferenceLossCall) -> calls.PreferenceLossResults:
    logprobs, cu_seqlens = call.logprobs, call.cu_seqlens
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    new = logprobs.new_empty
    return calls.PreferenceLossResults(
        loss=new(()),
        metrics=new(len(calls.PAIR_METRICS)),
        rewards=new(rows),
        logps=new(rows),
        running_delta=None if call.running_delta is None else new(2),
        sums=new((rows, len(calls.SEQUENCE_SUMS)), dtype=torch.float64),
        slopes=new(rows + 1, dtype=torch.float64),
    )


op = Op(
    "preference_loss",
    calls.PreferenceLossCall,
    calls.PreferenceLossResults,
    outputs=5,
    pick=("logprobs", "mask"),
    forward=_forward,
    backward=lambda impl, call, results, grads: impl.backward(call, results, grads[0]),
    like=_like,
    gradients=("logprobs",),
    differentiable=("loss",),
    saves=("mask", "nll_mask", "cu_seqlens", "labels", "sums", "slopes"),
)
