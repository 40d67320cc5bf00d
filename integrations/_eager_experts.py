"""A mixture of experts in the arithmetic of transformers' eager experts, for rollout engines on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor


def routed(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Weights [N, top_k] in the logits' dtype and ids of the likeliest experts, whose softmax is fp32."""
    weights, ids = router_logits.softmax(-1, dtype=torch.float32).topk(top_k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(router_logits.dtype), ids.to(torch.int32)


def add_experts(output: Tensor, hidden: Tensor, w1: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> None:
    """Add to ``output`` what each row gets of its experts, in their order.

    ``w1`` [experts, 2 I, H] has the gate before the factor, ``w2`` is [experts, H, I].
    """
    weights = weights.to(hidden.dtype)
    for expert in ids.unique().tolist():
        rows, places = (ids == expert).nonzero(as_tuple=True)
        gate, up = torch.nn.functional.linear(hidden[rows], w1[expert]).chunk(2, -1)
        found = torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert])
        output.index_add_(0, rows, found * weights[rows, places, None])
