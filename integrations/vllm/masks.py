"""The kept tokens of a batch on their way from the model runner to vLLM's scheduler."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import SamplingMaskLists

from rlkernel.integrations.vllm.rollout import UNKNOWN


class Kept(NamedTuple):
    """Of ``rlkernel.SampleOutput``, for n tokens."""

    ids: Tensor  # [n K]
    offsets: Tensor  # [n + 1]
    unknown: Tensor  # [n]

    def of_rows(self, rows: Tensor) -> Kept:
        """Ids behind the last row's are any."""
        if rows.numel() == 0:
            return Kept(self.ids[:0], self.offsets[:1], self.unknown[:0])
        rows = rows.long()
        ends = self.offsets.diff()[rows].cumsum(0)
        offsets = torch.nn.functional.pad(ends, (1, 0))
        place = torch.arange(len(self.ids), device=rows.device)
        row = torch.searchsorted(ends, place, right=True).clamp(max=len(rows) - 1)
        source = self.offsets[rows[row]] + place - offsets[row]
        return Kept(self.ids[source.clamp(max=len(self.ids) - 1)], offsets, self.unknown[rows])

    def to_cpu(self) -> Kept:
        return Kept(*(x.to("cpu", non_blocking=True) for x in self))


class Masks(NamedTuple):
    """In the place of vLLM's ``SamplingMaskLists`` of a batch, which has them of all its rows or of none."""

    token_ids: np.ndarray
    offsets: np.ndarray  # of places
    first: np.ndarray  # place of each row
    asked: list[bool]

    @classmethod
    def of(
        cls, rooms: list[int], last: Kept | None, drafts: list[int] | None = None, drafted: Kept | None = None
    ) -> Masks:
        """Row r has ``drafts[r]`` places and one for its last token.  Nothing is known of places without
        Kept, and of those that kept more than the row has room for."""
        n = len(rooms)
        places = np.array(drafts or [0] * n) + 1
        room = np.repeat(np.array(rooms), places)
        arrays = _arrays(drafted, len(room) - n), _arrays(last, n)
        ids, counts, unknown = (np.concatenate(pair) for pair in zip(*arrays, strict=True))
        if drafts:  # the drafts of all rows, then their last tokens: becomes row after row
            row = np.arange(n)
            order = np.argsort(np.concatenate((np.repeat(row, places - 1), row)), kind="stable")
            begin, counts, unknown = (np.cumsum(counts) - counts)[order], counts[order], unknown[order]
            ids = ids[np.repeat(begin - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())]
        unknown = unknown | (counts > room)
        said, unsaid = (room > 0) & ~unknown, (room > 0) & unknown
        ids = ids[np.repeat(said, counts)]
        counts = np.where(said, counts, 0)
        ids = np.insert(ids, np.cumsum(counts)[unsaid], UNKNOWN)
        return cls(ids, _offsets(counts + unsaid), _offsets(places), [wanted > 0 for wanted in rooms])

    def slice_request(self, row: int, num_positions: int) -> SamplingMaskLists | None:
        """What vLLM's scheduler takes for the request of a row, which has ``num_positions`` new tokens."""
        if not self.asked[row]:
            return None
        offsets = self.offsets[self.first[row] :][: num_positions + 1]
        ids = self.token_ids[offsets[0] : offsets[-1]]
        return SamplingMaskLists(ids, None if num_positions == 1 else offsets - offsets[0])


def _arrays(kept: Kept | None, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, their number in each place, and which places are not known."""
    if kept is None:
        return np.empty(0, dtype=np.int32), np.zeros(n, dtype=np.int64), np.ones(n, dtype=bool)
    ids, offsets, unknown = (x.cpu().numpy() for x in kept)
    return ids[: offsets[-1]], np.diff(offsets), unknown


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(counts)))
