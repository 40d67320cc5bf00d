"""The tiles of hidden states, vocabulary and logits: from sizes, dtypes and the workspace's limit."""

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.runtime import invariance, workspace
from rlkernel.runtime.workspace import ALIGNMENT


class Tile(NamedTuple):
    """How many tokens and vocabulary entries a tile holds: from V, H, dtypes and the limit; from N on a GPU
    where all rows are one chunk, or backward computes their logits anew."""

    tokens: int
    vocab: int


# The most that helps: GEMMs run at full speed, and on a CPU a tile of logits stays in the caches.
CPU_TILE = Tile(1024, 4096)
# On a GPU a slice of the vocabulary is 66 blocks of 256 wide, or a half or a quarter of it: with rows in
# multiples of 512 its blocks fill 132 multiprocessors whole.
GPU_TILE = Tile(4096, 16896)
GPU_ROWS = 512
# Rows of whole logits from which linear_policy_loss gains by one pass: a chunk of N saves 2 N H V operations
# and reads and writes the weight's gradient, 8 V H bytes. At F operations and B bytes in a second that pays
# from 4 F / B rows on: F / B is 150 to 300 in data sheets from A100 to B200 and MI300X, 10 to 30 on a CPU.
CPU_WHOLE_ROWS, GPU_WHOLE_ROWS = 128, 1024


class Shape(NamedTuple):
    """All that a tile follows from, but for the limit."""

    vocab: int
    size: int
    dtype: torch.dtype
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype
    device: torch.device
    most: Tile

    @classmethod
    def of(cls, weight: Tensor, head: Head) -> "Shape":
        device, (vocab, size) = weight.device, weight.shape
        most = CPU_TILE if device.type == "cpu" else GPU_TILE
        return cls(vocab, size, weight.dtype, head.logits_dtype, head.compute_dtype, device, most)

    @property
    def operand(self) -> torch.dtype:
        return operand_dtype(self.compute_dtype, self.device)

    @property
    def converted(self) -> int:
        """Bytes that an entry of the weight takes as an operand, where it is none as it is."""
        return 0 if self.dtype == self.operand == self.compute_dtype else self.operand.itemsize

    @property
    def cell(self) -> int:
        """Bytes of a logit, and of its gradient where that does not go over it."""
        apart = self.logits_dtype != self.operand
        return self.logits_dtype.itemsize + (self.operand.itemsize if apart else 0)

    @property
    def sums_apart(self) -> bool:
        """Whether the weight's gradient of one chunk is summed beside it, as the product cannot write it."""
        return self.dtype not in (self.operand, torch.float32)


def tile_plan(weight: Tensor, head: Head, n: int | None = None) -> Tile:
    """The tile: the same for forward and backward, or the recomputed logits would not be those of the lse.

    The widest slice of the vocabulary whose converted weight and fp32 gradient take at most half of the
    limit, and as many tokens as fit beside it.  On a GPU, ``n`` rows that are no more than those have wider
    slices; where the bits of a row must not follow their number, ``n`` is not looked at.
    """
    shape, limit = Shape.of(weight, head), workspace.limit(weight.device)
    plan = _tile_plan(shape, limit)
    if n is None or weight.device.type == "cpu" or not 0 < n <= plan.tokens or invariance.is_on():
        return plan
    return _few_rows(shape, limit, n, plan)


@functools.lru_cache
def _tile_plan(shape: Shape, limit: int) -> Tile:
    vocab, size, most, operand = shape.vocab, shape.size, shape.most, shape.operand
    logits = shape.logits_dtype.itemsize
    cell = shape.cell
    per_entry = size * (shape.converted + (0 if shape.dtype == torch.float32 else 4))
    per_token = size * (operand.itemsize + 4)
    wide = min(vocab, most.vocab)
    while wide > 256 and wide * per_entry > limit // 2:
        wide = narrower(wide)
    tokens = max((limit - wide * per_entry) // (cell * wide + per_token), 16)
    # linear_policy_loss keeps whole rows of logits, in these same tiles: its bits are those of linear_logprob
    if shape.device.type == "cpu":  # whose GEMMs lose little by it
        row = logits * vocab + cell * wide + 4 * per_token
        whole = (limit - wide * size * shape.converted) // row
        tokens = min(tokens, max(whole, CPU_WHOLE_ROWS))
    else:
        fixed, row = _whole_rows(shape, wide)
        whole = (limit - fixed) // row
        if GPU_WHOLE_ROWS <= whole < min(tokens, most.tokens):
            tokens = whole - whole % GPU_ROWS
    if tokens > 128:
        tokens -= tokens % 128
    return Tile(int(min(tokens, most.tokens)), wide)


@functools.lru_cache
def _few_rows(shape: Shape, limit: int, n: int, plan: Tile) -> Tile:
    """``plan`` with the fewest slices of the vocabulary that few rows leave room for.

    The host takes longer for a narrow one than the GPU, and each ends in a wave of blocks that is not full.
    What the limit holds in the slices of ``plan`` it holds in these: the logits of all rows until backward,
    or beside what linear_policy_loss needs.
    """

    def bytes_of(wide: int) -> tuple[int, int]:
        fixed, row = _whole_rows(shape, wide)
        kept = n * shape.vocab * shape.logits_dtype.itemsize
        return _all_rows(shape, n, wide) + kept, fixed + n * row

    of_hidden = n * shape.size * (shape.operand.itemsize + 4)  # which not every call has
    held = [size - of_hidden <= limit for size in bytes_of(plan.vocab)]
    for wide in _widths(shape, plan.vocab):
        still = all(size <= limit or not before for size, before in zip(bytes_of(wide), held, strict=True))
        if still and _all_rows(shape, n, wide) <= limit:
            return plan._replace(vocab=wide)
    return plan


def _widths(shape: Shape, least: int) -> Iterator[int]:
    """Widths of slices, of the fewest slices first, down to ``least``: whole multiples of a GPU's slice."""
    unit = shape.most.vocab
    for count in range(1, -(-shape.vocab // unit)):
        wide = -(-shape.vocab // count)
        yield wide if count == 1 else -(-wide // unit) * unit
    wide = min(shape.vocab, unit)
    while wide > least:
        yield wide
        wide = narrower(wide)


def _all_rows(shape: Shape, rows: int, wide: int) -> int:
    """Bytes of a slice of the logits of all rows, forward and backward."""
    of_slice = shape.converted + (4 if shape.sums_apart else 0)
    of_row = shape.cell * wide + shape.size * (shape.operand.itemsize + 4)
    return rows * of_row + wide * shape.size * of_slice + 8 * ALIGNMENT


def narrower(wide: int) -> int:
    half = wide // 2
    return max(256, half if half % 128 == 0 else half - half % 256)


def backward_plan(weight: Tensor, head: Head, n: int) -> Tile:
    """The tile of a backward pass over ``n`` rows whose logits are not there any more.

    On a GPU all rows at once, as long as a slice is wide enough beside them: the weight's gradient is then
    one product a slice, and nothing is read and added again for each chunk.  A recomputed logit may differ
    from that of the lse in its last bit, by the library's choice for another number of rows.
    """
    plan, device = tile_plan(weight, head), weight.device
    if device.type == "cpu" or n == 0 or invariance.is_on():
        return plan
    rows = n if n <= plan.tokens else -(-n // GPU_ROWS) * GPU_ROWS
    return _backward_plan(Shape.of(weight, head), rows, workspace.limit(device), plan)


@functools.lru_cache
def _backward_plan(shape: Shape, rows: int, limit: int, plan: Tile) -> Tile:
    for wide in _widths(shape, GPU_WHOLE_ROWS):
        if _all_rows(shape, rows, wide) <= limit:
            return Tile(max(rows, plan.tokens), wide)
    # not all rows: as many as one product profits from, beside fp32 sums of a slice of the weight's gradient
    wide = plan.vocab
    per_entry = shape.size * (shape.converted + (0 if shape.dtype == torch.float32 else 4))
    room = (limit - wide * per_entry) // (shape.cell * wide + shape.size * (shape.operand.itemsize + 4))
    return plan._replace(tokens=max(plan.tokens, min(room - room % GPU_ROWS, rows)))


def _whole_rows(shape: Shape, wide: int) -> tuple[int, int]:
    """Bytes that linear_policy_loss needs at most to keep rows of whole logits: once, and for each row."""
    vocab, size, operand, logits = shape.vocab, shape.size, shape.operand, shape.logits_dtype.itemsize
    fixed = wide * size * shape.converted + (-(-vocab // wide) + 6) * ALIGNMENT
    row = logits * vocab + size * (operand.itemsize + 4)
    row += 0 if shape.logits_dtype == operand else wide * operand.itemsize
    if shape.device.type == "cpu":  # where rows without a derivative are left out
        row += wide * logits + size * operand.itemsize
    return fixed, row


def one_pass_limit(weight: Tensor, head: Head) -> int:
    """The next larger workspace limit, in MiB, with which linear_policy_loss takes one pass over any rows."""
    return _one_pass_limit(Shape.of(weight, head), workspace.limit(weight.device) // 2**20 + 1)


@functools.lru_cache
def _one_pass_limit(shape: Shape, least: int) -> int:
    def holds(mib: int) -> bool:
        tokens, wide = _tile_plan.__wrapped__(shape, mib * 2**20)
        fixed, row = _whole_rows(shape, wide)
        return fixed + tokens * row <= mib * 2**20

    return next(mib for mib in itertools.count(least) if holds(mib))


def product_kind(compute_dtype: torch.dtype, device: torch.device) -> str:
    """How a GEMM of ``compute_dtype`` gives fp32.

    "direct": its operands are fp32; "out_dtype": the library takes low precision and writes fp32, on GPUs
    where it says that it can; "upcast": the operands are converted to fp32 a tile at a time.
    """
    if compute_dtype == torch.float32:
        return "direct"
    return "out_dtype" if device.type == "cuda" and writes_fp32(compute_dtype, device) else "upcast"


@functools.cache
def writes_fp32(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the GPU's library multiplies this dtype into fp32, and adds to fp32: asked once, of 8 by 8.

    In CUDA it does.  ROCm's builds of torch differ; converted to fp32 a product takes six times as long.
    """
    if torch.version.hip is None:
        return True
    a = torch.ones(8, 8, dtype=dtype, device=device)
    out = torch.empty(8, 8, dtype=torch.float32, device=device)
    try:
        torch.ops.aten.mm.dtype_out(a, a, torch.float32, out=out)
        torch.ops.aten.addmm.dtype_out(out, a, a, torch.float32, out=out)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def operand_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.float32 if product_kind(compute_dtype, device) == "upcast" else compute_dtype
