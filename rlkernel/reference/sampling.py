"""What ``sampling`` means, in plain PyTorch, by sorting; in fp64 it is the truth for backends."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls import sampling as calls
from rlkernel.calls.sampling import GROUP, MASS_ONE, SampleStats, Sampling, SamplingCall
from rlkernel.reference import sampling_stream as stream


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return ["it keeps no records of tiles"] if "tiles" in options.get("needs", ()) else []


def forward(call: SamplingCall) -> SampleStats:
    """A token of each row, its log-probabilities and the set that the filters keep."""
    logits, adjusted, sampling, _ = call
    dtype = torch.promote_types(logits.dtype, torch.float32)
    x = logits.to(dtype)
    z = x if adjusted is None else adjusted.to(dtype)
    if sampling.token_bitmask is not None:
        z = z.masked_fill(~_allowed(sampling.token_bitmask, z.shape[1]), -torch.inf)
    bad = (x.isnan() | (x == torch.inf) | z.isnan() | (z == torch.inf)).any(-1)
    valid = ~bad & (z > -torch.inf).any(-1) & _in_range(sampling, z)
    x, z = (torch.where(valid[:, None], y, 0) for y in (x, z))

    t = _column(sampling.temperature, z, z.dtype)
    greedy = (t == 0)[:, 0]
    softmax = _softmax(z, torch.where((t == 0) | ~valid[:, None], 1, t))
    picked = _filter(softmax, sampling, greedy)
    token = sampling.token_ids
    if token is None:
        token = torch.where(greedy, z.argmax(-1), _draw(softmax, picked.kept, picked.filtered, sampling))
    return _statistics(x, softmax, picked, valid, token, sampling)


def _in_range(sampling: Sampling, z: Tensor) -> Tensor:
    """Rows [B] whose parameters mean something; on a GPU nobody has looked at those of tensors."""
    t = _column(sampling.temperature, z, z.dtype)
    p, m, s = (_column(x, z) for x in (sampling.top_p, sampling.min_p, sampling.top_n_sigma))
    held = (t == 0) | ((t >= torch.finfo(z.dtype).tiny) & (t <= torch.finfo(z.dtype).max))
    held = held & (p > 0) & (p <= 1) & (m >= 0) & (m <= 1) & (s > 0)
    if sampling.thresholds is not None:
        held = held & ((sampling.thresholds >= 0) & (sampling.thresholds <= 1)).all(-1, keepdim=True)
    if sampling.band is not None:
        held = held & ((sampling.band > 0) & (sampling.band <= 1)).all(-1, keepdim=True)
    return (held & (_column(sampling.top_k, z, torch.int64) >= -1))[:, 0]


class _Softmax(NamedTuple):
    z: Tensor
    t: Tensor  # [B, 1], 1 for greedy rows
    row_max: Tensor
    d: Tensor  # z - max
    e: Tensor  # exp(d / t)
    mass: Tensor  # of e, as integers
    total: Tensor  # sum of e

    @property
    def weighted(self) -> Tensor:
        return torch.where(self.e == 0, 0, self.e * self.d / self.t)

    @property
    def logprobs(self) -> Tensor:
        return self.d / self.t - self.total.log()[:, None]


def _softmax(z: Tensor, t: Tensor) -> _Softmax:
    row_max = z.amax(-1) if z.shape[0] else z.new_empty(0)
    d = torch.where(z == -torch.inf, -torch.inf, z - row_max[:, None])
    e = (d / t).exp()
    return _Softmax(z, t, row_max, d, e, _integer_mass(e), e.sum(-1))


def _integer_mass(e: Tensor) -> Tensor:
    """exp(d / T) as a multiple of 2**-40: sums of these do not depend on their order."""
    return (e.double() * MASS_ONE).round().to(torch.int64)


class _Picked(NamedTuple):
    kept: Tensor  # [B, V]
    mass: Tensor  # theirs, an integer
    filtered: Tensor  # rows that do not keep the whole vocabulary
    greedy: Tensor


def _filter(softmax: _Softmax, sampling: Sampling, greedy: Tensor) -> _Picked:
    """Every filter but typical-p and XTC keeps a prefix of the order (logit descending, id ascending); these
    two keep a band of logits, of what the others leave."""
    z, d = softmax.z, softmax.d
    rows, vocab = z.shape
    top_k, top_p = _column(sampling.top_k, z, torch.int64), _column(sampling.top_p, z)
    min_p, sigmas = _column(sampling.min_p, z), _column(sampling.top_n_sigma, z)
    k_on, p_on, m_on, s_on = (top_k >= 1) & (top_k < vocab), top_p < 1, min_p > 0, sigmas < torch.inf
    finite = z > -torch.inf
    on = (k_on | p_on | m_on | s_on)[:, 0]
    if sampling.token_bitmask is not None:
        on = on | ~finite.all(-1)

    cutoff = torch.where(m_on, (softmax.t.double() * min_p.double().log()).to(d.dtype), -torch.inf)
    below = (-sigmas.double() * _deviation(z, finite)).to(d.dtype)
    cutoff = torch.where(s_on, torch.maximum(cutoff, below), cutoff)
    if sampling.thresholds is not None:
        on = on | (sampling.thresholds > 0).any(-1)
        least = softmax.t.double() * _least(softmax, sampling.thresholds.double())
        cutoff = torch.maximum(cutoff, least.to(d.dtype))
    if sampling.band is not None:
        on = on | (sampling.band < 1).any(-1)
    allowed = finite & (d >= cutoff)

    order = z.sort(dim=-1, descending=True, stable=True).indices
    mass = softmax.mass.gather(-1, order)
    place = torch.arange(vocab, device=z.device)
    first_k = torch.where(k_on, top_k, vocab)
    count = torch.minimum(allowed.sum(-1, keepdim=True), first_k)
    share_of = {"sequential": count, "joint": torch.full_like(count, vocab), "top_k_first": first_k}
    whole = torch.where(place < share_of[sampling.order], mass, 0).sum(-1)
    bound = (top_p.double() * whole[:, None].double()).ceil().to(torch.int64)
    nucleus = ((mass.cumsum(-1) - mass) < bound).sum(-1, keepdim=True)
    count = torch.where(p_on, torch.minimum(count, nucleus), count)

    count = torch.where(on[:, None], count, vocab)
    count = torch.where(greedy[:, None], 1, count)
    first = place < count
    kept = torch.zeros_like(first).scatter_(-1, order, first)
    if sampling.band is not None:
        narrowed = _exclude(softmax, _typical(softmax, kept, sampling.band[:, :1]), sampling.band[:, 1:])
        kept = torch.where((on & ~greedy)[:, None], narrowed, kept)
    filtered = on & ~greedy & (kept.sum(-1) < vocab)
    return _Picked(kept, torch.where(kept, softmax.mass, 0).sum(-1), filtered, greedy)


def _typical(softmax: _Softmax, kept: Tensor, share: Tensor) -> Tensor:
    """Of the ``kept``, those whose surprise is nearest to their entropy, until they have ``share`` [B, 1].

    The surprise of a token less the entropy is the mean of z / T less its own: what counts is how far a token
    is from the mean logit.  Tokens as far as the last one are kept too.
    """
    d, t = softmax.d, softmax.t
    mass = torch.where(kept, softmax.mass, 0)
    total = mass.sum(-1, keepdim=True)
    surprise = torch.where(kept & (softmax.e > 0), softmax.e * (-d / t), 0)
    mean = _integer_mass(surprise).sum(-1, keepdim=True).double() / total.double()
    far = torch.where(kept, (d - (-t.double() * mean).to(d.dtype)).abs(), torch.inf)
    far_sorted, order = far.sort(dim=-1, stable=True)
    target = (share.double() * total.double()).ceil().to(torch.int64)
    last = (mass.gather(-1, order).cumsum(-1) < target).sum(-1, keepdim=True)
    radius = far_sorted.gather(-1, last.clamp(max=d.shape[1] - 1))
    return kept & ((far <= radius) | (share >= 1))


def _exclude(softmax: _Softmax, kept: Tensor, threshold: Tensor) -> Tensor:
    """The ``kept`` without those likelier than the least likely one that has ``threshold`` [B, 1] of them."""
    t = softmax.t.double()
    total = torch.where(kept, softmax.mass, 0).sum(-1, keepdim=True).double() / MASS_ONE
    reached = t * (threshold.double() * total).log().clamp(min=calls.LEAST_EXCLUDED)
    reaches = kept & (softmax.d >= reached.to(softmax.d.dtype))
    least = torch.where(reaches, softmax.z, torch.inf).amin(-1, keepdim=True)
    return kept & ((softmax.z <= least) | (threshold >= 1))


def _least(softmax: _Softmax, thresholds: Tensor) -> Tensor:
    """The least (z - max) / T [B, 1] that epsilon, eta and top-a keep; the likeliest token has 0."""
    epsilon, eta, top_a = thresholds.log().split(1, -1)  # -inf where off
    total, log_sum = softmax.total.double()[:, None], softmax.total.double().log()[:, None]
    entropy = log_sum - softmax.weighted.double().sum(-1, keepdim=True) / total
    least = torch.maximum(epsilon, torch.minimum(eta, 0.5 * eta - entropy)) + log_sum
    return torch.maximum(least, top_a - log_sum).clamp(max=0)


def _deviation(z: Tensor, finite: Tensor) -> Tensor:
    """Standard deviation (of the population) of the finite logits [B, 1], fp64."""
    wide = torch.where(finite, z, 0).double()
    count = finite.sum(-1, keepdim=True)
    mean = wide.sum(-1, keepdim=True) / count
    return (torch.where(finite, wide - mean, 0).square().sum(-1, keepdim=True) / count).sqrt()


def _draw(softmax: _Softmax, kept: Tensor, filtered: Tensor, sampling: Sampling) -> Tensor:
    seeds, positions = sampling.key
    key = seeds[:, None], positions[:, None]
    z, t = softmax.z, softmax.t
    ids = torch.arange(z.shape[1], device=z.device)[None]
    if sampling.gumbel:
        noise = -(-(-stream.uniform32(*key, ids)).log1p()).log()
        noisy = softmax.d / t + noise.to(z.dtype)
        return torch.where(kept | ~filtered[:, None], noisy, -torch.inf).argmax(-1)

    # The best of a group's noisy logits is log(mass of the group) plus one Gumbel variable: one draw for each
    # 64 tokens says which group wins, a second one which of its tokens.
    padded = torch.nn.functional.pad(z, (0, -z.shape[1] % GROUP), value=-torch.inf)
    groups = padded.unflatten(-1, (-1, GROUP))
    group_max = groups.amax(-1)
    shifted = torch.where(groups == -torch.inf, -torch.inf, groups - group_max[..., None])
    e = (shifted / t[..., None]).exp()
    ids = torch.arange(groups.shape[1], device=z.device)[None]
    exponential = -(-stream.uniform64(calls.Domain.GROUP, *key, ids)).log1p()
    keys = (group_max - softmax.row_max[:, None]) / t + e.sum(-1).log() - exponential.log().to(z.dtype)
    group = torch.where(group_max == -torch.inf, -torch.inf, keys).argmax(-1, keepdim=True)
    inside = _integer_mass(e.gather(1, group[..., None].expand(-1, -1, GROUP))[:, 0])
    token = GROUP * group[:, 0] + _pick(inside, stream.uniform53(calls.Domain.INSIDE, *key))

    # A winner that was filtered out has lost with the probability that the kept tokens do not have: a second,
    # independent draw among them makes the result exact.
    again = _pick(torch.where(kept, softmax.mass, 0), stream.uniform53(calls.Domain.REDRAW, *key))
    lost = filtered & ~kept.gather(-1, token[:, None].clamp(max=z.shape[1] - 1))[:, 0]
    return torch.where(lost, again, token)


def _pick(mass: Tensor, uniform: Tensor) -> Tensor:
    """The index [B] at which the running sum of ``mass`` [B, n] passes the fraction ``uniform`` [B, 1]."""
    sums = mass.cumsum(-1)
    total = sums[:, -1:]
    place = torch.minimum((uniform * total.double()).to(torch.int64), total - 1)
    return (sums <= place).sum(-1).clamp(max=mass.shape[1] - 1)


def _statistics(
    x: Tensor, softmax: _Softmax, picked: _Picked, valid: Tensor, token: Tensor, sampling: Sampling
) -> SampleStats:
    kept, kept_mass, filtered, greedy = picked
    z, vocab = softmax.z, softmax.z.shape[1]
    inside = (token >= 0) & (token < vocab)
    index = torch.where(inside, token, 0)[:, None]
    usable = valid & inside

    def at(values: Tensor) -> Tensor:
        return torch.where(usable, values.gather(-1, index)[:, 0], torch.nan)

    log_sum = softmax.total.log()
    tempered = at(softmax.logprobs)
    is_kept = kept.gather(-1, index)[:, 0]
    log_kept = (kept_mass.double() / MASS_ONE).log()
    restricted = ((softmax.d / softmax.t).gather(-1, index)[:, 0].double() - log_kept).to(z.dtype)
    processed = torch.where(filtered, torch.where(is_kept, restricted, -torch.inf), tempered)
    single = greedy & (not sampling.greedy_softmax)
    one = torch.where(is_kept, 0.0, -torch.inf).to(z.dtype)  # of two numbers torch makes its default dtype
    processed = torch.where(single, one, processed)
    processed = torch.where(usable, processed, torch.nan)
    share = (kept_mass.double() / MASS_ONE / softmax.total.double()).to(z.dtype)
    share = torch.where(greedy, (-log_sum).exp(), torch.where(filtered, share, 1.0))
    count = torch.where(filtered | greedy, kept.sum(-1), (z > -torch.inf).sum(-1))

    raw = at(x.log_softmax(-1)) if sampling.raw else None
    entropy = rank = support = None
    if sampling.entropy:
        entropy = torch.where(valid, log_sum - softmax.weighted.sum(-1) / softmax.total, torch.nan)
    if sampling.rank:
        ids, at_token = torch.arange(vocab, device=z.device), z.gather(-1, index)
        ties = z == at_token
        if sampling.rank_ties == "first":
            ties = ties & (ids <= index)
        elif sampling.rank_ties == "kept":
            ties = ties & (kept | (~is_kept | (greedy & ~single))[:, None])
        rank = torch.where(usable, ((z > at_token) | ties).sum(-1), 0)
    if sampling.support:
        support = _support(kept & (valid & (filtered | greedy))[:, None], sampling.support)
    if sampling.token_ids is None:
        token = torch.where(valid, token, -1)
    return SampleStats(
        token_ids=token,
        raw_logprobs=raw,
        tempered_logprobs=tempered,
        processed_logprobs=processed,
        kept_mass=torch.where(valid, share, torch.nan),
        kept_count=torch.where(valid, count, 0),
        entropy=entropy,
        rank=rank,
        support=support,
        valid=valid,
        row_max=torch.where(valid, softmax.row_max, torch.nan) if sampling.softmax else None,
        log_sum=torch.where(valid, log_sum, torch.nan) if sampling.softmax else None,
    )


def _support(kept: Tensor, room: int) -> Tensor:
    """The ids that are set, ascending, [B, room] padded with -1; all -1 where there are more."""
    place = kept.cumsum(-1) - 1
    fits = kept & (place[:, -1:] < room)
    table = torch.full((kept.shape[0], room + 1), -1, dtype=torch.int32, device=kept.device)
    ids = torch.arange(kept.shape[1], dtype=torch.int32, device=kept.device).expand(kept.shape)
    # what does not fit goes to a last column that is cut off
    table.scatter_(-1, torch.where(fits, place, room), ids)
    return table[:, :room].contiguous()


def _allowed(bitmask: Tensor, vocab: int) -> Tensor:
    ids = torch.arange(vocab, device=bitmask.device)
    return (bitmask[:, ids // 32] >> (ids % 32).to(torch.int32)) & 1 == 1


def _column(value: float | Tensor, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """[B, 1] in ``dtype``, or in that of ``like`` by way of fp32, in which all backends take a number."""
    rows = like.shape[0]
    if isinstance(value, Tensor):
        return value.to(dtype or like.dtype)[:, None]
    made = torch.full((rows, 1), value, dtype=dtype or torch.float32, device=like.device)
    return made.to(dtype or like.dtype)


def make_inputs(
    N: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float = 3.0,
) -> dict[str, Any]:
    """Arguments of ``sample``: logits whose few large values stand out as a language model's do."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(N, V, generator=g, dtype=torch.float32, device="cpu") * scale
    seeds = torch.randint(-(2**63), 2**63 - 1, (N,), generator=g, device="cpu")
    positions = torch.randint(0, 4096, (N,), generator=g, device="cpu")
    return {
        "logits": logits.to(dtype).to(device),
        "seeds": seeds.to(device),
        "positions": positions.to(device),
    }
