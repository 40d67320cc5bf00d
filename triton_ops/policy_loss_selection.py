"""Which tokens kl_cov and clip_cov pick, in Triton: as csrc/include/rlkernel/policy_loss/selection.h has it.

A token's rank becomes an integer, of which the least that is picked is found digit by digit, by counts; of
the tokens that have it the first in the batch are picked.  Counts are integers, so that their order is free.
"""

import struct

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlkernel.calls.policy_loss import PolicySelectCall
from rlkernel.triton_ops._names import Names, store_all
from rlkernel.triton_ops.policy_loss_kernels import TENSORS, advantage_of, column
from rlkernel.triton_ops.policy_loss_terms import bounds, clamp, total
from rlkernel.triton_ops.sampling_random import finalised

Sum = Names(("tokens", "logprob", "advantage"))
SUMS = tl.constexpr(len(Sum))
# the digits of the least rank so far, and how many of those with it are wanted
Cut = Names(("rank", "wanted"))
LEVELS = tl.constexpr(3)  # digits of 11, 11 and 10 bits
BINS = tl.constexpr(2048)
_BLOCK = 1024

_ARGUMENTS = {
    "do_not_specialize": ["length", "rows", "share", "low", "high", "cov_low", "cov_high", "seed"],
    "do_not_specialize_on_alignment": [*TENSORS, "sums", "counts", "cut", "ties"],
}


@triton.jit(**_ARGUMENTS)
def selection_sums_kernel(
    logprobs, advantages, mask, cu_seqlens, sums, length, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    lanes = tl.arange(0, BLOCK)
    tokens = tl.zeros((), tl.float64)
    logprob = tl.zeros((), tl.float64)
    advantage = tl.zeros((), tl.float64)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        present = tl.load(mask + i, mask=i < end, other=0) != 0
        tokens += tl.sum(present.to(tl.float64), axis=0)
        logprob += total(tl.load(logprobs + i, mask=present, other=0.0), present)
        advantage += total(advantage_of(advantages, row, i, present, PER_TOKEN), present)
    store_all(sums + row * SUMS, (tokens, logprob, advantage))


@triton.jit(**_ARGUMENTS)
def selection_batch_kernel(sums, rows, cut, share, BLOCK: tl.constexpr):
    """The sums of the batch, behind those of its sequences; how many tokens are wanted."""
    tokens = column(sums, rows, Sum.tokens, SUMS, BLOCK)
    logprob = column(sums, rows, Sum.logprob, SUMS, BLOCK)
    store_all(sums + rows * SUMS, (tokens, logprob, column(sums, rows, Sum.advantage, SUMS, BLOCK)))
    # the share comes as the bits of an fp64, which a kernel cannot be given
    exact = tl.full((), share, tl.int64).to(tl.float64, bitcast=True)
    tl.store(cut + Cut.rank, tl.zeros((), tl.int64))
    tl.store(cut + Cut.wanted, tl.maximum(tl.floor(tokens * exact), 1.0).to(tl.int64))


@triton.jit
def hash_of(logprob, position, seed):
    """murmur3's finaliser of the token's log-probability, its position in the sequence and the seed."""
    h = logprob.to(tl.float32).to(tl.uint32, bitcast=True)
    salt = position.to(tl.uint32) * 0x9E3779B1 + tl.full((), seed, tl.int64).to(tl.uint32) * 0x85EBCA77
    return finalised(h ^ salt)


@triton.jit
def placed(
    logprobs, old_logprobs, advantages, mask, sums, rows, row, begin, end, i, low, high, cov_low, cov_high,
    seed, BY_HASH: tl.constexpr, PER_TOKEN: tl.constexpr,
):  # fmt: skip
    """Which tokens may be picked, and their ranks: int64 of 32 bits, the largest of which are picked."""
    present = tl.load(mask + i, mask=i < end, other=0) != 0
    logprob = tl.load(logprobs + i, mask=present, other=0.0)
    advantage = advantage_of(advantages, row, i, present, PER_TOKEN)
    batch = sums + rows * SUMS
    tokens = tl.load(batch + Sum.tokens)
    mean_logprob = (tl.load(batch + Sum.logprob) / tokens).to(tl.float32)
    mean_advantage = (tl.load(batch + Sum.advantage) / tokens).to(tl.float32)
    covariance = (advantage - mean_advantage) * (logprob - mean_logprob)
    if BY_HASH:
        old = logprob
        if old_logprobs is not None:
            old = tl.load(old_logprobs + i, mask=present, other=0.0)
        ratio = tl.exp(logprob - old)
        clipped = ratio * advantage > clamp(ratio, low, high) * advantage
        among = present & (clipped == 0) & (covariance > cov_low) & (covariance < cov_high)
        rank = (hash_of(old, i - begin, seed) ^ 0x7FFFFFFF).to(tl.int64)  # the least as an int32
    else:
        among = present & (covariance == covariance)
        # of the same order as the covariances; -0 is 0
        bits = tl.where(covariance == 0, 0.0, covariance).to(tl.float32).to(tl.int32, bitcast=True)
        rank = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 0x80000000
    return among, rank


@triton.jit
def shift_of(LEVEL: tl.constexpr):
    """How many bits stand behind a digit."""
    if LEVEL == LEVELS - 1:
        return 0
    elif LEVEL == LEVELS - 2:
        return 10
    else:
        return 21


@triton.jit(**_ARGUMENTS)
def selection_count_kernel(
    logprobs, old_logprobs, advantages, mask, cu_seqlens, sums, rows, length, low, high, cov_low, cov_high,
    seed, counts, cut, LEVEL: tl.constexpr, BY_HASH: tl.constexpr, PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Counts the tokens of a sequence whose rank begins with the digits so far, by their next digit."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    prefix = tl.load(cut + Cut.rank)
    bits: tl.constexpr = 10 if LEVEL == LEVELS - 1 else 11
    lanes = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        among, rank = placed(
            logprobs, old_logprobs, advantages, mask, sums, rows, row, begin, end, start + lanes, low, high,
            cov_low, cov_high, seed, BY_HASH, PER_TOKEN,
        )  # fmt: skip
        digits = rank >> shift_of(LEVEL)
        counted = among & (digits >> bits == prefix)
        digit = digits & ((1 << bits) - 1)
        tl.atomic_add(counts + LEVEL * BINS + digit, tl.full(digit.shape, 1, tl.int32), mask=counted)


@triton.jit(**_ARGUMENTS)
def selection_cut_kernel(counts, cut, LEVEL: tl.constexpr):
    """The next digit of the least rank that is picked, and how many of the tokens with it are wanted."""
    bits: tl.constexpr = 10 if LEVEL == LEVELS - 1 else 11
    bins: tl.constexpr = 1 << bits
    rank, wanted = tl.load(cut + Cut.rank), tl.load(cut + Cut.wanted)
    digit = bins - 1 - tl.arange(0, bins)  # from the highest
    count = tl.load(counts + LEVEL * BINS + digit).to(tl.int64)
    upto = tl.cumsum(count, axis=0)
    found = (upto >= wanted) & (upto - count < wanted)  # none where there are fewer tokens than are wanted
    tl.store(cut + Cut.rank, rank * bins + tl.sum(tl.where(found, digit, 0).to(tl.int64), axis=0))
    tl.store(cut + Cut.wanted, wanted - tl.sum(tl.where(found, upto - count, 0), axis=0))


@triton.jit(**_ARGUMENTS)
def selection_ties_kernel(
    logprobs, old_logprobs, advantages, mask, cu_seqlens, sums, rows, length, low, high, cov_low, cov_high,
    seed, cut, ties, BY_HASH: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """For the order among the sequences: how many tokens of one have the least rank."""
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    least, count = tl.load(cut + Cut.rank), tl.zeros((), tl.int64)
    lanes = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        among, rank = placed(
            logprobs, old_logprobs, advantages, mask, sums, rows, row, begin, end, start + lanes, low, high,
            cov_low, cov_high, seed, BY_HASH, PER_TOKEN,
        )  # fmt: skip
        count += tl.sum((among & (rank == least)).to(tl.int64), axis=0)
    tl.store(ties + row, count)


@triton.jit(**_ARGUMENTS)
def selection_kernel(
    logprobs, old_logprobs, advantages, mask, cu_seqlens, sums, rows, length, low, high, cov_low, cov_high,
    seed, cut, ties, selected, BY_HASH: tl.constexpr, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    begin, end = bounds(cu_seqlens, row, length)
    lanes = tl.arange(0, BLOCK)
    least, left = tl.load(cut + Cut.rank), tl.load(cut + Cut.wanted)
    for start in range(0, row, BLOCK):  # what the sequences before this one take
        r = start + lanes
        left -= tl.sum(tl.load(ties + r, mask=r < row, other=0), axis=0)
    for start in range(begin, end, BLOCK):
        i = start + lanes
        among, rank = placed(
            logprobs, old_logprobs, advantages, mask, sums, rows, row, begin, end, i, low, high, cov_low,
            cov_high, seed, BY_HASH, PER_TOKEN,
        )  # fmt: skip
        tied = (among & (rank == least)).to(tl.int64)
        picked = among & ((rank > least) | ((tied > 0) & (tl.cumsum(tied, axis=0) <= left)))
        tl.store(selected + i, picked.to(tl.uint8), mask=i < end)
        left -= tl.sum(tied, axis=0)


def selection(call: PolicySelectCall) -> Tensor:
    logprobs, advantages, cu_seqlens, pick = call.logprobs, call.advantages, call.cu_seqlens, call.pick
    device, mask = logprobs.device, call.mask.view(torch.uint8)
    rows = logprobs.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    selected = torch.empty_like(mask)
    if not selected.numel():
        return selected.view(torch.bool)
    sums = torch.empty(rows + 1, SUMS.value, dtype=torch.float64, device=device)
    counts = torch.zeros(LEVELS.value, BINS.value, dtype=torch.int32, device=device)
    numbers = torch.empty(len(Cut) + rows, dtype=torch.int64, device=device)
    cut, ties = numbers[: len(Cut)], numbers[len(Cut) :]
    (share,) = struct.unpack("<q", struct.pack("<d", pick.share))
    length, per_token = logprobs.shape[-1], advantages.shape == logprobs.shape
    ranks = (
        logprobs, call.old_logprobs, advantages, mask, cu_seqlens, sums, rows, length, pick.low, pick.high,
        pick.cov_low, pick.cov_high, pick.seed,
    )  # fmt: skip
    choices = {"BY_HASH": pick.by_hash, "PER_TOKEN": per_token, "BLOCK": _BLOCK}
    launch = {"num_warps": 8, "enable_fp_fusion": False}
    with torch.cuda.device_of(logprobs):
        selection_sums_kernel[(rows,)](
            logprobs, advantages, mask, cu_seqlens, sums, length, PER_TOKEN=per_token, BLOCK=_BLOCK, **launch
        )
        selection_batch_kernel[(1,)](sums, rows, cut, share, BLOCK=256, **launch)
        for level in range(LEVELS.value):
            selection_count_kernel[(rows,)](*ranks, counts, cut, LEVEL=level, **choices, **launch)
            selection_cut_kernel[(1,)](counts, cut, LEVEL=level, **launch)
        selection_ties_kernel[(rows,)](*ranks, cut, ties, **choices, **launch)
        selection_kernel[(rows,)](*ranks, cut, ties, selected, **choices, **launch)
    return selected.view(torch.bool)
