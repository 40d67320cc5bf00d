"""Advantages of whole responses from the rewards of their group."""

from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.group_advantages import (
    ESTIMATORS,
    SCALES,
    SINGLETONS,
    UNGROUPED,
    GroupAdvantagesCall,
    GroupAdvantagesResults,
)
from rlkernel.calls.whiten import EPS_PLACES
from rlkernel.opaque import Op
from rlkernel.ops import _packing, _validate
from rlkernel.ops._direct import direct
from rlkernel.ops._typed import typed
from rlkernel.runtime import debug
from rlkernel.types import AdvantageEstimator, EpsIn, ScaleRewards, Singletons

ALONE = 32  # responses that are worked on together where none sees another


@direct
@typed
def group_advantages(
    rewards: Tensor,
    *,
    group_ids: Tensor | None = None,
    group_size: int | None = None,
    group_offsets: Tensor | None = None,
    estimator: AdvantageEstimator = "grpo",
    mask: Tensor | None = None,
    reward_weights: Tensor | None = None,
    baselines: Tensor | None = None,
    lengths: Tensor | None = None,
    scale_rewards: ScaleRewards = "group",
    unbiased: bool = True,
    eps: float = 1e-4,
    singletons: Singletons = "zero",
    batch_eps: float = 1e-8,
    batch_eps_in: EpsIn = "variance",
) -> Tensor:
    """One advantage per response, from its reward and those of the other responses to its prompt.

    Equal to, with ``mean``, ``std`` and ``n`` of the response's group,

        grpo            (r - mean) / (std + eps)          std of the group or batch, or 1: scale_rewards
        dr_grpo         r - mean
        rloo            r - mean of the others = (r - mean) * n / (n - 1)
        grpo_loo        (r - mean of the others) / (std of the others + eps), undivided where that std is 0
        opo             r - sum(lengths * r) / sum(lengths)
        maxrl           (r - mean) / (mean + eps)
        grpo_passk      (best - second best) / (std + eps) for the first of the best, 0 for the others
        gdpo            whiten(sum_k w_k * grpo(r_k))      every reward scaled by itself
        reinforce_plus_plus            whiten(r)
        reinforce_plus_plus_baseline   whiten(r - mean)
        remax           r - baselines

    where ``whiten`` is over the batch, every response with its ``lengths`` (1 unless given).  Statistics are
    taken in fp64 of differences to the group's first reward, in two passes, by a tree over the places in the
    group: rewards that share a large offset keep their digits, and a group of equal rewards gives exactly 0.
    Those of grpo_loo are of differences to the first of the others, which every response walks over.
    The same call gives the same bits (run-to-run); a response's bits depend on its group alone, unless the
    estimator whitens or ``scale_rewards="batch"``.  No synchronisation, no shape that depends on values.

    Args:
        rewards: [N], or [G, S] whose rows are the groups; with ``reward_weights`` [N, K] or [G, S, K].
        group_ids: [N] integers; responses with one id are a group, wherever they stand.
        group_size: every so many consecutive responses are a group.
        group_offsets: [G + 1] integers from 0 to N; group g is ``[group_offsets[g], group_offsets[g + 1])``.
        estimator: one of the above.
        mask: like ``rewards``, nonzero where a reward counts; one that does not is no part of any statistic
            and its response's advantage is 0 (of K rewards: unless another one counts).
        reward_weights: [K]; the weighted sum of K rewards, scaled before the sum with gdpo.
        baselines: [N], of remax: the reward of the greedy response; no gradient.
        lengths: [N] tokens of each response: required by opo; weights of the whitening, as verl
            whitens tokens; no gradient.
        scale_rewards: "group", "batch" or "none", of grpo, grpo_passk and gdpo.
        unbiased: std with n - 1 (TRL, verl) instead of n.
        eps: added to what divides: 1e-4 in TRL, 1e-6 in verl and NeMo-RL.
        singletons: what a group of one gives: "zero" (TRL: it is its own mean), or "reward" (verl: mean 0 and
            std 1).  grpo_passk gives 0.
        batch_eps, batch_eps_in: of the whitening, see ``rlkernel.whiten``: 1e-8 in the variance as verl, or
            1e-4 in the std as TRL's gdpo.

    Returns:
        A tensor of ``rewards``' shape without K, in fp32 (fp64 for fp64), without a gradient.

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.  A reward that counts and
            is NaN or infinite is one (TRL marks what no function scored by NaN: ``mask=~rewards.isnan()``);
            on a GPU it is found in debug mode only, and its group's advantages are NaN otherwise.

    GRPO arXiv 2402.03300, Dr. GRPO 2503.20783, RLOO 2402.14740, OPO 2505.23585, pass@k 2503.19595, GDPO
    2601.05242, REINFORCE++ 2501.03262, ReMax 2310.10505.

    Examples:
        >>> rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
        >>> rlkernel.group_advantages(rewards, group_size=4, estimator="rloo")
        tensor([ 0.6667, -0.6667, -0.6667,  0.6667])
    """
    _validate.constant("rewards", rewards)
    _validate.choice("estimator", estimator, ESTIMATORS)
    _validate.choice("scale_rewards", scale_rewards, SCALES)
    _validate.choice("singletons", singletons, SINGLETONS)
    _validate.choice("batch_eps_in", batch_eps_in, EPS_PLACES)
    eps = _validate.number("eps", eps, 0.0)
    batch_eps = _validate.number("batch_eps", batch_eps, 0.0)
    shape = _shape(rewards, reward_weights)
    count = shape.numel()
    mask = _validate.mask(mask, "rewards", rewards)
    groups = _groups(shape, rewards.device, estimator, group_ids, group_size, group_offsets)
    if (baselines is not None) != (estimator == "remax"):
        want = "given with" if estimator == "remax" else "None without"
        raise ValueError(f"baselines must be {want} estimator='remax', got {type(baselines).__name__}")
    if estimator == "opo" and lengths is None:
        raise ValueError("lengths must be given with estimator='opo', got None")
    baselines = _per_response("baselines", baselines, shape, rewards.device)
    lengths = _per_response("lengths", lengths, shape, rewards.device)
    columns = 1 if reward_weights is None else len(reward_weights)
    wide = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    call = GroupAdvantagesCall(
        wide.reshape(count, columns).contiguous(),
        None if mask is None else mask.reshape(count, columns).contiguous(), *groups,
        reward_weights, baselines, lengths, estimator, "none" if estimator == "dr_grpo" else scale_rewards,
        unbiased, eps, singletons, batch_eps, batch_eps_in,
    )  # fmt: skip
    return op(call)[0].view(shape)


def _shape(rewards: Tensor, reward_weights: Tensor | None) -> torch.Size:
    shape = rewards.shape
    if reward_weights is not None:
        _validate.constant("reward_weights", reward_weights)
        if rewards.dim() < 2 or reward_weights.shape != shape[-1:]:
            want = f"[K] for rewards [..., K] {tuple(shape)}"
            raise ValueError(f"reward_weights must be {want}, got {tuple(reward_weights.shape)}")
        _validate.same_device("reward_weights", reward_weights, "rewards", rewards.device)
        shape = shape[:-1]
    if len(shape) not in (1, 2):
        form = "[N] or [G, S]" if reward_weights is None else "[N, K] or [G, S, K]"
        raise ValueError(f"rewards must be {form}, got {tuple(rewards.shape)}")
    return shape


def _per_response(name: str, x: Tensor | None, shape: torch.Size, device: torch.device) -> Tensor | None:
    if x is None:
        return None
    _validate.is_tensor(name, x)
    if x.shape != shape:
        raise ValueError(f"{name} must have one value per response {tuple(shape)}, got {tuple(x.shape)}")
    _validate.same_device(name, x, "rewards", device)
    _validate.without_gradient(name, x)
    return x.detach().reshape(-1)


def _groups(
    shape: torch.Size,
    device: torch.device,
    estimator: str,
    group_ids: Tensor | None,
    group_size: int | None,
    group_offsets: Tensor | None,
) -> tuple[Tensor | None, int, Tensor | None]:
    """``group_ids`` [N], ``group_size`` and ``group_offsets`` for the backends: ids or offsets, or a size."""
    count = shape.numel()
    ways = {"group_ids": group_ids, "group_size": group_size, "group_offsets": group_offsets}
    given = [name for name, way in ways.items() if way is not None]
    rows = len(shape) == 2
    if len(given) + rows > 1 or (not given and not rows and estimator not in UNGROUPED):
        what = ", ".join(given + ["rewards [G, S]"] * rows) or "none"
        raise ValueError(f"groups must be named by one of {', '.join(ways)} or rewards [G, S], got {what}")
    if group_ids is not None:
        ids = _per_response("group_ids", group_ids, shape, device)
        assert ids is not None
        if ids.is_floating_point() or ids.is_complex():
            raise ValueError(f"group_ids must be integers, got {_validate.name(ids.dtype)}")
        if estimator not in UNGROUPED:
            return ids.to(torch.int64), 1, None
    if group_offsets is not None:
        offsets = _packing.offsets("group_offsets", group_offsets, "rewards", device)
        _validate.ascending("group_offsets", offsets, count)
        if estimator not in UNGROUPED:
            return None, 1, offsets
    if estimator in UNGROUPED and not rows and group_size is None:
        return None, ALONE, None
    size = shape[1] if rows else group_size
    if not rows:
        _validate.at_least_one("group_size", size)
    assert size is not None
    if count % max(size, 1):
        raise ValueError(f"group_size must divide the {count} rewards, got {size}")
    return None, ALONE if estimator in UNGROUPED else max(size, 1), None


def _forward(impl: ModuleType, call: GroupAdvantagesCall) -> GroupAdvantagesResults:
    rewards, mask = call.rewards, call.mask
    if debug.may_read(rewards):
        _validate.finite("rewards", rewards if rewards.shape[1] > 1 else rewards[:, 0],
                         mask if mask is None or rewards.shape[1] > 1 else mask[:, 0])  # fmt: skip
    return impl.forward(call)


op = Op(
    "group_advantages",
    GroupAdvantagesCall,
    GroupAdvantagesResults,
    pick=("rewards",),
    forward=_forward,
    like=lambda call: GroupAdvantagesResults(call.rewards.new_empty(len(call.rewards))),
)
