"""The small kernels around vendors' attention over shared prefixes, on any device that has them."""

import torch
from torch import Tensor

from rlkernel.native import kernels


def attention_merge(
    out: Tensor, lse: Tensor, part: Tensor | None, part_lse: Tensor | None, sinks: Tensor | None = None
) -> None:
    """Merge the partial attention ``part`` [n, H, D], ``part_lse`` [H, n] into ``out``, ``lse`` of its rows.

    In place, with ``lse' = log(exp(lse) + exp(part_lse) + exp(sinks))`` equal to::

        out = exp(lse - lse') * out + exp(part_lse - lse') * part        lse = lse'

    ``lse`` and ``part_lse`` are fp32, -inf (or +inf, as FlashAttention 2 has it) of a row without keys, which
    weighs 0; a row where nothing has a weight gets out 0 and lse -inf.  Without ``part``, sinks alone count.
    The last dimension of each tensor must be contiguous, other strides are free.
    """
    kernels(out.device).attention_merge(
        out=out, lse=lse, part=part, part_lse=part_lse,
        sinks=None if sinks is None else sinks.float().contiguous(),
    )  # fmt: skip


def gather_kv(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``k[index], v[index]`` in one launch: [T, H, D] whose last dimension is contiguous, ``index`` int64."""
    shape = (len(index), *k.shape[1:])
    out_k, out_v = (torch.empty(shape, dtype=k.dtype, device=k.device) for _ in range(2))
    kernels(k.device).gather_kv(k=k, v=v, index=index, out_k=out_k, out_v=out_v)
    return out_k, out_v


def segment_reduce(
    source_k: Tensor, source_v: Tensor, index: Tensor, offsets: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Row r of each result: the sum of ``source[index[offsets[r]:offsets[r + 1]]]``, in that order, in fp32.

    Sources are [K, H, D] and contiguous, the tables int64.  The results [len(offsets) - 1, H, D] are rounded
    once, to ``dtype``: fp32 or the sources' own, which is the default.
    """
    shape = (len(offsets) - 1, *source_k.shape[1:])
    out_k, out_v = (
        torch.empty(shape, dtype=dtype or source_k.dtype, device=source_k.device) for _ in range(2)
    )
    kernels(source_k.device).segment_reduce(
        source_k=source_k, source_v=source_v, index=index, offsets=offsets, out_k=out_k, out_v=out_v
    )
    return out_k, out_v
