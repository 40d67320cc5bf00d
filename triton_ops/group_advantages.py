"""``group_advantages`` over Triton: one launch, two where the batch scales, two more where it is whitened."""

import torch
from torch import Tensor

from rlkernel.calls.group_advantages import (
    KINDS,
    SCALED,
    WHITENED,
    GroupAdvantagesCall,
    GroupAdvantagesResults,
)
from rlkernel.triton_ops import whiten
from rlkernel.triton_ops._device import at_most_fp32
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops.group_advantages_kernels import BLOCK, batch_kernel, group_kernel
from rlkernel.triton_ops.whiten_kernels import CHUNK, Moment

unsupported = at_most_fp32("rewards")


def forward(call: GroupAdvantagesCall) -> GroupAdvantagesResults:
    rewards, estimator, offsets = call.rewards, call.estimator, call.group_offsets
    n, columns = rewards.shape
    device = rewards.device
    order = ends = batch = None
    groups = cdiv(n, call.group_size) if offsets is None else len(offsets) - 1
    if call.group_ids is not None:
        ids, order = call.group_ids.sort(stable=True)
        ends = torch.searchsorted(ids, ids, right=True)
        groups = n
    weights, start, sizes = (_float(x) for x in (call.reward_weights, call.baselines, call.lengths))
    kind, scale = KINDS[estimator], call.scale_rewards if estimator in SCALED else "none"
    kept = None if call.mask is None else call.mask.view(torch.uint8)
    if not n:
        return GroupAdvantagesResults(rewards.new_empty(0))
    whitened = estimator in WHITENED
    out = torch.empty(n, dtype=torch.float64 if whitened else torch.float32, device=device)
    counts = torch.empty(n, dtype=torch.bool, device=device) if whitened else None
    threads = 32 if torch.version.hip is None else 64  # a place is one thread's
    with torch.cuda.device_of(rewards):
        if scale == "batch":
            slots = cdiv(n, CHUNK) * (columns if kind == "gdpo" else 1)
            batch = torch.empty(slots, len(Moment), dtype=torch.float64, device=device)
            batch_kernel[(slots,)](
                rewards, kept, n, columns, weights, batch, WEIGHTED=kind != "gdpo", CHUNK=CHUNK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
        if groups:
            group_kernel[(groups,)](
                rewards, kept, n, columns, weights, start, sizes, order, ends, offsets,
                call.group_size, call.eps, batch, None if whitened else out, out if whitened else None,
                None if counts is None else counts.view(torch.uint8),
                KIND=kind, SCALE=scale, UNBIASED=call.unbiased, REWARD_SINGLETONS=call.singletons == "reward",
                BLOCK=BLOCK, CHUNK=CHUNK, num_warps=BLOCK // threads, enable_fp_fusion=False,
            )  # fmt: skip
    if whitened:
        out = whiten.scaled(call.whitening(out, counts, sizes))
    return GroupAdvantagesResults(out)


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32).contiguous()
