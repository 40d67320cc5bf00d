"""The logits that a workspace keeps from forward to backward: which, where they lie, how they are taken."""

from typing import NamedTuple

import torch

from rlkernel.drivers.linear_tiles import Tile
from rlkernel.runtime import invariance, workspace


class Layout(NamedTuple):
    """One slice of the vocabulary, ``wide`` entries, after the other; of each its chunks of ``tokens`` of all
    ``rows`` one behind the other, each at a whole cache line."""

    rows: int
    vocab: int
    tokens: int
    wide: int

    @property
    def chunks(self) -> int:
        return -(-self.rows // self.tokens)

    @property
    def tiles(self) -> int:
        return self.chunks * -(-self.vocab // self.wide)

    @property
    def is_joined(self) -> bool:
        """Whether the chunks of every slice leave no gaps, so that all of its rows are one tile too."""
        widths = {self._width(v0) for v0 in range(0, self.vocab, self.wide)}
        return all(self._pitch(width) == self.tokens * width for width in widths)

    def at(self, v0: int, a: int) -> tuple[int, int]:
        """The number of the tile from the entry ``v0`` and the row ``a`` on, and its first element."""
        before, chunk = v0 // self.wide, a // self.tokens
        start = before * self._slice_size(self._width(0)) + chunk * self._pitch(self._width(v0))
        return before * self.chunks + chunk, start

    def size(self, count: int) -> int:
        """Elements of the first ``count`` tiles."""
        slices, chunks = divmod(count, self.chunks)
        v0 = slices * self.wide
        if v0 < self.vocab:
            return self.at(v0, chunks * self.tokens)[1]
        v0 -= self.wide
        return self.at(v0, 0)[1] + self._slice_size(self._width(v0))

    def _width(self, v0: int) -> int:
        return min(self.wide, self.vocab - v0)

    def _pitch(self, width: int) -> int:
        return _whole_lines(self.tokens * width)

    def _slice_size(self, width: int) -> int:
        before = self.chunks - 1  # the last chunk may be a short one
        return before * self._pitch(width) + _whole_lines((self.rows - before * self.tokens) * width)


class KeptLogits(NamedTuple):
    """What the workspace holds of a forward pass."""

    slots: int
    layout: Layout  # of the tiles of forward
    plan: Tile  # the tiles of the backward pass for which there is room beside them


def kept_plans(plan: Tile, n: int, device: torch.device) -> list[Tile]:
    """The tiles in which backward may take logits that ``plan`` left, the best first.

    On a GPU all rows at once, where there is room: the weight's gradient is one product a slice, as in
    ``backward_plan``.
    """
    if device.type == "cpu" or n <= plan.tokens or invariance.is_on():
        return [plan]
    return [plan._replace(tokens=n), plan]


def kept_tiles(tiles: int, size: int, whole: int, used: int, device: torch.device) -> int:
    """How many of ``tiles`` the workspace can hold beside what is ``used`` of it, where one takes at most
    ``size`` bytes and all of them ``whole``.

    On a GPU all or none: backward takes larger tiles where it computes some of them anew.
    """
    room = workspace.limit(device) - used
    if whole <= room:
        return tiles
    return max(min(tiles, room // size), 0) if device.type == "cpu" else 0


def _whole_lines(elements: int) -> int:
    return -(-elements // 128) * 128
