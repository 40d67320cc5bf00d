"""``group_advantages`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: one launch,
two where the batch scales, and two more where it is whitened."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import Kernels, kernels_for, launch, whiten

ESTIMATORS = {  # rlkernel::Estimator
    "dr_grpo": 0, "reinforce_plus_plus_baseline": 0, "grpo": 1, "rloo": 2, "opo": 3, "maxrl": 4,
    "grpo_passk": 5, "gdpo": 6, "reinforce_plus_plus": 7, "remax": 7, "grpo_loo": 8,
}  # fmt: skip
SCALES = {"none": 0, "group": 1, "batch": 2}  # rlkernel::RewardScale
SCALED = ("grpo", "grpo_passk", "gdpo")
WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = ["rewards must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else []
    kernels = kernels_for(tensors[0].device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


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
    order = ends = None
    groups = -(-n // group_size) if group_offsets is None else len(group_offsets) - 1
    own_ids = None
    if group_ids is not None:
        kernels = kernels_for(device)
        if isinstance(kernels, Kernels) and kernels.part == "cpu":
            own_ids = group_ids.contiguous()  # grouped by a hash table, in a third of the time
        else:
            ids, order = group_ids.sort(stable=True)
            ends = torch.searchsorted(ids, ids, right=True)
    weights, start, sizes = (_float(x) for x in (reward_weights, baselines, lengths))
    scale = SCALES[scale_rewards] if estimator in SCALED else 0
    out = torch.empty(n, dtype=torch.float32, device=device)
    wide = counts = batch = None
    if estimator in WHITENED:
        wide = torch.empty(n, dtype=torch.float64, device=device)
        counts = torch.empty(n, dtype=torch.bool, device=device)
    if scale == SCALES["batch"]:
        slots = -(-n // whiten.CHUNK) * (columns if estimator == "gdpo" else 1)
        batch = torch.empty(slots * whiten.MOMENTS, dtype=torch.float64, device=device)
    launch(
        "group_advantages", device, rewards.data_ptr(), _address(mask), n, columns,
        *map(_address, (weights, start, sizes, own_ids, order, ends, group_offsets)), groups, group_size,
        ESTIMATORS[estimator], scale, unbiased, singletons == "reward", eps, _address(batch),
        _address(out if wide is None else None), _address(wide), _address(counts),
    )  # fmt: skip
    if wide is not None:
        whiten.run(wide, counts, sizes, True, unbiased, batch_eps, batch_eps_in, out)
    return out


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32).contiguous()


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
