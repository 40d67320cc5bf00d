"""``kl_shaped_rewards`` over Triton: a program per chunk of a sequence, in one launch."""

import torch
import triton
import triton.language as tl

from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall, KlShapedRewardsResults
from rlkernel.triton_ops._device import at_most_fp32
from rlkernel.triton_ops._exact import expm1_unbounded
from rlkernel.triton_ops.policy_loss_terms import clamp
from rlkernel.triton_ops.value_loss import layout_of, stride_of
from rlkernel.triton_ops.value_loss_kernels import CHUNK, locate

unsupported = at_most_fp32("rewards and logprobs", 3)


@triton.jit(
    do_not_specialize=[
        "rewards_stride",
        "logprobs_stride",
        "ref_stride",
        "mask_stride",
        "rows",
        "length",
        "steps",
    ]
)
def kl_kernel(
    rewards, rewards_stride: tl.int64, logprobs, logprobs_stride: tl.int64,
    ref_logprobs, ref_stride: tl.int64, mask, mask_stride: tl.int64, rows: tl.int64,
    length: tl.int64, cu_seqlens, steps, beta: tl.float32, kl_input: tl.float32, kl_output: tl.float32, out,
    ESTIMATOR: tl.constexpr, PER_SEQUENCE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    row, begin, left = locate(cu_seqlens, slot, rows, length, steps, CHUNK)
    strided, end = row, length
    start = row * length + begin
    if cu_seqlens is not None:
        strided, start = row * 0, begin
        end = tl.load(cu_seqlens + row + 1, mask=row < rows, other=0).to(tl.int64)
        end = tl.minimum(tl.maximum(end, 0), length)
    i = tl.arange(0, CHUNK)
    inside = i < left
    kept = i < tl.where(row < rows, left, 0)
    if mask is not None:
        kept = kept & (tl.load(mask + strided * mask_stride + begin + i, mask=kept, other=0) != 0)
    new = tl.load(logprobs + strided * logprobs_stride + begin + i, mask=kept, other=0.0)
    d = new - tl.load(ref_logprobs + strided * ref_stride + begin + i, mask=kept, other=0.0)
    d = clamp(d, -kl_input, kl_input)
    if ESTIMATOR == "k1":
        kl = d
    elif ESTIMATOR == "abs":
        kl = tl.abs(d)
    elif ESTIMATOR == "k2":
        kl = d * d * 0.5
    else:
        kl = expm1_unbounded(-d) + d
    kl = clamp(kl, -kl_output, kl_output)
    reward = tl.zeros((CHUNK,), tl.float32)
    if PER_SEQUENCE:
        last = tl.max(tl.where(kept, i, -1))
        behind = 0  # whether a token counts behind the chunk: the nearest do, unless it is the last
        if mask is None:
            behind = (begin + CHUNK < end).to(tl.int32)
        else:
            at = begin + CHUNK
            while (behind == 0) & (last >= 0) & (at < end):
                there = at + i < end
                counts = tl.load(mask + strided * mask_stride + at + i, mask=there, other=0) != 0
                behind = tl.max(counts.to(tl.int32))
                at += CHUNK
        paid = tl.load(rewards + row, mask=row < rows, other=0.0)
        reward = tl.where((i == last) & (behind == 0), paid, reward)
    else:
        reward = tl.load(rewards + strided * rewards_stride + begin + i, mask=kept, other=0.0)
    tl.store(out + start + i, tl.where(kept, reward - beta * kl, 0.0), mask=inside)


def forward(call: KlShapedRewardsCall) -> KlShapedRewardsResults:
    rewards, logprobs, ref_logprobs, mask = call.rewards, call.logprobs, call.ref_logprobs, call.mask
    cu_seqlens = call.cu_seqlens
    out = torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)
    rows, length, steps, slots = layout_of(logprobs, cu_seqlens)
    if slots:
        with torch.cuda.device_of(logprobs):
            kl_kernel[(slots,)](
                rewards, 0 if call.per_sequence else stride_of(rewards), logprobs, stride_of(logprobs),
                ref_logprobs, stride_of(ref_logprobs), None if mask is None else mask.view(torch.uint8),
                stride_of(mask), rows, length, cu_seqlens, steps, call.beta, call.kl_input, call.kl_output,
                out, ESTIMATOR=call.kl_estimator, PER_SEQUENCE=call.per_sequence, CHUNK=CHUNK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
    return KlShapedRewardsResults(out)
