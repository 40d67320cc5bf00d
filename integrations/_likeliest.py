"""The ids that an engine names as the likeliest ones of a row."""

import torch
from torch import Tensor


def all_named(ids: Tensor, vocab: int) -> Tensor:
    """The likeliest tokens [n, k] of rows in which fewer have a probability, with the lowest of all other ids
    in the place of -1: vLLM and SGLang name k tokens of each row, and by its id once."""
    missing = ids < 0
    if ids.device.type == "cpu" and not bool(missing.any()):  # elsewhere to look would be to wait
        return ids
    # of so many ids in front, at least as many as are missing are not among the row's own
    front = min(vocab, 2 * ids.shape[1])
    taken = torch.zeros(len(ids), front + 1, dtype=torch.bool, device=ids.device)
    taken.scatter_(1, torch.where(missing | (ids >= front), front, ids).long(), True)
    free = taken[:, :front].to(torch.int8).argsort(dim=1, stable=True)
    return torch.where(missing, free.gather(1, (missing.cumsum(1) - 1).clamp(min=0)), ids)
