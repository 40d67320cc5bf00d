"""``group_advantages`` over the compiled extension, on CPU, CUDA or HIP by the tensor's device: one launch,
two where the batch scales, and two more where it is whitened."""

import torch
from torch import Tensor

from rlkernel.calls.group_advantages import (
    KINDS,
    SCALED,
    WHITENED,
    GroupAdvantagesCall,
    GroupAdvantagesResults,
)
from rlkernel.native import at_most_fp32, kernels, whiten

unsupported = at_most_fp32("rewards")


def forward(call: GroupAdvantagesCall) -> GroupAdvantagesResults:
    rewards, group_ids, estimator = call.rewards, call.group_ids, call.estimator
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
    weights, start, sizes = (_float(x) for x in (call.reward_weights, call.baselines, call.lengths))
    scale = call.scale_rewards if estimator in SCALED else "none"
    whitened = estimator in WHITENED
    out = torch.empty(n, dtype=torch.float64 if whitened else torch.float32, device=device)
    counts = torch.empty(n, dtype=torch.bool, device=device) if whitened else None
    batch = None
    if scale == "batch":
        slots = -(-n // part.CHUNK) * (columns if estimator == "gdpo" else 1)
        batch = torch.empty(slots * part.MOMENTS, dtype=torch.float64, device=device)
    part.group_advantages(
        rewards=rewards, mask=call.mask, reward_weights=weights, baselines=start, lengths=sizes, ids=own_ids,
        order=order, ends=ends, offsets=call.group_offsets, size=call.group_size,
        estimator=KINDS[estimator], scale=scale, unbiased=call.unbiased,
        reward_singletons=call.singletons == "reward", eps=call.eps, batch=batch,
        out=None if whitened else out, wide=out if whitened else None, counts=counts,
    )  # fmt: skip
    if whitened:
        out = whiten.scaled(call.whitening(out, counts, sizes))
    return GroupAdvantagesResults(out)


def _float(x: Tensor | None) -> Tensor | None:
    if x is None or (x.dtype == torch.float32 and x.is_contiguous()):  # most are
        return x
    return x.to(torch.float32).contiguous()
