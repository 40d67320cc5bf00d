"""How many rows the kernels of ``prefix_shared_attention`` multiply at a time, and what all are given."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.triton_ops._device import generation
from rlkernel.triton_ops._sizes import next_power_of_2
from rlkernel.triton_ops.prefix_shared_attention_plan import QueryPlan, logical_plan, query_plan

NO_WINDOW = 2**31 - 1


class Blocks(NamedTuple):
    """Rows of queries and of keys that are multiplied at a time, and how a program runs.

    The first two decide the order of sums: they follow from head dims, dtype and rule, and from the vendor
    and its generation of tensor cores, whose sums differ anyway; never from how many processors a card has.
    """

    q: int
    k: int
    warps: int
    stages: int


# (bytes of a number, wider head dim) -> blocks of each of KERNELS: the largest found that spill on none of
# sm_80, sm_90, sm_100 and gfx942, in shared memory that all of them have (AMD: 64 KiB; its four warps have
# twice the registers of eight).  tests/test_triton_codegen.py compiles some of them; with a softcap, or at
# head dims between these, a few spill on one of the four.  fp32 is exact: multiply-adds on NVIDIA.
KERNELS = ("forward", "query grad", "key grad")
NVIDIA = {
    (2, 64): (Blocks(128, 64, 8, 3), Blocks(128, 32, 8, 2), Blocks(64, 128, 8, 2)),
    (2, 128): (Blocks(128, 64, 8, 3), Blocks(64, 64, 4, 2), Blocks(64, 64, 8, 2)),
    (2, 256): (Blocks(64, 32, 8, 3), Blocks(32, 64, 8, 2), Blocks(64, 32, 8, 2)),
    (4, 64): (Blocks(64, 32, 8, 2), Blocks(64, 32, 8, 2), Blocks(32, 32, 8, 2)),
    (4, 128): (Blocks(64, 16, 8, 1), Blocks(32, 32, 8, 1), Blocks(32, 16, 8, 2)),
    (4, 256): (Blocks(16, 16, 8, 1), Blocks(16, 16, 4, 1), Blocks(16, 16, 8, 1)),
}
AMD = {
    (2, 64): (Blocks(128, 64, 4, 2), Blocks(128, 32, 4, 2), Blocks(32, 128, 4, 2)),
    (2, 128): (Blocks(128, 64, 4, 2), Blocks(128, 32, 4, 2), Blocks(32, 64, 4, 2)),
    (2, 256): (Blocks(64, 32, 4, 2), Blocks(64, 16, 4, 2), Blocks(16, 32, 4, 2)),
    (4, 64): (Blocks(64, 32, 4, 2), Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 1)),
    (4, 128): (Blocks(64, 32, 4, 1), Blocks(32, 32, 4, 1), Blocks(16, 32, 4, 1)),
    (4, 256): (Blocks(32, 32, 4, 1), Blocks(32, 16, 4, 1), Blocks(32, 16, 4, 1)),
}
# (generation, kernel) -> (bytes, head dims of q and of v, 64 at least) -> blocks.  Each four warps of Hopper
# multiply 64 rows at a time, and with fewer than 64 columns their operands' way out of shared memory takes
# longer than the product.  Keys are the rows of the key gradient's scores: 128 of them are two such groups,
# each with rows of its own, and 64 queries fill the columns.  At head dim 128 Hopper's are the fastest of ten
# on an H200, by 4 to 13% before those that had been reckoned.
OF_GENERATION = {
    (9, "forward"): {(2, 128, 128): Blocks(64, 64, 4, 3)},
    (9, "query grad"): {(2, 128, 128): Blocks(128, 64, 8, 3), (2, 256, 128): Blocks(128, 64, 8, 2)},
    (9, "key grad"): {(2, 128, 128): Blocks(64, 128, 8, 3)},
    (10, "query grad"): {
        (2, 64, 64): Blocks(128, 32, 8, 3),
        (2, 128, 128): Blocks(128, 64, 8, 2),
        (2, 256, 128): Blocks(64, 64, 8, 2),
    },
    (10, "key grad"): {(2, 128, 128): Blocks(64, 128, 8, 2), (2, 256, 128): Blocks(64, 64, 8, 1)},
}


def blocks_of(kernel: str, dims: tuple[int, int], dtype: torch.dtype, rule: AttentionRule) -> Blocks:
    nvidia = torch.version.hip is None
    heads = max(64, width_of(dims[0])), max(64, width_of(dims[1]))
    shape, width = (dtype.itemsize, *heads), max(heads)
    blocks = (NVIDIA if nvidia else AMD)[dtype.itemsize, width][KERNELS.index(kernel)]
    blocks = OF_GENERATION.get((generation(), kernel), {}).get(shape, blocks)
    # a softcap's polynomial takes registers, and on AMD so do the masks of a head dim that fills no tile:
    # half as many rows at a time, but enough for tensor cores
    if rule.softcap or (not nvidia and min(dims) < width):
        visited = "q" if kernel == "key grad" else "k"
        rows: int = getattr(blocks, visited)
        least = 16 if not nvidia or (visited == "k" and dtype.itemsize == 4) else 32
        return blocks._replace(**{visited: min(rows, max(least, rows // 2))})
    return blocks


def strided(x: Tensor) -> tuple[Tensor, int, int]:
    return x, x.stride(0), x.stride(1)


def numbers(rule: AttentionRule) -> tuple[float, float | None, int]:
    return rule.scale, rule.softcap or None, rule.window or NO_WINDOW


def width_of(head_dim: int) -> int:
    return max(16, next_power_of_2(head_dim))


def shape_of(dims: tuple[int, int], blocks: Blocks, visited: int) -> dict[str, int]:
    return {
        "D": dims[0],
        "WIDTH": width_of(dims[0]),
        "DV": dims[1],
        "V_WIDTH": width_of(dims[1]),
        "BQ": blocks.q,
        "BK": blocks.k,
        "STEP": max(16, visited // 2),
        "num_warps": blocks.warps,
        "num_stages": blocks.stages,
    }


def query_plan_of(
    layout: PrefixLayout, rule: AttentionRule, blocks: Blocks, device: torch.device
) -> QueryPlan:
    make = logical_plan if rule.bitwise else query_plan
    name = f"triton {make.__name__} {blocks.q} {blocks.k} {rule.window}"
    plan: QueryPlan = layout._on(device, name, lambda: make(layout, rule.window, blocks.q, blocks.k))
    return plan
