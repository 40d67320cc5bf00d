"""FP8 heads of ``linear_logprob`` over Triton: a tile of logits is one launch, whose operands are FP8.

FLOPs of a tile [R, Vt]: ``2 R Vt H`` of FP8 operands.  Bytes: the weight's slice, once per block of rows
from L2, and the tile, once.  A row's bits depend on neither the other rows nor the tile: the shape of a
block is a constant, and K is one chain.

Where the GPU has no instructions for the FP8 of the weight (NVIDIA before sm_89; e4m3fn on AMD before
gfx950, e4m3fnuz on others than gfx942) and in the interpreter, the bytes are decoded to float16, which holds
every number of e4m3, and multiplied as such: the products are the same numbers.
"""

import os

import torch
import triton
from torch import Tensor

from rlkernel.drivers.linear_logprob_fp8 import Codes
from rlkernel.triton_ops._sizes import cdiv
from rlkernel.triton_ops.linear_logprob_fp8_kernels import fp8_product_kernel

BM, BN, STEP, LEAST_STEP = 128, 128, 128, 32
WITH_INSTRUCTIONS = {torch.float8_e4m3fn: ("gfx950",), torch.float8_e4m3fnuz: ("gfx942",)}
FIRST_NVIDIA = 89


def reasons(size: int, steps: tuple[int, ...]) -> list[str]:
    """``steps``: how many columns share a scale, of hidden and of the weight."""
    bad = [step for step in steps if step < size and step % LEAST_STEP]
    want = f"a multiple of {LEAST_STEP}, or all of them"
    return [f"columns that share a scale must be {want}, got {bad[0]}"] if bad else []


def multiply(
    hidden: Codes, weight: Tensor, weight_scale: Tensor, block: tuple[int, ...], first: int, out: Tensor
) -> None:
    """``rlkernel.drivers.linear_logprob_fp8.Multiply``."""
    (rows, size), vocab = hidden.values.shape, weight.shape[0]
    weight = weight if weight.stride(1) == 1 or size == 1 else weight.contiguous()
    groups = [
        None if group >= size else group for group in (hidden.group, block[1])
    ]  # None: one for all of K
    decode = not _has_instructions(weight.dtype)
    step = STEP // 2 if decode else STEP
    while any(group is not None and group % step for group in groups):
        step //= 2
    values = hidden.values
    if decode:
        values, weight = values.view(torch.uint8), weight.view(torch.uint8)
    one_block = block[0] >= first + vocab or (block[0] % BN == 0 and first % BN == 0)
    # else a thread has the scales of many columns beside its sums
    columns = BN if one_block or groups[1] is None else BN // 2
    tiles = cdiv(rows, BM) * cdiv(vocab, columns)
    stages = 3 if torch.version.hip is None else 2  # of 64 KiB of shared memory
    with torch.cuda.device_of(values):
        fp8_product_kernel[(tiles,)](
            values, hidden.scale, hidden.scale.shape[1] if hidden.scale.shape[0] > 1 else 0,
            weight, weight.stride(0), weight_scale, weight_scale.shape[1], out, out.stride(0),
            rows, vocab, size, first, block[0],
            HIDDEN_GROUP=groups[0], WEIGHT_GROUP=groups[1], DECODE=decode,
            FNUZ=hidden.values.dtype == torch.float8_e4m3fnuz,
            EXACT=_is_hopper(),
            WHOLE_K=size % step == 0, ONE_BLOCK=one_block,
            BM=BM, BN=columns, BK=step, num_warps=8, num_stages=stages, enable_fp_fusion=False,
        )  # fmt: skip


def _is_hopper() -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and int(target.arch) // 10 == 9


def _has_instructions(dtype: torch.dtype) -> bool:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return False
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return target.arch.split(":")[0] in WITH_INSTRUCTIONS[dtype]
    return dtype == torch.float8_e4m3fn and int(target.arch) >= FIRST_NVIDIA
