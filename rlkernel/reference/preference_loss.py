"""The preference losses in plain PyTorch: sums over the tokens of a sequence, the loss of the sums, its
gradient.

Sums and all that follows from them are fp64, whatever the dtype of the tokens: a log-ratio is the small
difference of two sums.  The derivatives are those of autograd.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.calls.preference_loss import (
    PREFERENCE_DIVERGENCES,
    PREFERENCE_TERMS,
    SEQUENCE_SUMS,
    PreferenceLossCall,
    PreferenceLossResults,
    PreferenceRule,
)
from rlkernel.reference import differentiating
from rlkernel.reference import unsupported as unsupported


def forward(call: PreferenceLossCall) -> PreferenceLossResults:
    return loss(call, sums(call))


def sums(call: PreferenceLossCall) -> Tensor:
    """[rows, 7] of fp64, the columns of ``SEQUENCE_SUMS``."""
    logprobs, ref_logprobs, cu_seqlens = call.logprobs, call.ref_logprobs, call.cu_seqlens
    mask, nll_mask, ld_alpha = call.mask, call.nll_mask, call.rule.ld_alpha
    rows = _rows(logprobs, cu_seqlens)
    count = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if not count:  # all is padding, which is no sequence's
        return torch.zeros(0, len(SEQUENCE_SUMS), dtype=torch.float64, device=logprobs.device)

    def sum_of(x: Tensor, kept: Tensor) -> Tensor:
        x = torch.where(kept, x, 0).double()
        if cu_seqlens is None:
            return x.sum(1)
        return x.new_zeros(count).index_add(0, rows, x)  # a token behind the last sequence adds 0

    places = _places(logprobs)
    inside = mask if cu_seqlens is None else mask & (places < cu_seqlens[-1])
    ones = torch.ones_like(logprobs)
    tokens = sum_of(ones, inside)
    start = 0 if cu_seqlens is None else cu_seqlens[rows]
    cutoff = torch.full_like(tokens, logprobs.shape[-1])
    weight = ones.double()
    if ld_alpha != 1:
        shared = tokens.view(2, -1).amin(0).repeat(2)
        rank = inside.to(torch.int64).cumsum(-1)
        before = 0 if cu_seqlens is None else torch.cat([rank.new_zeros(1), rank])[cu_seqlens[:-1]][rows]
        tail = rank - before > (shared[:, None] if cu_seqlens is None else shared[rows])
        weight = torch.where(tail, ld_alpha, weight)
        cutoff = sum_of(ones, ~tail & (places - start >= 0))
    kept = inside
    if nll_mask is not None:
        kept = nll_mask if cu_seqlens is None else nll_mask & (places < cu_seqlens[-1])
    zero = torch.zeros_like(tokens)
    reference = zero if ref_logprobs is None else ref_logprobs.double()
    if ref_logprobs is not None and ref_logprobs.shape == logprobs.shape:
        reference = sum_of(ref_logprobs.double() * weight, inside)
    aligned = zero
    if call.log_sum_sq_probs is not None:
        aligned = sum_of(logprobs.double() - call.log_sum_sq_probs.double(), inside)
    columns = (
        sum_of(logprobs.double() * weight, inside), reference, tokens, sum_of(logprobs, kept),
        sum_of(ones, kept), aligned, cutoff,
    )  # fmt: skip
    return torch.stack(columns, 1)


def loss(call: PreferenceLossCall, stats: Tensor) -> PreferenceLossResults:
    dtype = call.logprobs.dtype
    with differentiating(call) as call:
        columns = stats.clone().unbind(1)
        logps, nll = columns[0].clone().requires_grad_(), columns[3].clone().requires_grad_()
        total, metrics, rewards, means, delta = _total(logps, nll, columns, call)
        total = total + (logps.sum() + nll.sum()) * 0
        of_logps, of_nll = torch.autograd.grad(total, (logps, nll))
    # every sequence of the likelihood has the same slope
    slope = of_nll.sum() / (of_nll != 0).sum().clamp(min=1)
    slopes = torch.cat([torch.where(columns[2] > 0, of_logps, 0), slope[None]])
    delta = None if delta is None else delta.to(dtype)
    total, metrics, rewards, means = (x.detach().to(dtype) for x in (total, metrics, rewards, means))
    return PreferenceLossResults(total, metrics, rewards, means, delta, stats, slopes)


def backward(call: PreferenceLossCall, results: PreferenceLossResults, grad_loss: Tensor) -> tuple[Tensor]:
    """d loss / d logprobs times ``grad_loss``, in its dtype."""
    mask, nll_mask, cu_seqlens, labels = call.mask, call.nll_mask, call.cu_seqlens, call.labels
    stats, slopes, ld_alpha = results.sums, results.slopes, call.rule.ld_alpha
    rows, count = _rows(mask, cu_seqlens), stats.shape[0]
    if not count:
        return (torch.zeros_like(mask, dtype=grad_loss.dtype),)
    places = _places(mask)
    inside = places >= 0 if cu_seqlens is None else places < cu_seqlens[-1]
    chosen = labels if labels is not None else torch.arange(count, device=mask.device) < count // 2
    spread = (lambda x: x[:, None]) if cu_seqlens is None else (lambda x: x[rows])
    start = 0 if cu_seqlens is None else cu_seqlens[rows]
    slope = spread(slopes[:-1])
    if ld_alpha != 1:
        slope = torch.where(places - start < spread(stats[:, 6]), slope, slope * ld_alpha)
    of_nll = torch.where((mask if nll_mask is None else nll_mask) & spread(chosen), slopes[-1], 0)
    grad = torch.where(mask, slope, 0) + of_nll
    return (torch.where(inside, grad * grad_loss.double(), 0).to(grad_loss.dtype),)


def _places(like: Tensor) -> Tensor:
    return torch.arange(like.shape[-1], device=like.device).expand(like.shape)


def _rows(like: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """The sequence of each token; of those behind the last one, the last one."""
    if cu_seqlens is None:
        return torch.arange(like.shape[0], device=like.device)[:, None].expand(like.shape)
    last = max(cu_seqlens.shape[0] - 2, 0)
    return torch.searchsorted(cu_seqlens[1:], _places(like), right=True).clamp(max=last)


def _total(
    logps: Tensor, nll: Tensor, columns: tuple[Tensor, ...], call: PreferenceLossCall
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    rule, labels, kl = call.rule, call.labels, call.kl
    _, ref, tokens, _, nll_tokens, aligned, _ = columns
    present, length = tokens > 0, tokens.clamp(min=1)
    if rule.paired:
        half = len(tokens) // 2
        chosen = torch.arange(2 * half, device=tokens.device) < half
        count = present[:half] & present[half:]  # a pair has two sides, each with a token
        counted = count.repeat(2)
    else:
        assert labels is not None
        chosen, counted, count = labels, present, present
    with torch.no_grad():
        values = torch.where(present, logps / length if rule.per_token else logps, 0)
        rewards = rule.beta * torch.where(present, values if rule.per_token else logps - ref, 0)
    # what does not count is replaced before it meets any arithmetic, by what has a derivative in every loss
    logps, ref = torch.where(counted, logps, -1), torch.where(counted, ref, 0)
    length = torch.where(counted, length, 1)
    number = count.sum().double()
    delta, state = torch.zeros_like(number), None
    if call.running_delta is not None:
        mean, batches = call.running_delta.double()
        here = torch.where(counted, rewards, 0).sum() / (2 * number)
        delta = torch.where(number > 0, mean + (here - mean) / (batches + 1), mean)
        state = torch.stack([delta, batches + (number > 0)])
    terms = _paired if rule.paired else _unpaired
    each, weight, odds = terms(logps, ref, length, aligned, delta, count, call)
    divisor = rule.items or number.clamp(min=1)
    divisor = divisor if call.items is None else call.items.double()
    kept = torch.where(chosen, nll_tokens, 0)
    # replaced for sequences that have none, or the slope of a token would not be the same for all
    likelihood = torch.where(chosen & (kept > 0), -nll, 0).sum()
    nll_divisor = rule.nll_items or kept.sum().clamp(min=1)
    nll_divisor = nll_divisor if call.nll_items is None else call.nll_items.double()

    def mean_of(x: Tensor, where: Tensor) -> Tensor:
        return torch.where(where, x, 0).sum() / where.sum().clamp(min=1)

    sft = sum(w for t, w in zip(rule.terms, rule.weights, strict=True) if PREFERENCE_TERMS[t] == "sft")
    mean_weight = torch.where(number > 0, mean_of(weight, count), 1)
    preference = each.sum() / divisor
    total = preference + (rule.nll_coef + sft * mean_weight) * likelihood / nll_divisor
    total = total * rule.factor
    with torch.no_grad():
        better = rewards.new_zeros(len(count))
        if rule.paired:
            better = (rewards[:half] > rewards[half:]).double()
        sides = [counted & chosen, counted & ~chosen]
        of_sides = [mean_of(rewards, side) for side in sides]
        of_odds = (
            [number * 0] * 2 if odds is None else [mean_of(x, count) for x in (F.logsigmoid(odds), odds)]
        )
        divergence = torch.zeros_like(number) if kl is None else kl.double().sum()
        if kl is not None and kl.shape == count.shape and len(kl) != 1:
            divergence = mean_of(kl.double(), count)
        metrics = torch.stack([
            *of_sides, of_sides[0] - of_sides[1], mean_of(better, count),
            *(mean_of(values, side) for side in sides), preference,
            likelihood / kept.sum().clamp(min=1), *of_odds, mean_weight, divergence, number,
            torch.where(chosen, tokens, 0).sum(), torch.where(chosen, 0, tokens).sum(),
            (~each.isfinite()).sum().double(),
        ])  # fmt: skip
    return total, metrics.detach(), rewards, values, state


def _unpaired(
    logps: Tensor, ref: Tensor, length: Tensor, aligned: Tensor, delta: Tensor, count: Tensor,
    call: PreferenceLossCall,
) -> tuple[Tensor, Tensor, None]:  # fmt: skip
    labels, kl, rule = call.labels, call.kl, call.rule
    assert labels is not None
    total = torch.zeros_like(logps)
    sign = torch.where(labels, 1.0, -1.0).double()
    for term, weight in zip(rule.terms, rule.weights, strict=True):
        shift = kl.double() if PREFERENCE_TERMS[term] == "kto" and kl is not None else 0
        total = total + weight * torch.sigmoid(-rule.beta * (logps - ref - shift) * sign)
    total = total * torch.where(labels, total.new_tensor(rule.desirable_weight), rule.undesirable_weight)
    return torch.where(count, total, 0), torch.ones_like(total), None


def _paired(
    logps: Tensor, ref: Tensor, length: Tensor, aligned: Tensor, delta: Tensor, count: Tensor,
    call: PreferenceLossCall,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The loss of each pair (to which that of a rank is added, whose sum is the same), its weight, the log
    odds."""
    rule, beta = call.rule, call.rule.beta
    ratios = logps - ref
    c, r = ratios.chunk(2)
    score_c, score_r = _score(ratios, rule).chunk(2)
    length_c, length_r = length.chunk(2)
    means = logps / length
    mean_c, mean_r = means.chunk(2)
    z = beta * (score_c - score_r)
    normed = score_c / length_c - score_r / length_r
    odds = None
    total, ranked = torch.zeros_like(c), torch.zeros_like(c)
    for term, factor, e in zip(rule.terms, rule.weights, rule.smoothing, strict=True):
        name = PREFERENCE_TERMS[term]
        if name == "sft":
            continue
        if name == "sigmoid":
            each = _smoothed(z, e)
        elif name == "hinge":
            each = torch.relu(1 - z)
        elif name == "ipo":
            each = (normed - 1 / (2 * beta)) ** 2
        elif name == "ipo_sum":
            each = (score_c - score_r - 1 / (2 * beta)) ** 2
        elif name == "exo_pair":
            each = torch.sigmoid(z) * (F.logsigmoid(z) - math.log1p(-e))
            each = each + torch.sigmoid(-z) * (F.logsigmoid(-z) - math.log(e))
        elif name == "nca_pair":
            each = -F.logsigmoid(beta * c) - (F.logsigmoid(-beta * c) + F.logsigmoid(-beta * r)) / 2
        elif name == "robust":
            each = (e * F.logsigmoid(-z) - (1 - e) * F.logsigmoid(z)) / (1 - 2 * e)
        elif name == "bco_pair":
            each = -F.logsigmoid(beta * c - delta) - F.logsigmoid(delta - beta * r)
        elif name == "sppo_hard":
            each = (c - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2
        elif name in ("aot", "aot_unpaired"):
            ours, theirs = c, r
            if name == "aot":
                ours, theirs = (x.chunk(2)[0] - x.chunk(2)[1] for x in (logps, ref))
            # pairs that do not count come last: they stay among themselves
            keys = (torch.where(count, x, torch.inf) for x in (ours, theirs))
            first, second = (x.argsort(stable=True) for x in keys)
            each = _smoothed(beta * (ours[first] - theirs[second]), e)
            ranked = ranked + factor * torch.where(count[first] | count[second], each, 0)
            continue
        elif name == "apo_zero":
            each = torch.sigmoid(-beta * c) + torch.sigmoid(beta * r)
        elif name == "apo_down":
            each = torch.sigmoid(beta * c) + torch.sigmoid(-beta * (c - r))
        elif name == "discopop":
            # one exponential: the product of two is inf * 0 where the margin is large and negative
            m = torch.sigmoid(z / rule.discopop_tau)
            below = torch.exp(torch.where(z < 0, z / rule.discopop_tau - z, 0))
            below = below * torch.sigmoid(-z / rule.discopop_tau)
            blend = torch.where(z < 0, below, torch.exp(-z.clamp(min=0)) * m)
            each = -F.logsigmoid(z) * (1 - m) + blend
        elif name == "sigmoid_norm":
            each = _smoothed(beta * normed, e)
        elif name == "orpo":
            odds = mean_c - mean_r - (_log1mexp(mean_c) - _log1mexp(mean_r))
            each = -beta * F.logsigmoid(odds)
        elif name == "simpo":
            score_of_c, score_of_r = _score(means, rule).chunk(2)
            each = _smoothed(beta * (score_of_c - score_of_r) - rule.gamma, e)
        total = total + factor * each
    weight = torch.ones_like(total)
    if rule.weighting:
        weight = torch.exp(aligned / length).view(2, -1).prod(0)
    return torch.where(count, total * weight, 0) + ranked, weight, odds


def _smoothed(z: Tensor, e: float) -> Tensor:
    return -(1 - e) * F.logsigmoid(z) - e * F.logsigmoid(-z) if e else -F.logsigmoid(z)


def _score(x: Tensor, rule: PreferenceRule) -> Tensor:
    name = PREFERENCE_DIVERGENCES[rule.divergence]
    if name == "forward_kl":
        return -torch.expm1(-x)
    if name == "js_divergence":
        return math.log(2) + F.logsigmoid(x)
    if name == "alpha_divergence":
        return torch.expm1((rule.exponent * x).clamp(max=80)) / rule.exponent
    return x


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)), in the form that keeps its digits on either side of log(1/2)."""
    half = -math.log(2)
    return torch.where(
        x < half, torch.log1p(-torch.exp(x.clamp(max=half))), torch.log(-torch.expm1(x.clamp(min=half)))
    )


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    drift: float = 0.2,
    extras: bool = False,
    pairs: bool = False,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.preference_loss`` for ``shape`` [2B, L], or with ``pairs`` [B, L]:
    completions behind prompts of all lengths, some tokens of which do not count; with ``extras`` also those
    of WPO and of the likelihood."""
    rows, length = shape
    rows = 2 * rows if pairs else rows
    g = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(rows, length, generator=g, dtype=torch.float64, device="cpu")

    start = (torch.rand(rows, 1, generator=g, dtype=torch.float32, device="cpu") * length / 3).long()
    end = (
        start
        + 1
        + (torch.rand(rows, 1, generator=g, dtype=torch.float32, device="cpu") * (length - start)).long()
    )
    places = torch.arange(length, device="cpu")
    holes = (torch.rand(rows, length, generator=g, dtype=torch.float32, device="cpu") <= 0.05) & (
        places != start
    )
    mask = (places >= start) & (places < end) & ~holes
    ref = -noise().abs()
    tensors = {"logprobs": ref - drift * noise().abs(), "ref_logprobs": ref}
    if extras:
        tensors["log_sum_sq_probs"] = -noise().abs()
    tensors = {name: x.to(dtype).to(device) for name, x in tensors.items()}
    tensors["mask"] = mask.to(device)
    if extras:
        tensors["nll_mask"] = (places < end).expand(rows, length).contiguous().to(device)
    return tensors
