"""``group_advantages`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: one launch,
two where the batch scales, and two more where it is whitened."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels, kernels_for, whiten

ESTIMATORS = {  # what the kernel calls them
    "dr_grpo": "deviation", "reinforce_plus_plus_baseline": "deviation", "grpo": "scaled", "rloo": "rloo",
    "opo": "opo", "maxrl": "maxrl", "grpo_passk": "passk", "gdpo": "gdpo", "reinforce_plus_plus": "total",
    "remax": "total", "grpo_loo": "leave_one_out",
}  # fmt: skip
SCALED = ("grpo", "grpo_passk", "gdpo")
WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = ["rewards must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else []
    found = kernels_for(tensors[0].device)
    return [*reasons, found] if isinstance(found, str) else reasons


def forward(
    rewards: Tensor,
    mask: Tensor | None,
    group_ids: Tensor | None,
    group_size: int,
    group_offsets: Tensor | None,
    reward_weights: Tensor | None,
    baselines: Tensor | None,
    lengths: Tensor | None,
    estimator: str,
    scale_rewards: str,
    unbiased: bool,
    eps: float,
    singletons: str,
    batch_eps: float,
    batch_eps_in: str,
) -> Tensor:
    n, columns = rewards.shape
    device = rewards.device
    part = kernels(device)
    order = ends = None
    own_ids = None
    if group_ids is not None:
        if part.part == "cpu":
            own_ids = group_ids.contiguous()  # grouped by a hash table, in a third of the time
        else:
            ids, order = group_ids.sort(stable=True)
            ends = torch.searchsorted(ids, ids, right=True)
    weights, start, sizes = (_float(x) for x in (reward_weights, baselines, lengths))
    scale = scale_rewards if estimator in SCALED else "none"
    out = torch.empty(n, dtype=torch.float32, device=device)
    wide = counts = batch = None
    if estimator in WHITENED:
        wide = torch.empty(n, dtype=torch.float64, device=device)
        counts = torch.empty(n, dtype=torch.bool, device=device)
    if scale == "batch":
        slots = -(-n // part.CHUNK) * (columns if estimator == "gdpo" else 1)
        batch = torch.empty(slots * part.MOMENTS, dtype=torch.float64, device=device)
    part.group_advantages(
        rewards=rewards, mask=mask, reward_weights=weights, baselines=start, lengths=sizes, ids=own_ids,
        order=order, ends=ends, offsets=group_offsets, size=group_size, estimator=ESTIMATORS[estimator],
        scale=scale, unbiased=unbiased, reward_singletons=singletons == "reward", eps=eps, batch=batch,
        out=out if wide is None else None, wide=wide, counts=counts,
    )  # fmt: skip
    if wide is not None:
        whiten.run(wide, counts, sizes, True, unbiased, batch_eps, batch_eps_in, out)
    return out


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32).contiguous()
