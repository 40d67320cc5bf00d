"""What stands between the kernels of ``preference_loss``: the order of the pairs, for the losses of sorted
ones."""

import torch
from torch import Tensor

from rlkernel.calls.preference_loss import PREFERENCE_TERMS, SORTED, PreferenceLossCall

_SORTED = {PREFERENCE_TERMS.index(name) for name in SORTED}


def order(call: PreferenceLossCall, sums: Tensor) -> Tensor | None:
    """[4, B]: the pairs sorted by their log-ratio, by the reference's, chosen and rejected by their own; None
    where no loss of the call asks.

    Pairs that do not count come last: they stay among themselves.  Equal ones keep the order of the batch.
    """
    if _SORTED.isdisjoint(call.rule.terms):
        return None
    half = sums.shape[0] // 2
    logps, ref, tokens = sums[:, 0].view(2, half), sums[:, 1].view(2, half), sums[:, 2].view(2, half)
    keys = torch.cat([(logps[0] - logps[1])[None], (ref[0] - ref[1])[None], logps - ref])
    keys = torch.where((tokens > 0).all(0), keys, torch.inf)
    return torch.sort(keys, dim=1, stable=True).indices
