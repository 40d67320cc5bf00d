"""What is kept of one run's tensors to compare another run's with: hashes of all rows, and values."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.consistency import bits

SPREAD = 16  # rows that are kept of a tensor for which there is no room
_CHUNK = 1 << 20  # elements
_STEP, _FIRST, _SECOND = (
    0x1E3779B97F4A7C15,
    0x3F58476D1CE4E5B9,
    0x14D049BB133111EB,
)  # odd, as splitmix64 has them


class Room:
    """Bytes that are left for values."""

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True


class Fingerprint(NamedTuple):
    """``values`` are the rows ``kept``, or all rows where that is None; they lie on the CPU."""

    shape: torch.Size
    dtype: torch.dtype
    hashes: Tensor
    values: Tensor | None
    kept: Tensor | None


class Distance(NamedTuple):
    """Between the rows of two runs: how many differ of how many, the first of them, and by how much at most.

    ``exact`` tells whether every row was there to be measured; ``ulps`` is None where none of those that
    differ was, or they are no finite floats.
    """

    differ: int
    rows: int
    first: int
    ulps: int | None
    difference: float | None
    exact: bool


def fingerprint(rows: Tensor, room: Room | None) -> Fingerprint:
    """Of rows [R, ...]; without ``room`` no values are kept."""
    rows = rows.detach()
    found, kept, values = hashes(rows), None, None
    if room is not None:
        if not room.take(rows.numel() * rows.itemsize):
            last = max(len(rows) - 1, 0)
            kept = (
                torch.linspace(0, last, min(SPREAD, len(rows)), dtype=torch.float32, device="cpu")
                .round()
                .long()
            )
            rows_kept = rows[kept.to(rows.device)]
        else:
            rows_kept = rows
        values = rows_kept.to("cpu", copy=True)  # what follows may write to it
    return Fingerprint(rows.shape, rows.dtype, found, values, kept)


def hashes(rows: Tensor) -> Tensor:
    """One number for each row, on the CPU: equal for equal rows, whatever float dtype holds them exactly.

    All NaNs are alike; -0 is not 0.  Sums of integers have no order, so that no device shows.
    """
    rows = torch.view_as_real(rows) if rows.is_complex() else rows
    flat = rows.reshape(len(rows), -1) if rows.numel() else rows.new_zeros(len(rows), 0)
    places = torch.arange(flat.shape[1], device=rows.device) * _STEP
    size = max(1, _CHUNK // max(flat.shape[1], 1))
    parts = []
    for start in range(0, len(flat), size):
        mixed = (_integers(flat[start : start + size]) + places) * _FIRST
        mixed = (mixed ^ (mixed >> 31)) * _SECOND
        parts.append((mixed ^ (mixed >> 29)).sum(1).cpu())
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device="cpu")


def _integers(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.to(torch.int64)
    x = x.contiguous() if x.itemsize >= 4 else x.float()
    return torch.where(x.isnan(), -1, bits.as_integers(x))


def distance(one: Fingerprint, other: Tensor) -> Distance | None:
    """From the rows of the first run to those of the second; None where they are the same."""
    wrong = one.hashes != hashes(other)
    if not bool(wrong.any()):
        return None
    far = steps = None
    if one.values is not None:
        here = wrong if one.kept is None else wrong[one.kept]
        index = here.nonzero()[:, 0]
        theirs = index if one.kept is None else one.kept[index]
        far, steps = _apart(one.values[index], other[theirs.to(other.device)].detach().cpu())
    first = int(wrong.nonzero()[0])
    return Distance(
        int(wrong.sum()), len(wrong), first, steps, far, one.values is not None and one.kept is None
    )


def _apart(a: Tensor, b: Tensor) -> tuple[float | None, int | None]:
    if not (a.is_floating_point() and b.is_floating_point()):
        return None, None
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.bfloat16)
    a, b = a.to(dtype), b.to(dtype)
    finite = a.isfinite() & b.isfinite()
    a, b = a[finite], b[finite]
    if not len(a):
        return None, None
    return (a.double() - b.double()).abs().max().item(), int(bits.ulps(a, b).max())
