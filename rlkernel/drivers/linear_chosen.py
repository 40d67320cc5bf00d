"""Which rows the products of the tiles take.

A library must be told how many rows it multiplies.  How many of them matter is data: to read it the host
waits for the GPU, which then waits for the host's next launch.  Nothing needs to be known where all rows are
multiplied and those that do not matter are masked; but their products are for nothing.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.drivers.linear_rows import Rows
from rlkernel.drivers.linear_tiles import product_kind
from rlkernel.runtime import gpu

# Operations of a pass from which a GPU's rows are counted.  A count costs the GPU about 0.1 ms, until the
# host has heard of it and launched the next product; 2**39 take 2 ms of an A100, 0.8 of an H100 and 0.3 of a
# B200.  So it pays where a twentieth to a third of the rows do not matter, as in most batches with prompts.
WORTH_A_COUNT = 2**39
WIDE = 8  # how much longer the same takes with operands in fp32


class Chosen(NamedTuple):
    """The rows that are computed, and those of them that count."""

    rows: Tensor | None = None  # [n] int64, ascending; None: all rows
    mask: Tensor | None = None  # [n] bool: the others are computed, and must leave no trace; None: all count


def operations(weight: Tensor, head: Head, n: int, products: int) -> int:
    """Of ``products`` of n rows with the whole weight, in those of tensor cores."""
    direct = product_kind(head.compute_dtype, weight.device) == "out_dtype"
    return 2 * n * weight.numel() * products * (1 if direct else WIDE)


def is_counted(device: torch.device, work: int) -> bool:
    """Whether rows are counted for a pass of so many operations."""
    return gpu.may_wait(device) and (not gpu.runs_ahead(device) or work >= WORTH_A_COUNT)


def choose(wanted: Tensor, work: int) -> Chosen:
    """The rows to compute of those that matter; ``work``: the operations that all take together."""
    if not is_counted(wanted.device, work):
        return Chosen(mask=wanted)
    index = wanted.nonzero()  # [n, 1]
    return Chosen() if index.shape[0] == wanted.shape[0] else Chosen(index[:, 0])


def choose_again(wanted: Tensor, before: Tensor, n: int, products: int, unit: int) -> tuple[Chosen, bool]:
    """The rows of a backward pass, and whether they are the ``n`` rows ``before`` whose logits are there yet.

    It takes ``products`` beside the logits, of ``unit`` operations a row; fewer rows without their logits are
    one product more.
    """
    total = wanted.shape[0]
    if is_counted(wanted.device, total * products * unit):
        found = choose(wanted, total * products * unit)
        count = total if found.rows is None else found.rows.shape[0]
        if count == n or not gpu.runs_ahead(wanted.device):
            return found, True
        if count * (products + 1) < n * products:
            return found, False
    if n == total:
        return Chosen(mask=wanted), True
    index = Rows.of(before).order[:n]
    return Chosen(index, wanted[index]), True
