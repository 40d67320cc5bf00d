"""What trainers log of a row beside its logprob, from the tiles of its logits."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.logprob import LogprobResults, Tile

Statistics = tuple[Tensor | None, Tensor | None, Tensor | None]  # in the order of STATISTICS

_CELLS = 2**20  # of logits whose softcap is taken at once, beside the tile


class TileStatistics:
    """Follows the loops of ``tiles.forward``; needs a few values per row, and reads the weight once more.

    ``sum of p**2 = sum of exp(2 z) / (sum of exp z)**2``: the running softmax of the same tile at half the
    temperature.  The mean of the logits is the logit of the mean of the weight, unless there is a softcap.
    """

    def __init__(
        self, kernels: Any, names: tuple[str, ...], hidden: Tensor, weight: Tensor, head: Head, n: int
    ) -> None:
        self.kernels, self.names, self.head, self.vocab = kernels, names, head, weight.shape[0]
        make, dtype = hidden.new_empty if n else hidden.new_zeros, torch.float32
        wants_mean = "mean_logits" in names
        self.sum = hidden.new_zeros(n, dtype=dtype) if wants_mean else None
        by_weight = wants_mean and head.softcap is None
        self.weight_sum = weight.new_zeros(weight.shape[1], dtype=dtype) if by_weight else None
        self.state = make(4, n, dtype=dtype) if "log_sum_sq_probs" in names else None
        self.results = tuple(make(n, dtype=dtype) for _ in range(4)) if self.state is not None else ()

    def tile(self, tile: Tile, h: Tensor, w: Tensor, a: int, b: int) -> None:
        """One tile of the rows [a, b), as the product of ``h`` and ``w`` left it."""
        logits, v0 = tile.logits, tile.vocab_start
        first, last = v0 == 0, v0 + logits.shape[1] == self.vocab
        if self.state is not None:
            results = LogprobResults(self.results[0][a:b], None, *(x[a:b] for x in self.results[1:]))
            half = tile._replace(temperature=tile.temperature / 2)
            self.kernels.tile_forward(half, self.state[:, a:b], first, last, results)
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

    def _capped(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        assert self.head.softcap is not None
        u = logits.float() if bias is None else logits.float() + bias
        return torch.tanh(u * (self.head.logit_scale / self.head.softcap)) * self.head.softcap

    def finish(self, ids: Tensor, t: float | Tensor, state: Tensor, log_sum: Tensor) -> Statistics:
        """Of the rows that were computed; 0 and False where one of them is ignored."""
        kept = ids != self.head.ignore_index
        mean = top = squares = None
        if self.sum is not None:
            total = self.sum
            if self.weight_sum is not None and self.head.bias is not None:
                total = total + self.head.bias.float().sum() * self.head.logit_scale
            mean = torch.where(kept, total / self.vocab / t, 0)
        if "is_top1" in self.names:
            top = kept & (state[3] >= state[0])
        if self.state is not None:
            squares = torch.where(kept, self.results[-1] - 2 * log_sum, 0)
        return mean, top, squares
