"""``paged_prefix_attention`` over the compiled extension, on a CPU: a step's launches in one call."""

import torch
from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedCall, PagedResults
from rlkernel.native import kernels, tensor_reasons


def unsupported(query: Tensor, *tensors: Tensor, **options: object) -> list[str]:
    if query.device.type != "cpu":
        return [f"its compiled kernel is one for CPUs, got {query.device.type}"]
    return tensor_reasons("query", query)


def forward(call: PagedCall) -> PagedResults:
    rows, heads, _ = call.query.shape
    out = call.query.new_empty(rows, heads, call.value_cache.shape[3])
    return PagedResults(out, attend(call, out))


def attend(call: PagedCall, out: Tensor) -> Tensor:
    """Writes ``out``, which is dense; the lse."""
    query, key_cache, value_cache, _, _, _, plan, rule, sinks = call
    total, heads, value_dim = out.shape
    part = kernels(query.device)
    lse = torch.empty(heads, total, dtype=torch.float32, device="cpu")
    size = plan.slot_count, heads, value_dim + part.PAGED_STATE
    part.paged_prefix_attention(
        query=query, key_cache=key_cache, value_cache=value_cache, rows=plan.rows, positions=plan.positions,
        pages=plan.pages, items=plan.items, starts=plan.starts, slots=plan.slots, launches=plan.launches,
        states=torch.empty(size, dtype=torch.float32, device="cpu"),
        sinks=None if sinks is None else sinks.float().contiguous(), rule=rule, out=out, lse=lse,
    )  # fmt: skip
    return lse
