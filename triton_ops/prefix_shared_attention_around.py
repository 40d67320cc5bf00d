"""The small kernels around vendors' attention over shared prefixes: contracts and bits of ``native``."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.triton_ops import prefix_shared_attention_around_kernels as kernels
from rlkernel.triton_ops._sizes import cdiv, next_power_of_2

ELEMENTS = 2048  # of a program's tile


def attention_merge(
    out: Tensor, lse: Tensor, part: Tensor | None, part_lse: Tensor | None, sinks: Tensor | None = None
) -> None:
    """``AttentionMerge`` of ``rlkernel.drivers.prefix_shared_attention_flash``."""
    rows, heads, head_dim = out.shape
    if not out.numel() and not lse.numel():
        return
    partial: tuple[Any, ...] = (None, 0, 0, None, 0)
    if part is not None:
        assert part_lse is not None
        partial = part, part.stride(0), part.stride(1), part_lse, part_lse.stride(0)
    shape = _shape(heads, head_dim)
    with torch.cuda.device_of(out):
        kernels.around_merge_kernel[(_tiles(rows, shape),)](
            out, out.stride(0), out.stride(1), lse, lse.stride(0), *partial,
            None if sinks is None else sinks.float().contiguous(), rows, **shape,
        )  # fmt: skip


def gather_kv(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``GatherKv``, likewise."""
    rows, heads, head_dim = len(index), *k.shape[1:]
    out_k, out_v = (torch.empty(rows, heads, head_dim, dtype=k.dtype, device=k.device) for _ in range(2))
    if out_k.numel():
        shape = _shape(heads, head_dim)
        with torch.cuda.device_of(k):
            kernels.around_gather_kernel[(2 * _tiles(rows, shape),)](
                k, k.stride(0), k.stride(1), v, v.stride(0), v.stride(1), index, rows, out_k, out_v, **shape
            )
    return out_k, out_v


def segment_reduce(
    source_k: Tensor, source_v: Tensor, index: Tensor, offsets: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``SegmentReduce``, likewise."""
    rows, heads, head_dim = len(offsets) - 1, *source_k.shape[1:]
    dtype = dtype or source_k.dtype
    out_k, out_v = (torch.empty(rows, heads, head_dim, dtype=dtype, device=index.device) for _ in range(2))
    if out_k.numel():
        shape = _shape(heads, head_dim)
        with torch.cuda.device_of(source_k):
            kernels.around_reduce_kernel[(2 * _tiles(rows, shape),)](
                source_k, source_v, index, offsets, rows, out_k, out_v, **shape
            )
    return out_k, out_v


def _shape(heads: int, head_dim: int) -> dict[str, Any]:
    width = next_power_of_2(head_dim)
    return {
        "HEADS": heads,
        "D": head_dim,
        "WIDTH": width,
        "ROWS": max(ELEMENTS // width, 1),
        "num_warps": 4,
        "enable_fp_fusion": False,
    }


def _tiles(rows: int, shape: dict[str, Any]) -> int:
    return cdiv(rows, shape["ROWS"]) * shape["HEADS"]
