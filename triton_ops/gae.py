"""``gae`` over Triton: one program walks a sequence from its end in tiles, each of them one scan.

A token is one thread's.  With more tokens than threads Triton would give each thread some, as many as the
alignment of the arguments allows, and the order of the scan would follow from that.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.calls.gae import GaeCall, GaeResults
from rlkernel.triton_ops._device import at_most_fp32

TILE = 512  # with 1024 threads a block, a thread has 64 registers and spills


unsupported = at_most_fp32("rewards and values", 2)


@triton.jit
def join(decay, slope, gain, value, counts, decay_left, slope_left, gain_left, value_left, counts_left):
    """What two stretches of tokens do to the advantage and the value behind them; the second comes first in
    the sequence, because the scan goes backwards.

    ``A = decay * A_behind + slope * V_behind + gain``, and V is the value of the first token that counts.
    """
    gain_both = decay_left * gain + slope_left * value + gain_left
    both = (counts != 0) & (counts_left != 0)
    left = counts_left != 0
    return (
        tl.where(both, decay_left * decay, tl.where(left, decay_left, decay)),
        tl.where(both, decay_left * slope, tl.where(left, slope_left, slope)),
        tl.where(both, gain_both, tl.where(left, gain_left, gain)),
        tl.where(left, value_left, value),
        counts | counts_left,
    )


# lengths change from step to step: they must not recompile the kernel
@triton.jit(do_not_specialize=["rewards_stride", "values_stride", "mask_stride", "length", "total"])
def gae_kernel(
    rewards,
    rewards_stride,
    values,
    values_stride,
    mask,
    mask_stride,
    offsets,
    length,
    total,
    last_values,
    gamma: tl.float64,
    lam: tl.float64,
    lams,
    advantages,
    returns,
    ZERO_HOLES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if offsets is not None:
        start = tl.minimum(tl.maximum(tl.load(offsets + row), 0), total)
        end = tl.minimum(tl.maximum(tl.load(offsets + row + 1), start), total)
        length = end - start
        rewards += start
        values += start
        if mask is not None:
            mask += start
    else:
        start = row * length
        rewards += row * rewards_stride
        values += row * values_stride
        if mask is not None:
            mask += row * mask_stride
    advantages += start
    returns += start
    gamma = tl.full((), gamma, tl.float64)  # the interpreter's is a number
    decay = gamma * lam
    if lams is not None:
        decay = gamma * tl.load(lams + row)
    advantage_behind = tl.full((), 0, tl.float64)
    value_behind = tl.full((), 0, tl.float64)
    if last_values is not None:
        value_behind = tl.load(last_values + row).to(tl.float64)
    token = tl.arange(0, TILE)
    tiles = tl.cdiv(length, TILE)
    for i in range(tiles):
        t = (tiles - 1 - i) * TILE + token
        inside = t < length
        kept = inside
        if mask is not None:
            kept = inside & (tl.load(mask + t, mask=inside, other=0) != 0)
        counts = kept  # takes part in the recurrence
        if ZERO_HOLES:
            counts = inside
        reward = tl.load(rewards + t, mask=kept, other=0.0).to(tl.float64)
        value = tl.load(values + t, mask=kept, other=0.0).to(tl.float64)
        own = tl.full((TILE,), 0, tl.float64)
        decays, slopes, gains, firsts, any_counts = tl.associative_scan(
            (own + decay, own + gamma, reward - value, value, counts.to(tl.int32)), 0, join, reverse=True
        )
        advantage = decays * advantage_behind + slopes * value_behind + gains
        tl.store(advantages + t, tl.where(kept, advantage, 0.0).to(tl.float32), mask=inside)
        tl.store(returns + t, tl.where(kept, advantage + value, 0.0).to(tl.float32), mask=inside)
        if tl.sum(tl.where(token == 0, any_counts, 0), 0) != 0:
            advantage_behind = tl.sum(tl.where(token == 0, advantage, 0.0), 0)
            value_behind = tl.sum(tl.where(token == 0, firsts, 0.0), 0)


def forward(call: GaeCall) -> GaeResults:
    rewards, values, mask, gamma, lam, cu_seqlens, last_values, holes = call
    advantages, returns = (
        torch.empty(rewards.shape, dtype=torch.float32, device=rewards.device) for _ in "AR"
    )
    rows, length = rewards.shape if cu_seqlens is None else (len(cu_seqlens) - 1, 0)
    if rows and rewards.numel():
        lams = lam if isinstance(lam, Tensor) else None
        threads = 32 if torch.version.hip is None else 64
        with torch.cuda.device_of(rewards):
            gae_kernel[(rows,)](
                rewards, rewards.stride(0), values, values.stride(0),
                None if mask is None else mask.view(torch.uint8), 0 if mask is None else mask.stride(0),
                cu_seqlens, length, rewards.numel(), last_values, gamma, 0.0 if lams is lam else lam, lams,
                advantages, returns, ZERO_HOLES=holes == "zero", TILE=TILE, num_warps=TILE // threads,
            )  # fmt: skip
    return GaeResults(advantages, returns)
