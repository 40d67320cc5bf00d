"""What else requests ask for: the likeliest tokens, and the log-probabilities of tokens by their ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Lists = Sequence[Sequence[int] | None]  # of each request; None: it asks for none


def asks(lists: Lists | None) -> bool:
    return any(ids is not None for ids in lists or ())


def outside(lists: Lists | None, vocab: int) -> str:
    """Why these are SGLang's to judge: an id that torch would count from behind, or refuse."""
    for ids in lists or ():
        if ids and not 0 <= min(ids) <= max(ids) < vocab:
            return "token_ids_logprobs has an id outside the vocabulary"
    return ""


def table(lists: Lists, device: torch.device) -> Tensor:
    """[requests, K], with -1 behind fewer than K."""
    width = max((len(ids) for ids in lists if ids), default=0)
    rows = [[*(ids or ()), *[-1] * (width - len(ids or ()))] for ids in lists]
    return (
        torch.tensor(rows, dtype=torch.int64, device="cpu")
        .view(len(lists), width)
        .to(device, non_blocking=True)
    )


def counts(tops: Sequence[int]) -> list[int]:
    """How many of the likeliest tokens requests ask for: SGLang takes less than none for none."""
    return [max(k, 0) for k in tops]
