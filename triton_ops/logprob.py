"""Triton kernels of ``logprob``: one pass over a row forward, one read and one write backward.

The kernels see a tile, some consecutive entries of the vocabulary, so that ``logprob`` (one tile) and ``linear_logprob``
(many) share them.  With ``u = (x + bias) * logit_scale``, ``y = softcap * tanh(u / softcap)`` (or u) and ``T`` the
temperature, a row's statistics are ``m = max y``, ``s = sum exp((y - m) / T)``, ``w = sum exp((y - m) / T) * (y - m) / T``.

A row's bits depend on its values only.  Triton picks the order of a float reduction by the layout, and the layout by the
alignment of the arguments; so each lane sums its own entries in vocabulary order, fused multiply-adds are written out and
never left to the compiler, and the lanes are summed as integers, in any order.
"""

import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FIXED_POINT = tl.constexpr(2.0**40)  # lanes are summed as int64 multiples of 2**-40: exact to 2**-41, and s <= V fits
MAX_VOCAB = 2**22

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]


def unsupported(logits: Tensor, *tensors: Tensor, **options: object) -> list[str]:
    reasons = device_reasons(logits)
    if logits.dtype not in DTYPES:
        reasons.append(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if logits.shape[-1] > MAX_VOCAB:
        reasons.append(f"the vocabulary must be at most {MAX_VOCAB}, got {logits.shape[-1]}")
    if logits.stride(-1) != 1 and logits.shape[-1] > 1:
        reasons.append(f"logits must be dense in the last dimension, got strides {logits.stride()}")
    return reasons


def device_reasons(tensor: Tensor) -> list[str]:
    if tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1":
        return []
    return [f"Triton needs a GPU tensor (or TRITON_INTERPRET=1), got one on {tensor.device}"]


def forward(
    logits: Tensor, target_ids: Tensor, temperature: float | Tensor, ignore_index: int, return_entropy: bool
) -> Stats:
    stats = [torch.empty(logits.shape[:-1], dtype=torch.float32, device=logits.device) for _ in range(5)]
    outputs = (stats[0], stats[1] if return_entropy else None, *stats[2:])
    _forward(logits, 0, target_ids, temperature, ignore_index, None, 1.0, None, None, True, True, outputs)
    return outputs


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    inplace: bool,
) -> Tensor:
    out = logits if inplace else torch.empty_like(logits)
    tile_backward(
        logits, 0, target_ids, temperature, ignore_index, None, 1.0, None, grad_logprobs, grad_entropy, grad_lse, entropy,
        row_max, log_sum, out,
    )  # fmt: skip
    return out


def tile_forward(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    state: Tensor,
    first: bool,
    last: bool,
    outputs: Stats,
) -> None:
    """Continue the rows' softmax with ``tile`` [R, Vt] in ``state`` [4, R]; write ``outputs`` with the last tile."""
    _forward(
        tile, vocab_start, target_ids, temperature, ignore_index, bias, logit_scale, softcap, state, first, last, outputs
    )


def tile_backward(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    out: Tensor,
) -> None:
    """Write the gradient of ``tile`` into ``out``, which may be the tile itself."""
    layout = _rows(tile, out)
    if layout is None:
        for i in range(tile.shape[0]):
            rows = (_at(x, i) for x in (grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum, out))
            tile_backward(
                tile[i], vocab_start, target_ids[i], _at(temperature, i), ignore_index, bias, logit_scale, softcap, *rows
            )
        return
    rows, inner, (strides, out_strides) = layout
    vocab = tile.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.dtype)
    spans = triton.cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile):
            _backward_kernel[(rows * spans,)](
                tile, inner, *strides, vocab, vocab_start, target_ids.contiguous(), ignore_index,
                *per_row(temperature), bias, _unless_one(logit_scale), softcap,
                grad_logprobs, grad_entropy, grad_lse, None if grad_entropy is None else entropy, row_max, log_sum,
                out, *out_strides, spans, SPAN=span, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def tile_exp(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    row_max: Tensor,
    out: Tensor,
) -> None:
    """Write ``exp((y - row_max) / T) * dy/dx / T`` into ``out``, 0 at the target and on ignored rows."""
    rows, inner, (strides, out_strides) = _rows(tile, out)  # type: ignore[misc]
    vocab = tile.shape[-1]
    block, span, warps = _elementwise_plan(vocab, tile.dtype)
    spans = triton.cdiv(vocab, span)
    if rows:
        with torch.cuda.device_of(tile):
            _exp_kernel[(rows * spans,)](
                tile, inner, *strides, vocab, vocab_start, target_ids.contiguous(), ignore_index,
                *per_row(temperature), bias, _unless_one(logit_scale), softcap, row_max,
                out, *out_strides, spans, SPAN=span, BLOCK=block, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def _forward(
    tile: Tensor,
    vocab_start: int,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    bias: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    state: Tensor | None,
    first: bool,
    last: bool,
    outputs: Stats,
) -> None:
    layout = _rows(tile)
    if layout is None:
        for i in range(tile.shape[0]):
            _forward(
                tile[i], vocab_start, target_ids[i], _at(temperature, i), ignore_index, bias, logit_scale, softcap, state,
                first, last, tuple(_at(x, i) for x in outputs),
            )  # fmt: skip
        return
    rows, inner, (strides,) = layout
    vocab = tile.shape[-1]
    lanes, vec, warps = _row_plan(vocab, tile.dtype)
    scattered = any(x % 16 for x in (vocab, *strides, tile.data_ptr()))
    whole = first and last
    if rows:
        with torch.cuda.device_of(tile):
            _forward_kernel[(rows,)](
                tile, inner, *strides, vocab, vocab_start, target_ids.contiguous(), ignore_index,
                *per_row(temperature), bias, _unless_one(logit_scale), softcap,
                None if whole or state is None else state, 0 if state is None else state.stride(0), *outputs,
                FIRST=first, LAST=last, SCATTERED=scattered, LANES=lanes, VEC=vec, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip


def _rows(*tensors: Tensor) -> tuple[int, int, list[tuple[int, int]]] | None:
    """``(rows, inner, [(outer_stride, inner_stride), ...])`` where row r of each tensor starts at
    ``r // inner * outer_stride + r % inner * inner_stride``; None where two strides do not suffice (more than two leading
    dimensions, none of which continues the next), and the first dimension is then a loop of launches."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in range(tensors[0].dim() - 1):
        size, strides = tensors[0].shape[dim], tuple(t.stride(dim) for t in tensors)
        if size == 0:
            return 0, 1, [(0, 0)] * len(tensors)
        if size == 1:
            continue
        if merged and all(outer == size * inner for outer, inner in zip(merged[-1][1], strides, strict=True)):
            size *= merged.pop()[0]
        merged.append((size, strides))
    if len(merged) > 2:
        return None
    no_dim = (1, (0,) * len(tensors))
    (outer, outer_strides), (inner, inner_strides) = [no_dim] * (2 - len(merged)) + merged
    return outer * inner, inner, list(zip(outer_strides, inner_strides, strict=True))


def _row_plan(vocab: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(lanes, vec, warps)`` of the forward kernel: a lane takes one 16-byte load a block.

    Two loads a thread and the next block's two already under way: 64 bytes, 64 KiB on a multiprocessor with 1024 threads,
    where an H100 needs about 25 KiB in flight.  The bits follow from lanes and vec; warps are free to differ.
    """
    vec = 16 // dtype.itemsize
    lanes = max(32, min(512, triton.next_power_of_2(triton.cdiv(vocab, vec))))
    return lanes, vec, max(1, lanes // (64 if torch.version.hip is None else 128))


def _elementwise_plan(vocab: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """``(block, span, warps)``: a program takes ``span`` entries of a row, ``block`` at a time, two loads a thread."""
    lanes, vec, warps = _row_plan(vocab, dtype)
    block = lanes * vec
    return block, min(4, triton.cdiv(vocab, block)) * block, warps


def per_row(temperature: float | Tensor) -> tuple[Tensor | None, float]:
    return (temperature, 1.0) if isinstance(temperature, Tensor) else (None, temperature)


def _at(x: object, i: int) -> object:
    return x[i] if isinstance(x, Tensor) else x


def _unless_one(logit_scale: float) -> float | None:
    return None if logit_scale == 1.0 else logit_scale


@triton.jit
def load_temperature(temperatures, temperature, row):
    if temperatures is not None:
        t = tl.load(temperatures + row).to(tl.float64)
    else:
        t = tl.full((), temperature, tl.float64)
    return t


@triton.jit
def bounded(u, softcap):
    """``softcap * tanh(u / softcap)`` and its derivative.

    Both come from ``e = exp(-2 |x|)`` because ``1 - tanh**2`` loses all digits where tanh saturates; a polynomial (fitted to
    ``tanh(x) / x``, 1 ulp) takes over where ``1 - e`` would cancel.
    """
    x = u / softcap
    size = tl.abs(x)
    e = tl.exp2(size * (-2 * LOG2E))
    q = 1.0 / (1.0 + e)
    large = 1.0 - 2.0 * (e * q)
    z = x * x
    p = tl.fma(z, -0.006615754700186362, 0.021312744501013465)
    p = tl.fma(p, z, -0.05391006651435136)
    p = tl.fma(p, z, 0.13333117616689902)
    p = tl.fma(p, z, -0.333333320452083)
    small = tl.fma(x * z, p, x)
    y = tl.where(size < 0.55, small, tl.where(x < 0, -large, large))
    return softcap * y, 4.0 * (e * q) * q


@triton.jit
def load_block(x_ptr, start, V, SCATTERED: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr):
    """``x[start:]`` as [LANES, VEC], -inf beyond V.

    Rows that are not 16 bytes apart cannot be loaded 16 bytes at a time.  Triton would then spread a lane over threads,
    which multiplies the registers by six; it keeps a lane in one thread if it does not see that its entries adjoin.
    """
    lanes, vec = tl.arange(0, LANES) * VEC, tl.arange(0, VEC)
    if SCATTERED:
        columns = start + tl.max_contiguous(vec[:, None] + lanes[None, :], (1, 1))
        x = tl.trans(tl.load(x_ptr + columns, mask=columns < V, other=float("-inf"), eviction_policy="evict_first"))
    else:
        columns = start + lanes[:, None] + vec[None, :]
        x = tl.load(x_ptr + columns, mask=columns < V, other=float("-inf"), eviction_policy="evict_first")
    return x


@triton.jit
def transform(x, bias, offsets, mask, logit_scale, softcap):
    """``y`` and, where there is a softcap, ``dy/du`` (else y itself, unused)."""
    y = x.to(tl.float32)
    if bias is not None:
        y += tl.load(bias + offsets, mask=mask, other=0.0)
    if logit_scale is not None:
        y *= logit_scale
    slope = y
    if softcap is not None:
        y, slope = bounded(y, softcap)
    return y, slope


@triton.jit
def shift_from(old, new, c):
    """log2 of the factor of a sum whose maximum grows from ``old`` to ``new``; 0 for the empty sum (``old`` is -inf)."""
    return tl.where(old == float("-inf"), 0.0, (old - new) * c)


@triton.jit
def finite_or_zero(m):
    """-inf, the maximum of nothing, replaced by 0: ``-inf - -inf`` is NaN."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def halve(x, LANES: tl.constexpr, VEC: tl.constexpr):
    return tl.split(tl.reshape(x, (LANES, VEC // 2, 2)))


@triton.jit
def sum_vec(x, LANES: tl.constexpr, VEC: tl.constexpr):
    """The sum of each lane's VEC (1, 2 or 4) entries, always in the same order."""
    if VEC >= 4:
        even, odd = halve(x, LANES, 4)
        x = even + odd
    if VEC >= 2:
        left, right = halve(x, LANES, 2)
        x = left + right
    return tl.reshape(x, (LANES,))


@triton.jit
def sum_lanes(x):
    return tl.sum((x * FIXED_POINT).to(tl.int64)).to(tl.float64) * (1.0 / FIXED_POINT)


@triton.jit
def merge(m0, s0, w0, m, s, w, c):
    """The statistics of two parts of a row together; scalars or vectors of rows, s and w in fp64."""
    top = tl.maximum(m0, m)
    safe = finite_or_zero(top)
    shift0, shift = shift_from(m0, safe, c), shift_from(m, safe, c)
    a0, a = tl.exp2(shift0).to(tl.float64), tl.exp2(shift).to(tl.float64)
    weighted = (w0 + s0 * shift0) * a0 + (w + s * shift) * a
    return top, s0 * a0 + s * a, weighted


@triton.jit
def finish(m, s, w, y_target, t):
    """``(logprob, entropy, lse, log_sum)`` in fp64; ``w`` is in units of log 2."""
    log_sum = tl.log(s)
    inv_t = 1.0 / t
    logprob = (y_target.to(tl.float64) - m.to(tl.float64)) * inv_t - log_sum
    lse = m.to(tl.float64) * inv_t + log_sum
    # a target outside the vocabulary makes the gradient row NaN through log_sum
    kept_log_sum = tl.where(y_target != y_target, float("nan"), log_sum)
    return logprob, log_sum - w * LN2 / s, lse, kept_log_sum


@triton.jit(do_not_specialize=["inner", "vocab_start", "ignore_index", "state_stride"])
def _forward_kernel(
    tile, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V, vocab_start: tl.int64,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64, bias, logit_scale, softcap,
    state, state_stride: tl.int64, logprobs, entropy, lse, row_max, log_sum,
    FIRST: tl.constexpr, LAST: tl.constexpr, SCATTERED: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ids + row)
    if target == ignore_index:  # nothing of the row is read
        if LAST:
            tl.store(logprobs + row, 0.0)
            tl.store(lse + row, 0.0)
            tl.store(row_max + row, 0.0)
            tl.store(log_sum + row, 0.0)
            if entropy is not None:
                tl.store(entropy + row, 0.0)
        if state is not None:  # finite, for those who compute on with the state of all rows
            for k in tl.static_range(4):
                tl.store(state + k * state_stride + row, 0.0)
        return
    t = load_temperature(temperatures, temperature, row)
    c = (1.0 / t * LOG2E).to(tl.float32)
    x_ptr = tile + (row // inner) * outer_stride + (row % inner) * inner_stride

    index = target - vocab_start
    here = (index >= 0) & (index < V)
    y_target = transform(tl.load(x_ptr + index, mask=here, other=0.0), bias, index, here, logit_scale, softcap)[0]
    if FIRST:
        y_target = tl.where(here, y_target, float("nan"))
    else:
        y_target = tl.where(here, y_target, tl.load(state + 3 * state_stride + row))

    # a maximum and sums per lane, not per entry: VEC entries then share one rescaling and its exp2
    BLOCK: tl.constexpr = LANES * VEC
    offsets = tl.arange(0, LANES)[:, None] * VEC + tl.arange(0, VEC)[None, :]
    lane_max = tl.full((LANES,), float("-inf"), tl.float32)
    s = tl.zeros((LANES,), tl.float32)
    w = tl.zeros((LANES,), tl.float32)
    x = load_block(x_ptr, 0, V, SCATTERED, LANES, VEC)
    for start in range(0, V, BLOCK):
        columns = start + offsets
        x_next = load_block(x_ptr, start + BLOCK, V, SCATTERED, LANES, VEC)  # under way while x is computed
        y = transform(x, bias, columns, columns < V, logit_scale, softcap)[0]
        if logit_scale is not None or softcap is not None:  # these do not keep the -inf beyond the end
            y = tl.where(columns < V, y, float("-inf"))
        top = tl.maximum(lane_max, tl.max(y, axis=1))
        safe = finite_or_zero(top)
        shift = shift_from(lane_max, safe, c)
        a = tl.exp2(shift)
        d = (y - safe[:, None]) * c
        e = tl.exp2(d)
        e0, e1 = halve(e, LANES, VEC)
        if entropy is not None:
            d0, d1 = halve(tl.maximum(d, -150.0), LANES, VEC)  # 2**-150 is 0 in fp32, and 0 * -inf would be NaN
            weighted = sum_vec(tl.fma(e1, d1, e0 * d0), LANES, VEC // 2)
            w = tl.fma(tl.fma(s, shift, w), a, weighted)
        s = tl.fma(s, a, sum_vec(e0 + e1, LANES, VEC // 2))
        lane_max = top
        x = x_next

    m = tl.max(lane_max, axis=0)
    shift = shift_from(lane_max, finite_or_zero(m), c)
    a = tl.exp2(shift)
    not_a_number = tl.max((s != s).to(tl.int32)) > 0  # an integer cannot carry it
    total = tl.where(not_a_number, float("nan"), sum_lanes(s * a))
    row_w = tl.full((), 0.0, tl.float64)
    if entropy is not None:
        row_w = sum_lanes(tl.fma(s, shift, w) * a)
    if not FIRST:
        m0 = tl.load(state + row)
        s0 = tl.load(state + state_stride + row).to(tl.float64)
        w0 = tl.load(state + 2 * state_stride + row).to(tl.float64)
        m, total, row_w = merge(m0, s0, w0, m, total, row_w, c)
    if state is not None:
        tl.store(state + row, m)
        tl.store(state + state_stride + row, total.to(tl.float32))
        tl.store(state + 2 * state_stride + row, row_w.to(tl.float32))
        tl.store(state + 3 * state_stride + row, y_target)
    if LAST:
        row_logprob, row_entropy, row_lse, row_log_sum = finish(m, total, row_w, y_target, t)
        tl.store(logprobs + row, row_logprob.to(tl.float32))
        tl.store(lse + row, row_lse.to(tl.float32))
        tl.store(row_max + row, m)
        tl.store(log_sum + row, row_log_sum.to(tl.float32))
        if entropy is not None:
            tl.store(entropy + row, row_entropy.to(tl.float32))


@triton.jit(do_not_specialize=["inner", "vocab_start", "ignore_index", "spans"])
def _backward_kernel(
    tile, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V, vocab_start: tl.int64,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64, bias, logit_scale, softcap,
    grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum,
    out, out_outer_stride: tl.int64, out_inner_stride: tl.int64, spans: tl.int64,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // spans
    begin = ((tl.program_id(0) % spans) * SPAN).to(tl.int32)
    end = tl.minimum(begin + SPAN, V)
    out_ptr = out + (row // inner) * out_outer_stride + (row % inner) * out_inner_stride
    target = tl.load(target_ids + row)
    offsets = tl.arange(0, BLOCK)
    if target == ignore_index:
        for start in range(begin, end, BLOCK):
            columns = start + offsets
            tl.store(out_ptr + columns, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < end)
        return
    x_ptr = tile + (row // inner) * outer_stride + (row % inner) * inner_stride
    t = load_temperature(temperatures, temperature, row)
    m = tl.load(row_max + row)
    log_s = tl.load(log_sum + row).to(tl.float64)
    c = (1.0 / t * LOG2E).to(tl.float32)
    base = (log_s * -LOG2E).to(tl.float32)
    factor = 1.0 / t
    if logit_scale is not None:
        factor *= logit_scale
    g_logprob = tl.full((), 0.0, tl.float64)
    g_lse = tl.full((), 0.0, tl.float64)
    if grad_logprobs is not None:
        g_logprob = tl.load(grad_logprobs + row).to(tl.float64)
    if grad_lse is not None:
        g_lse = tl.load(grad_lse + row).to(tl.float64)
    pull = ((g_lse - g_logprob) * factor).to(tl.float32)  # of every entry, times p
    if grad_entropy is not None:
        h = tl.load(entropy + row)
        g_entropy = tl.load(grad_entropy + row).to(tl.float64)
        spread = (g_entropy * factor).to(tl.float32)

    index = target - vocab_start
    here = (index >= begin) & (index < end)
    if grad_logprobs is not None:
        # 1 - p_t from log p_t in fp64: the difference of fp32 numbers loses all digits as p_t -> 1
        x_target = tl.load(x_ptr + index, mask=here, other=0.0)
        y_target = transform(x_target, bias, index, here, logit_scale, softcap)[0]
        logp = (y_target.to(tl.float64) - m.to(tl.float64)) / t - log_s
        p_target = tl.exp(logp)
        rest = tl.where(logp > -1e-4, -logp * (1.0 + 0.5 * logp), 1.0 - p_target)
        at_target = g_logprob * rest + g_lse * p_target
        if grad_entropy is not None:
            at_target -= g_entropy * tl.where(p_target == 0.0, 0.0, p_target * (logp + h))
        at_target = (at_target * factor).to(tl.float32)
        tl.debug_barrier()  # out may be the tile: every warp has read the target before one of them overwrites it

    for start in range(begin, end, BLOCK):
        columns = start + offsets
        mask = columns < end
        x = tl.load(x_ptr + columns, mask=mask, other=0.0, eviction_policy="evict_first")
        y, slope = transform(x, bias, columns, mask, logit_scale, softcap)
        log2_p = tl.fma(y - m, c, base)
        p = tl.exp2(log2_p)
        if grad_entropy is not None:
            g = tl.where(p == 0.0, 0.0, p * (pull - spread * (log2_p * LN2 + h)))  # not 0 * -inf
        else:
            g = p * pull
        if grad_logprobs is not None:
            g = tl.where(here & (columns == index), at_target, g)
        if softcap is not None:
            g *= slope
        tl.store(out_ptr + columns, g.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["inner", "vocab_start", "ignore_index", "spans"])
def _exp_kernel(
    tile, inner: tl.int64, outer_stride: tl.int64, inner_stride: tl.int64, V, vocab_start: tl.int64,
    target_ids, ignore_index: tl.int64, temperatures, temperature: tl.float64, bias, logit_scale, softcap, row_max,
    out, out_outer_stride: tl.int64, out_inner_stride: tl.int64, spans: tl.int64,
    SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) // spans
    begin = ((tl.program_id(0) % spans) * SPAN).to(tl.int32)
    end = tl.minimum(begin + SPAN, V)
    x_ptr = tile + (row // inner) * outer_stride + (row % inner) * inner_stride
    out_ptr = out + (row // inner) * out_outer_stride + (row % inner) * out_inner_stride
    target = tl.load(target_ids + row)
    offsets = tl.arange(0, BLOCK)
    if target == ignore_index:
        for start in range(begin, end, BLOCK):
            columns = start + offsets
            tl.store(out_ptr + columns, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < end)
        return
    t = load_temperature(temperatures, temperature, row)
    m = tl.load(row_max + row)
    c = (1.0 / t * LOG2E).to(tl.float32)
    factor = 1.0 / t
    if logit_scale is not None:
        factor *= logit_scale
    factor = factor.to(tl.float32)
    index = target - vocab_start
    for start in range(begin, end, BLOCK):
        columns = start + offsets
        mask = columns < end
        x = tl.load(x_ptr + columns, mask=mask, other=0.0, eviction_policy="evict_first")
        y, slope = transform(x, bias, columns, mask, logit_scale, softcap)
        g = tl.exp2((y - m) * c) * factor
        if softcap is not None:
            g *= slope
        g = tl.where(columns == index, 0.0, g)
        tl.store(out_ptr + columns, g.to(out.dtype.element_ty), mask=mask)


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors whose kernels the tests compile, without launching them, for every GPU architecture."""

    def rows(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        return torch.empty(2, vocab, dtype=dtype), torch.zeros(2, dtype=torch.int64), torch.ones(2)

    def head_tile(vocab: int, dtype: torch.dtype, head: bool) -> tuple[Tensor, tuple[object, ...]]:
        tile, ids, t = rows(vocab, dtype)
        return tile, (4096, ids, t, -100, torch.ones(vocab), 0.5, 30.0) if head else (4096, ids, 1.0, -100, None, 1.0, None)

    def run_forward(vocab: int, dtype: torch.dtype, entropy: bool, per_row: bool) -> None:
        tile, ids, t = rows(vocab, dtype)
        forward(tile, ids, t if per_row else 0.7, -100, entropy)

    def run_backward(vocab: int, dtype: torch.dtype, grads: str, per_row: bool) -> None:
        tile, ids, t = rows(vocab, dtype)
        upstream = [t if name in grads else None for name in ("logprobs", "entropy", "lse")]
        backward(*upstream, tile, ids, t if per_row else 0.7, -100, t, t, t, True)

    def run_tile_forward(dtype: torch.dtype, head: bool, first: bool, last: bool) -> None:
        tile, options = head_tile(8192, dtype, head)
        tile_forward(tile, *options, torch.ones(4, 2), first, last, (torch.ones(2),) * 5)

    def run_tile_backward(dtype: torch.dtype, out_dtype: torch.dtype, head: bool) -> None:
        tile, options = head_tile(8192, dtype, head)
        tile_backward(tile, *options, *(torch.ones(2),) * 6, torch.empty_like(tile, dtype=out_dtype))

    def run_tile_exp(out_dtype: torch.dtype, head: bool) -> None:
        tile, options = head_tile(8192, torch.float32, head)
        tile_exp(tile, *options, torch.ones(2), torch.empty_like(tile, dtype=out_dtype))

    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    everything = "logprobs entropy lse"
    return {
        "forward bf16 entropy": lambda: run_forward(151936, bf16, True, False),
        "forward bf16": lambda: run_forward(151936, bf16, False, False),
        "forward fp16 entropy": lambda: run_forward(151936, fp16, True, False),
        "forward fp32 entropy": lambda: run_forward(151936, fp32, True, False),
        "forward bf16 entropy odd V": lambda: run_forward(50257, bf16, True, True),
        "forward bf16 entropy small V": lambda: run_forward(100, bf16, True, False),
        "forward bf16 V = 1": lambda: run_forward(1, bf16, False, False),
        "backward bf16": lambda: run_backward(151936, bf16, "logprobs", False),
        "backward bf16 all": lambda: run_backward(151936, bf16, everything, False),
        "backward fp16 all": lambda: run_backward(151936, fp16, everything, False),
        "backward fp32 all": lambda: run_backward(151936, fp32, everything, False),
        "backward bf16 all odd V": lambda: run_backward(50257, bf16, everything, True),
        "tile forward fp32 first": lambda: run_tile_forward(fp32, False, True, False),
        "tile forward fp32 middle": lambda: run_tile_forward(fp32, False, False, False),
        "tile forward fp32 head last": lambda: run_tile_forward(fp32, True, False, True),
        "tile forward bf16 head last": lambda: run_tile_forward(bf16, True, False, True),
        "tile backward fp32 to bf16": lambda: run_tile_backward(fp32, bf16, False),
        "tile backward fp32 to bf16 head": lambda: run_tile_backward(fp32, bf16, True),
        "tile backward fp32 head": lambda: run_tile_backward(fp32, fp32, True),
        "tile exp fp32 to bf16": lambda: run_tile_exp(bf16, False),
        "tile exp fp32 to bf16 head": lambda: run_tile_exp(bf16, True),
    }
