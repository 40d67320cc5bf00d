"""Products of hidden states with the rows of the lm_head that a support names, and their gradients."""

import torch
from torch import Tensor


def row_of(offsets: Tensor, entries: int) -> Tensor:
    """The row of each entry; -1 and the number of rows for those outside all of them.

    Equal to ``repeat_interleave`` of the rows by the lengths between ``offsets``, without a synchronisation.
    """
    places = torch.arange(entries, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True) - 1
