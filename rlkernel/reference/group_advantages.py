"""What ``group_advantages`` means, in plain PyTorch, without a loop over groups and without atomics.

Sums over groups are trees over the places in the group: log2(N) steps on all responses at once, whose order
follows from those places alone.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.group_advantages import GroupAdvantagesCall, GroupAdvantagesResults
from rlkernel.reference import unsupported as unsupported
from rlkernel.reference import whiten


def forward(call: GroupAdvantagesCall) -> GroupAdvantagesResults:
    rewards, estimator, unbiased, eps = call.rewards, call.estimator, call.unbiased, call.eps
    order, starts, ends = _groups(rewards, call.group_ids, call.group_size, call.group_offsets)

    def placed(x: Tensor) -> Tensor:
        return x if order is None else x[order]

    kept = torch.ones_like(rewards, dtype=torch.bool) if call.mask is None else call.mask
    r = placed(torch.where(kept, rewards, 0).double())
    kept = placed(kept)
    weights = r.new_ones(1) if call.reward_weights is None else call.reward_weights.double()
    share = None if call.lengths is None else placed(call.lengths.double())

    def of_group(x: Tensor, counts: Tensor) -> Tensor:
        group = _Group.of(x, counts, starts, ends)
        one = (group.size == 1) & (call.singletons == "reward")
        own = torch.where(counts, x, 0)
        if estimator in ("grpo", "dr_grpo", "gdpo"):
            scale = _scale(x, counts, group, call.scale_rewards, unbiased)
            one_scale = 1.0 if call.scale_rewards == "none" else 1.0 + eps
            return torch.where(one, own / one_scale, _over(group.deviation, scale, eps))
        if estimator == "rloo":
            return torch.where(one, own, group.deviation * group.size / (group.size - 1).clamp(min=1))
        if estimator == "grpo_loo":
            alone = _leave_one_out(x, counts, starts, ends, unbiased, eps)
            return torch.where(one, own, alone)
        if estimator == "opo":
            assert share is not None
            length = torch.where(counts, share, 0)
            tokens = _tree(length, starts, ends)
            above = _tree(length * group.shifted, starts, ends) / tokens
            apart = torch.where(group.shifted == above, 0, group.shifted - above)
            # without a token all lengths are alike
            return torch.where(one, own, torch.where(tokens == 0, group.deviation, apart))
        if estimator == "maxrl":
            return torch.where(one, own, _over(group.deviation, group.mean, eps))
        if estimator == "grpo_passk":
            return _over(group.lead(counts), _scale(x, counts, group, call.scale_rewards, unbiased), eps)
        return torch.where(one, own, group.deviation)  # reinforce_plus_plus_baseline

    if estimator == "gdpo":
        columns = [of_group(x, c) for x, c in zip(r.T, kept.T, strict=True)]
        result = (torch.where(kept, torch.stack(columns, 1), 0) * weights).sum(1)
        counts = kept.any(1)
    else:
        counts = kept.any(1)
        total = (r * weights).sum(1)
        if estimator == "remax":
            assert call.baselines is not None
            result = total - placed(call.baselines.double())
        else:
            result = total if estimator == "reinforce_plus_plus" else of_group(total, counts)
    if estimator in ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        result = whiten.forward(call.whitening(result, counts, share)).whitened
    result = torch.where(counts, result, 0).to(rewards.dtype)
    if order is not None:
        result = torch.empty_like(result).index_copy_(0, order, result)
    return GroupAdvantagesResults(result)


def _groups(
    rewards: Tensor, group_ids: Tensor | None, group_size: int, group_offsets: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Groups as stretches of an order: the response at place i is ``order[i]`` (i itself where it is None),
    and its group has the places ``[starts[i], ends[i])``."""
    n = len(rewards)
    place = torch.arange(n, device=rewards.device)
    if group_ids is not None:
        ids, order = group_ids.sort(stable=True)
        return order, torch.searchsorted(ids, ids), torch.searchsorted(ids, ids, right=True)
    if group_offsets is not None:
        group = torch.searchsorted(group_offsets, place, right=True) - 1
        return None, group_offsets[group], group_offsets[group + 1]
    starts = place // group_size * group_size
    return None, starts, (starts + group_size).clamp(max=n)


class _Group(NamedTuple):
    """Statistics of each response's group, [N] each."""

    size: Tensor  # rewards that count
    shifted: Tensor  # above the group's first reward that counts; 0 where it does not count
    deviation: Tensor  # above the mean; exactly 0 where all rewards of the group are equal
    mean: Tensor
    squares: Tensor  # sum of squared deviations
    starts: Tensor
    ends: Tensor

    @classmethod
    def of(cls, x: Tensor, counts: Tensor, starts: Tensor, ends: Tensor) -> "_Group":
        n = len(x)
        place = torch.arange(n, device=x.device)
        count = _tree(counts.double(), starts, ends)
        first = _tree(torch.where(counts, place, n), starts, ends, torch.minimum).clamp(max=max(n - 1, 0))
        shifted = torch.where(counts, x - x[first], 0)
        above = _tree(shifted, starts, ends) / count.clamp(min=1)
        deviation = torch.where(counts, shifted - above, 0)
        squares = _tree(deviation.square(), starts, ends)
        return cls(count, shifted, deviation, x[first] + above, squares, starts, ends)

    def lead(self, counts: Tensor) -> Tensor:
        """How far the group's best is ahead of its second best, at the first of the best; else 0."""
        n = len(counts)
        place = torch.arange(n, device=counts.device)
        x = torch.where(counts, self.shifted, -torch.inf)
        best = _tree(x, self.starts, self.ends, torch.maximum)
        winner = _tree(torch.where(counts & (x == best), place, n), self.starts, self.ends, torch.minimum)
        second = _tree(torch.where(place == winner, -torch.inf, x), self.starts, self.ends, torch.maximum)
        lead = torch.where((place == winner) & (self.size > 1), best - second, 0)
        return torch.where(self.mean.isnan(), torch.nan, lead)


def _leave_one_out(
    x: Tensor, counts: Tensor, starts: Tensor, ends: Tensor, unbiased: bool, eps: float
) -> Tensor:
    """Above the mean of the others in the group, over their standard deviation, where they have one."""
    place = torch.arange(len(x), device=x.device)
    longest = int((ends - starts).max()) if len(x) else 0

    def others() -> Iterator[tuple[Tensor, Tensor]]:
        for k in range(longest):
            other = (starts + k).clamp(max=len(x) - 1)
            yield x[other], (starts + k < ends) & (other != place) & counts[other]

    number, first = torch.zeros_like(x), torch.zeros_like(x)
    for value, is_other in others():
        first = torch.where(is_other & (number == 0), value, first)
        number = number + is_other
    above, squares = torch.zeros_like(x), torch.zeros_like(x)
    for value, is_other in others():
        above = above + torch.where(is_other, value - first, 0)
    mean = above / number.clamp(min=1)
    for value, is_other in others():
        squares = squares + torch.where(is_other, value - first - mean, 0).square()
    std = (squares / (number - int(unbiased)).clamp(min=1)).sqrt()
    d = torch.where(counts & (number > 0), x - first - mean, 0)
    return torch.where(std == 0, d, _over(d, std, eps))


def _tree(
    x: Tensor, starts: Tensor, ends: Tensor, join: Callable[[Tensor, Tensor], Tensor] = torch.add
) -> Tensor:
    """``join`` over the group of each place, by pairs of neighbours, then pairs of pairs, and so on."""
    n = len(x)
    place = torch.arange(n, device=x.device)
    step = 1
    while step < n:
        partner = place + step
        meets = (partner < ends) & ((place - starts) % (2 * step) == 0)
        x = torch.where(meets, join(x, x[partner.clamp(max=n - 1)]), x)
        step *= 2
    return x[starts]


def _scale(x: Tensor, counts: Tensor, group: _Group, scale_rewards: str, unbiased: bool) -> Tensor | None:
    if scale_rewards == "none":
        return None
    if scale_rewards == "batch":
        zero, n = torch.zeros_like(group.starts), torch.full_like(group.ends, len(x))
        group = _Group.of(x, counts, zero, n)
    return (group.squares / (group.size - int(unbiased)).clamp(min=1)).sqrt()


def _over(x: Tensor, scale: Tensor | None, eps: float) -> Tensor:
    return x if scale is None else torch.where(x == 0, 0, x / (scale + eps))


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    estimator: str = "",
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.group_advantages`` for ``shape`` [G, S]: the share of right answers,
    and a small bonus, differ from prompt to prompt; lengths for opo and baselines for remax."""
    g = torch.Generator(device).manual_seed(seed)
    right = torch.rand(shape, generator=g, dtype=torch.float32, device=device) < torch.rand(
        shape[0], 1, generator=g, device=device, dtype=torch.float32
    )
    rewards = right + 0.1 * torch.rand(shape, generator=g, dtype=torch.float32, device=device)
    inputs = {"rewards": rewards.to(dtype)}
    if estimator == "opo":
        inputs["lengths"] = torch.randint(1, 2000, shape, generator=g, device=device).to(dtype)
    if estimator == "remax":
        inputs["baselines"] = torch.rand(shape, generator=g, dtype=torch.float32, device=device).to(dtype)
    return inputs
