"""The rows that are computed, side by side in front of the others, without a look at how many they are."""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """Where ``wanted`` rows stand, in their order; the device alone knows their number."""

    wanted: Tensor  # [N] bool
    number: Tensor  # [1] int32
    order: Tensor  # [N] int64: the wanted rows, then the first of them again and again
    place: Tensor  # [N] int64: where each of them stands in ``order``; anything within it for the others

    @classmethod
    def of(cls, wanted: Tensor) -> "Rows":
        n, device = wanted.numel(), wanted.device
        place = wanted.cumsum(0) - 1
        # what is read behind the wanted ones is one of them
        first = (wanted.to(torch.uint8).argmax() if n else place.new_zeros(())).expand(n + 1)
        # the others all go to a place behind the end; of the wanted ones no two go to the same
        order = first.scatter(0, torch.where(wanted, place, n), torch.arange(n, device=device))
        return cls(wanted, wanted.sum(dtype=torch.int32).view(1), order[:n], place.clamp(min=0))

    def take(self, x: Any) -> Any:
        """``x`` with its rows in the order of these, where it is a tensor."""
        return x[self.order] if isinstance(x, Tensor) else x

    def put_back(self, x: Tensor | None) -> Tensor | None:
        """The rows of ``take`` at their places, and 0 at the others."""
        if x is None:
            return None
        wanted = self.wanted.view(-1, *(1,) * (x.dim() - 1))
        return torch.where(wanted, x[self.place], torch.zeros((), dtype=x.dtype, device=x.device))

    def number_from(self, start: int) -> Tensor:
        """How many there are from row ``start`` on."""
        return self.number if start == 0 else (self.number - start).clamp(min=0)
