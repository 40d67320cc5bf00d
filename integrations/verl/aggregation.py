"""How verl sums a loss up: over a micro-batch, or as a part of what all ranks have."""

from __future__ import annotations

from typing import Any

from rlkernel.integrations._replacing import finite, is_count
from rlkernel.ops.policy_loss.rule import AGGREGATIONS

Options = dict[str, Any]
OF_BATCH = ("dp_size", "batch_num_tokens", "global_batch_size", "loss_scale_factor")


def unable(mode: Any, info: Options) -> str | None:
    """Why rlkernel does not sum up so; what verl refuses it says itself."""
    if mode not in AGGREGATIONS:
        return "loss_agg_mode is unknown"
    if not set(info) <= set(OF_BATCH):
        return "global_batch_info has further entries"
    ranks = info.get("dp_size", 1)
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        return "dp_size is no number of ranks"
    if mode == "token-sum":
        return None
    items, scale = info.get(_counted(mode)), info.get("loss_scale_factor")
    if items is None and ranks > 1:
        return f"dp_size is above 1 without {_counted(mode)}"
    if not (items is None or is_count(items)):
        return f"{_counted(mode)} is not above 0"
    if mode == "seq-mean-token-sum-norm" and scale is not None and not (finite(scale) and scale > 0):
        return "loss_scale_factor is not above 0"
    return None


def options(mode: str, info: Options) -> Options:
    """For ``policy_loss`` and ``value_loss``."""
    normed = mode == "seq-mean-token-sum-norm"
    return {
        "loss_agg_mode": mode,
        "dp_size": info.get("dp_size", 1),
        "num_items_in_batch": None if mode == "token-sum" else info.get(_counted(mode)),
        "loss_scale_factor": info.get("loss_scale_factor") if normed else None,
    }


def _counted(mode: str) -> str:
    return "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
