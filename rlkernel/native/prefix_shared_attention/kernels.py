"""The small kernels around vendors' attention over shared prefixes, on any device that has them."""

import math

import torch
from torch import Tensor

from rlkernel.native import launch

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # rlkernel::Dtype


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
    if out.dtype not in DTYPES:
        return _merge_fp64(out, lse, part, part_lse, sinks)
    n, heads, head_dim = out.shape
    part_strides = (0, 0, 0, 0, 0)
    if part is not None and part_lse is not None:
        address, lse_address = part.data_ptr(), part_lse.data_ptr()
        part_strides = address, part.stride(0), part.stride(1), lse_address, part_lse.stride(0)
    sinks = None if sinks is None else sinks.float().contiguous()
    launch(
        "attention_merge", out.device, out.data_ptr(), DTYPES[out.dtype], out.stride(0), out.stride(1),
        lse.data_ptr(), lse.stride(0), *part_strides, 0 if sinks is None else sinks.data_ptr(), n, heads,
        head_dim,
    )  # fmt: skip


def gather_kv(k: Tensor, v: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """``k[index], v[index]`` in one launch: [T, H, D] whose last dimension is contiguous, ``index`` int64."""
    shape = (len(index), *k.shape[1:])
    out_k, out_v = (torch.empty(shape, dtype=k.dtype, device=k.device) for _ in range(2))
    launch(
        "gather_kv", k.device, k.data_ptr(), v.data_ptr(), k.element_size(), k.stride(0), v.stride(0),
        k.stride(1), v.stride(1), index.data_ptr(), *shape, out_k.data_ptr(), out_v.data_ptr(),
    )  # fmt: skip
    return out_k, out_v


def segment_reduce(
    source_k: Tensor, source_v: Tensor, index: Tensor, offsets: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Row r of each result: the sum of ``source[index[offsets[r]:offsets[r + 1]]]``, in that order, in fp32.

    Sources are [K, H, D] and contiguous, the tables int64.  The results [len(offsets) - 1, H, D] are rounded
    once, to ``dtype``: fp32 or the sources' own, which is the default.
    """
    dtype = dtype or source_k.dtype
    if source_k.dtype not in DTYPES:
        k, v = (torch.segment_reduce(x[index], "sum", offsets=offsets, axis=0) for x in (source_k, source_v))
        return k, v
    shape = (len(offsets) - 1, *source_k.shape[1:])
    width = shape[1] * shape[2]
    out_k, out_v = (torch.empty(shape, dtype=dtype, device=source_k.device) for _ in range(2))
    launch(
        "segment_reduce", source_k.device, source_k.data_ptr(), source_v.data_ptr(), DTYPES[source_k.dtype],
        source_k.stride(0), source_v.stride(0), index.data_ptr(), offsets.data_ptr(), shape[0], width,
        out_k.data_ptr(), out_v.data_ptr(), DTYPES[dtype], width, width,
    )  # fmt: skip
    return out_k, out_v


def _merge_fp64(
    out: Tensor, lse: Tensor, part: Tensor | None, part_lse: Tensor | None, sinks: Tensor | None
) -> None:
    """For the proofs in fp64: the kernels read at most fp32."""
    none = torch.full_like(lse, -math.inf)
    a, b = (none if x is None else torch.where(x == math.inf, none, x) for x in (lse, part_lse))
    sink = none if sinks is None else sinks.to(lse.dtype)[:, None].expand_as(lse)
    total = torch.stack([a, b, sink]).logsumexp(0)
    weights = ((x - total).exp().masked_fill(x == -math.inf, 0).T[..., None] for x in (a, b))
    values = out, out if part is None else part
    x, y = (torch.where(w == 0, 0, w * value) for w, value in zip(weights, values, strict=True))
    out.copy_(x + y)
    lse.copy_(total)
