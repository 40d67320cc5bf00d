"""The small kernels around vendors' attention over shared prefixes, on any device that has them."""

import torch
from torch import Tensor

from rlkernel.native import kernels


def attention_merge(
    out: Tensor, lse: Tensor, part: Tensor | None, part_lse: Tensor | None, sinks: Tensor | None = None
) -> None:
    """``AttentionMerge`` of ``rlkernel.drivers.prefix_shared_attention_flash``."""
    kernels(out.device).attention_merge(
        out=out, lse=lse, part=part, part_lse=part_lse,
        sinks=None if sinks is None else sinks.float().contiguous(),
    )  # fmt: skip


def gather_kv(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``GatherKv``, likewise."""
    shape = (len(index), *k.shape[1:])
    out_k, out_v = (torch.empty(shape, dtype=k.dtype, device=k.device) for _ in range(2))
    kernels(k.device).gather_kv(k=k, v=v, index=index, out_k=out_k, out_v=out_v)
    return out_k, out_v


def segment_reduce(
    source_k: Tensor, source_v: Tensor, index: Tensor, offsets: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """``SegmentReduce``, likewise."""
    shape = (len(offsets) - 1, *source_k.shape[1:])
    out_k, out_v = (
        torch.empty(shape, dtype=dtype or source_k.dtype, device=source_k.device) for _ in range(2)
    )
    kernels(source_k.device).segment_reduce(
        source_k=source_k, source_v=source_v, index=index, offsets=offsets, out_k=out_k, out_v=out_v
    )
    return out_k, out_v
