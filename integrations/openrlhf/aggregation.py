"""How OpenRLHF sums a loss up: over a micro-batch, or as a part of what all ranks have."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlkernel.integrations._replacing import Arguments, is_count


def options(given: Arguments) -> dict[str, Any]:
    """For ``policy_loss`` and ``value_loss``: by tokens, or by the means of sequences."""
    items, by_token = _items(given), given["self"].token_level_loss
    return {
        "loss_agg_mode": "token-mean" if by_token else "seq-mean-token-mean",
        "num_items_in_batch": items,
        "dp_size": 1 if items is None else given["dp_size"],  # which OpenRLHF multiplies by only then
    }


def unable(given: Arguments) -> str | None:
    """Why rlkernel does not sum up so."""
    items, ranks = _items(given), given["dp_size"]
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        return "dp_size is no number of ranks"
    if isinstance(items, Tensor) and items.dim():
        return "the number of items is not one number"
    return None if items is None or is_count(items) else "the number of items is not above 0"


def _items(given: Arguments) -> Any:
    return given["batch_num_tokens" if given["self"].token_level_loss else "global_batch_size"]
