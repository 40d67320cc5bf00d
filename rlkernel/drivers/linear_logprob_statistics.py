"""What trainers log of a row beside its logprob, from the tiles of its logits."""

import functools
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import EXTREMES, Head, LinearLogprobCall
from rlkernel.calls.logprob import LogprobResults, State, Tile
from rlkernel.drivers.linear_products import rows_of

_CELLS = 2**20  # of logits whose softcap is taken at once, beside the tile


class TileStatistics:
    """Follows the loops of ``linear_logprob``; needs a few values per row, and reads the weight once more.

    ``sum of p**2 = sum of exp(2 z) / (sum of exp z)**2``: the running softmax of the same tile at half the
    temperature.  The mean of the logits is the logit of the mean of the weight, unless there is a softcap.
    The extremes are those of the product, as what follows it is monotonic.
    """

    def __init__(self, kernels: Any, call: LinearLogprobCall, head: Head, ids: Tensor) -> None:
        """``head`` with a wide bias; ``ids`` of the rows of ``call`` that are computed."""
        self.kernels, self.ids, self.head, self.names = kernels, ids, head, call.statistics
        self.vocab, size = call.weight.shape
        new, n = functools.partial(torch.zeros, dtype=torch.float32, device=ids.device), ids.numel()
        self.sum = new(n) if "mean_logits" in self.names else None
        self.weight_sum = None if self.sum is None or call.softcap is not None else new(size)
        self.state = new(len(State), n) if "log_sum_sq_probs" in self.names else None
        self.results = None if self.state is None else LogprobResults.empty(ids, False)
        self.extremes = new(2, n) if any(name in EXTREMES for name in self.names) else None

    def tile(self, tile: Tile, h: Tensor, w: Tensor, a: int, b: int) -> None:
        """One tile of the rows [a, b), as the product of ``h`` and ``w`` left it."""
        logits, v0 = tile.logits, tile.vocab_start
        first, last = v0 == 0, v0 + logits.shape[1] == self.vocab
        if self.state is not None and self.results is not None:
            results = LogprobResults(*(rows_of(x, a, b) for x in self.results))
            half = tile._replace(temperature=tile.temperature / 2)
            self.kernels.tile_forward(half, self.state[:, a:b], first, last, results)
        if self.extremes is not None:
            self._widen(self.extremes[:, a:b], tile, first)
        if self.sum is None:
            return
        if self.weight_sum is None:
            step = max(1, _CELLS // logits.shape[1])
            for i in range(0, b - a, step):
                self.sum[a + i : min(a + i + step, b)] += self._capped(logits[i : i + step], tile.bias).sum(1)
            return
        if a == 0:
            self.weight_sum += w.sum(0, dtype=torch.float32)
        if last:  # the slices of the weight are all there
            self.sum[a:b] = torch.mv(h.float(), self.weight_sum) * self.head.logit_scale

    def _widen(self, extremes: Tensor, tile: Tile, first: bool) -> None:
        if tile.bias is None:
            low, high = (x.float() for x in torch.aminmax(tile.logits, dim=1))
        else:
            step = max(1, _CELLS // tile.logits.shape[1])
            parts = [torch.aminmax(x.float() + tile.bias, dim=1) for x in tile.logits.split(step)]
            low, high = (torch.cat(x) for x in zip(*parts, strict=True))
        extremes[0] = low if first else torch.minimum(extremes[0], low)
        extremes[1] = high if first else torch.maximum(extremes[1], high)

    def _capped(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        assert self.head.softcap is not None
        u = logits.float() if bias is None else logits.float() + bias
        return torch.tanh(u * (self.head.logit_scale / self.head.softcap)) * self.head.softcap

    def finish(self, t: float | Tensor, state: Tensor, log_sum: Tensor) -> dict[str, Tensor | None]:
        """By name, of the rows that were computed; 0 and False where one of them is ignored."""
        kept = self.ids != self.head.ignore_index
        found: dict[str, Tensor | None] = {}
        if self.sum is not None:
            total = self.sum
            if self.weight_sum is not None and self.head.bias is not None:
                total = total + self.head.bias.sum() * self.head.logit_scale
            found["mean_logits"] = torch.where(kept, total / self.vocab / t, 0)
        if "is_top1" in self.names:
            found["is_top1"] = kept & (state[State.at_target] >= state[State.maximum])
        if self.results is not None:
            found["log_sum_sq_probs"] = torch.where(kept, self.results.log_sum - 2 * log_sum, 0)
        if self.extremes is not None:
            ends = self.extremes * self.head.logit_scale
            if self.head.softcap is not None:
                ends = torch.tanh(ends / self.head.softcap) * self.head.softcap
            ends = torch.where(kept, ends / t, 0)
            ends = ends.flip(0) if self.head.logit_scale < 0 else ends
            found |= {name: x for name, x in zip(EXTREMES, ends, strict=True) if name in self.names}
        return found
