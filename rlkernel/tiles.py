"""``linear_logprob`` in tiles: a library GEMM into the workspace, then one fused kernel over it.

Shared by the backends that have the tile kernels (``tile_forward``, ``tile_backward``, ``tile_exp``: see
``rlkernel.native.logprob``).  Loops run over the vocabulary outside and over the tokens inside, so that a
slice of the weight is converted once and its gradient accumulates in fp32 without a second buffer of the
weight's size.

FLOPs: 2 N H V a GEMM; forward 1 GEMM, backward 3 (logits again, hidden, weight), with a frozen head 2 in all.
Bytes beside the GEMMs: each tile is read once by the forward kernel, read and written once by the backward
kernel.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel import workspace
from rlkernel.workspace import Carver


class Tile(NamedTuple):
    """How many tokens and vocabulary entries a tile holds: from V, H, dtypes and the limit, never from N."""

    tokens: int
    vocab: int


# The most that helps: GEMMs run at full speed, and on a CPU a tile of logits stays in the caches.
CPU_TILE = Tile(1024, 4096)
GPU_TILE = Tile(4096, 16384)


@dataclass(frozen=True)
class Head:
    """The lm_head and what is done to its output, as every tile needs it."""

    weight: Tensor
    bias: Tensor | None  # fp32
    logit_scale: float
    softcap: float | None
    ignore_index: int
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype


def forward(
    kernels: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, target_ids: Tensor, temperature: float
    | Tensor,
    logit_scale: float, softcap: float | None, ignore_index: int, return_entropy: bool, logits_dtype:
    torch.dtype,
    compute_dtype: torch.dtype, need_direction: bool,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """The forward pass of every tiled backend; returns what the reference's ``forward`` returns."""
    head = _head(weight, bias, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)
    keep = target_ids != ignore_index
    rows = _rows(keep)
    n = hidden.shape[0] if rows is None else rows.numel()
    ids, t = _select(target_ids, rows), _select(temperature, rows)
    new = functools.partial(hidden.new_empty, dtype=torch.float32)
    outputs = (new(n), new(n) if return_entropy else None, new(n), new(n), new(n))
    state = new(4, n)
    direction = new(n, hidden.shape[1]) if need_direction else None

    plan = tile_plan(head, hidden.dtype, hidden.device)
    scratch = _Scratch(head, hidden, plan, n, rows is not None, backward=False, direction=need_direction)
    for v0, v1, w in scratch.weight_slices():
        tile_bias = None if head.bias is None else head.bias[v0:v1]
        first, last = v0 == 0, v1 == weight.shape[0]
        for a, b in scratch.chunks():
            logits = scratch.logits(scratch.hidden(rows, a, b), w)
            tt = t[a:b] if isinstance(t, Tensor) else t
            before = state[0, a:b].clone() if direction is not None else None
            kernels.tile_forward(
                logits, v0, ids[a:b], tt, ignore_index, tile_bias, logit_scale, softcap, state[:, a:b], first,
                last,
                tuple(None if x is None else x[a:b] for x in outputs),
            )  # fmt: skip
            if direction is not None:
                exps = scratch.gradient(logits)
                kernels.tile_exp(
                    logits,
                    v0,
                    ids[a:b],
                    tt,
                    ignore_index,
                    tile_bias,
                    logit_scale,
                    softcap,
                    state[0, a:b],
                    exps,
                )
                if before is not None and not first:
                    _rescale(direction[a:b], before, state[0, a:b], tt)
                scratch.accumulate(direction[a:b], exps, w, first)
    if direction is not None and n:
        _finish_direction(direction, head, ids, t, state, outputs[0], outputs[4], scratch)
    if n == 0:
        outputs = tuple(None if x is None else x.zero_() for x in outputs)  # type: ignore[assignment]
    scattered = tuple(_scatter(x, rows, hidden.shape[0]) for x in outputs)
    if direction is not None:
        direction = _scatter(direction.to(hidden.dtype), rows, hidden.shape[0])
    return *scattered, direction  # type: ignore[return-value]


def backward(
    kernels: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_lse: Tensor | None, hidden:
    Tensor,
    weight: Tensor, bias: Tensor | None, target_ids: Tensor, temperature: float | Tensor, logit_scale: float,
    softcap: float | None, ignore_index: int, logits_dtype: torch.dtype, compute_dtype: torch.dtype,
    entropy: Tensor | None, row_max: Tensor, log_sum: Tensor, direction: Tensor | None, needs: tuple[bool,
    bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """The backward pass of every tiled backend; returns what the reference's ``backward`` returns."""
    need_hidden, need_weight, need_bias = needs[0], needs[1], needs[2] and bias is not None
    grads = (grad_logprobs, grad_entropy, grad_lse)
    if direction is not None and grad_logprobs is not None and grad_entropy is None and grad_lse is None:
        row = grad_logprobs[:, None]
        return torch.where(row == 0, 0, row * direction).to(hidden.dtype), None, None

    head = _head(weight, bias, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)
    nonzero = torch.stack([g != 0 for g in grads if g is not None]).any(0)
    rows = _rows((target_ids != ignore_index) & nonzero)
    n = hidden.shape[0] if rows is None else rows.numel()
    plan = tile_plan(head, hidden.dtype, hidden.device)
    scratch = _Scratch(
        head,
        hidden,
        plan,
        n,
        rows is not None,
        backward=True,
        need_hidden=need_hidden,
        need_weight=need_weight,
    )
    wide = need_hidden and (hidden.dtype == torch.float32 or plan.vocab < weight.shape[0] or rows is not None)
    accumulator = torch.float32 if wide else hidden.dtype
    # without a gather every element is written by the first product, else rows are added where they belong
    new_hidden = hidden.new_empty if rows is None and n else hidden.new_zeros
    dhidden = new_hidden(hidden.shape, dtype=accumulator) if need_hidden else None
    dweight = (weight.new_empty if n else weight.new_zeros)(weight.shape) if need_weight else None
    dbias = weight.new_zeros(weight.shape[0], dtype=torch.float32) if need_bias else None

    ids, t, ent, m, s = (_select(x, rows) for x in (target_ids, temperature, entropy, row_max, log_sum))
    grads = tuple(_select(g, rows) for g in grads)
    for v0, v1, w in scratch.weight_slices():
        tile_bias = None if head.bias is None else head.bias[v0:v1]
        dw_slice = None if dweight is None else dweight[v0:v1]
        dw = None if dw_slice is None else scratch.weight_gradient(dw_slice)
        for a, b in scratch.chunks():
            h = scratch.hidden(rows, a, b)
            logits = scratch.logits(h, w)
            dz = scratch.gradient(logits)
            kernels.tile_backward(
                logits, v0, ids[a:b], t[a:b] if isinstance(t, Tensor) else t, ignore_index, tile_bias,
                logit_scale,
                softcap, *(None if g is None else g[a:b] for g in grads), None if ent is None else ent[a:b],
                m[a:b], s[a:b], dz,
            )  # fmt: skip
            if dhidden is not None:
                if rows is None:
                    scratch.accumulate(dhidden[a:b], dz, w, v0 == 0)
                else:
                    dhidden.index_add_(
                        0, rows[a:b], scratch.accumulate(scratch.hidden_gradient(b - a), dz, w, True)
                    )
            if dw is not None:
                scratch.accumulate(dw, dz.T, h, a == 0)
            if dbias is not None:
                dbias[v0:v1] += dz.sum(0, dtype=torch.float32)
        if dw is not None and dw_slice is not None and dw is not dw_slice:
            dw_slice.copy_(dw)
    if dhidden is not None and dhidden.dtype != hidden.dtype:
        dhidden = _narrow(dhidden, hidden.dtype)
    return dhidden, dweight, None if dbias is None else dbias.to(bias.dtype)  # type: ignore[union-attr]


def tile_plan(head: Head, hidden_dtype: torch.dtype, device: torch.device) -> Tile:
    """The tile: the same for forward and backward, or the recomputed logits would not be those of the saved
    lse.

    The widest slice of the vocabulary whose converted weight and fp32 gradient take at most half of the
    limit, and as many tokens as fit beside it.
    """
    vocab, size = head.weight.shape
    limit = workspace.limit()
    operand = _operand(head.compute_dtype, device)
    in_place = head.logits_dtype == operand
    cell = head.logits_dtype.itemsize + (0 if in_place else operand.itemsize)
    converted = 0 if head.weight.dtype == operand == head.compute_dtype else operand.itemsize
    per_entry = size * (converted + (4 if head.weight.dtype != torch.float32 else 0))
    per_token = size * (operand.itemsize + 4)
    most_tokens, most_vocab = CPU_TILE if device.type == "cpu" else GPU_TILE
    wide = min(vocab, most_vocab)
    while wide > 256 and wide * per_entry > limit // 2:
        wide = max(256, wide // 2)
    tokens = max((limit - wide * per_entry) // (cell * wide + per_token), 16)
    if tokens > 128:
        tokens -= tokens % 128
    return Tile(int(min(tokens, most_tokens)), wide)


class _Scratch:
    """The parts of the workspace and the GEMMs into them.

    ``product`` says how a GEMM of ``compute_dtype`` gives fp32: "direct" (fp32 inputs), "out_dtype" (the
    library takes low precision and writes fp32: CUDA), or "upcast" (inputs converted to fp32 a tile at a
    time).
    """

    def __init__(
        self, head: Head, hidden: Tensor, plan: Tile, n: int, gathered: bool, *, backward: bool, direction:
        bool = False,
        need_hidden: bool = False, need_weight: bool = False,
    ) -> None:  # fmt: skip
        self.head, self.source, self.plan, self.n, self.gathered = head, hidden, plan, n, gathered
        self.product = _product(head.compute_dtype, hidden.device)
        self.operand = _operand(head.compute_dtype, hidden.device)
        rounded = (
            self.operand != head.compute_dtype
        )  # values of compute_dtype in fp32: autocast of fp32 inputs
        self.convert_weight = head.weight.dtype != self.operand or rounded or head.weight.stride(-1) != 1
        self.convert_hidden = hidden.dtype != self.operand or rounded or gathered or hidden.stride(-1) != 1
        self.gradients, self.need_hidden, self.need_weight = backward or direction, need_hidden, need_weight
        tokens = min(n, plan.tokens)
        sizes = Carver()
        self._carve(sizes, tokens)
        self._carve(Carver(workspace.take(sizes.size, hidden.device)), tokens)

    def _carve(self, carver: Carver, tokens: int) -> None:
        head, size = self.head, self.source.shape[1]
        wide = min(self.plan.vocab, head.weight.shape[0])
        part = carver.part
        self._logits = part(tokens, wide, dtype=head.logits_dtype)
        in_place = head.logits_dtype == self.operand
        staged = (
            self.product != "out_dtype"
        )  # the product lands there before it is rounded to the logits' dtype
        apart = not in_place and (self.gradients or staged)
        self._dz = part(tokens, wide, dtype=self.operand) if apart else self._logits if in_place else None
        self._w = part(wide, size, dtype=self.operand) if self.convert_weight else None
        self._h = part(tokens, size, dtype=self.operand) if self.convert_hidden else None
        self._dh = part(tokens, size, dtype=torch.float32) if self.need_hidden and self.gathered else None
        # one token chunk needs no accumulator: the GEMM itself accumulates in fp32
        several = self.n > self.plan.tokens or head.weight.dtype != self.operand
        narrow = head.weight.dtype != torch.float32 and several
        self._dw = part(wide, size, dtype=torch.float32) if self.need_weight and narrow else None

    def weight_slices(self) -> Iterator[tuple[int, int, Tensor]]:
        if self.n == 0:
            return
        weight = self.head.weight
        for v0 in range(0, weight.shape[0], self.plan.vocab):
            v1 = min(v0 + self.plan.vocab, weight.shape[0])
            w = weight[v0:v1]
            yield v0, v1, w if self._w is None else self._w[: v1 - v0].copy_(w.to(self.head.compute_dtype))

    def chunks(self) -> Iterator[tuple[int, int]]:
        return ((a, min(a + self.plan.tokens, self.n)) for a in range(0, self.n, self.plan.tokens))

    def hidden(self, rows: Tensor | None, a: int, b: int) -> Tensor:
        if self._h is None:
            return self.source[a:b]
        if rows is None:
            return self._h[: b - a].copy_(self.source[a:b].to(self.head.compute_dtype))
        if self.source.dtype == self.operand == self.head.compute_dtype:
            return torch.index_select(self.source, 0, rows[a:b], out=self._h[: b - a])
        return self._h[: b - a].copy_(self.source[rows[a:b]].to(self.head.compute_dtype))

    def logits(self, h: Tensor, w: Tensor) -> Tensor:
        # narrowing a contiguous part keeps rows dense only when all columns are used: take a fresh view of
        # the memory
        tile = _dense(self._logits, h.shape[0], w.shape[0])
        if self.product == "out_dtype" and tile.dtype == torch.float32:
            return torch.ops.aten.mm.dtype_out(h, w.T, torch.float32, out=tile)
        if tile.dtype == self.operand:
            return torch.mm(h, w.T, out=tile)
        return tile.copy_(torch.mm(h, w.T, out=self.gradient(tile)))

    def gradient(self, logits: Tensor) -> Tensor:
        assert self._dz is not None
        return _dense(self._dz, *logits.shape)

    def hidden_gradient(self, tokens: int) -> Tensor:
        assert self._dh is not None
        return self._dh[:tokens]

    def weight_gradient(self, out: Tensor) -> Tensor:
        return out if self._dw is None else self._dw[: out.shape[0]]

    def accumulate(self, out: Tensor, a: Tensor, b: Tensor, first: bool) -> Tensor:
        """``out = a @ b`` or ``out += a @ b``; products of low precision are summed in fp32."""
        if self.product == "out_dtype" and out.dtype == torch.float32:
            if first:
                return torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
            return torch.ops.aten.addmm.dtype_out(out, a, b, torch.float32, out=out)
        if out.dtype != a.dtype:  # a single product whose result is narrower than its operands
            assert first
            return out.copy_(torch.mm(a, b))
        return torch.mm(a, b, out=out) if first else out.addmm_(a, b)


def _head(
    weight: Tensor, bias: Tensor | None, logit_scale: float, softcap: float | None, ignore_index: int,
    logits_dtype: torch.dtype, compute_dtype: torch.dtype,
) -> Head:  # fmt: skip
    wide_bias = None if bias is None else bias.float().contiguous()
    return Head(weight, wide_bias, logit_scale, softcap, ignore_index, logits_dtype, compute_dtype)


def _product(compute_dtype: torch.dtype, device: torch.device) -> str:
    if compute_dtype == torch.float32:
        return "direct"
    return "out_dtype" if device.type == "cuda" and torch.version.hip is None else "upcast"


def _operand(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    return torch.float32 if _product(compute_dtype, device) == "upcast" else compute_dtype


def _rows(keep: Tensor) -> Tensor | None:
    """Indices of the rows to compute, or None for all of them.

    Their number is data: reading it synchronises a GPU, which a CUDA graph under capture cannot do.  It then
    computes every row; the kernels write exact zeros where the result is zero.
    """
    if keep.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None
    rows = keep.nonzero()[:, 0]
    return None if rows.numel() == keep.numel() else rows


def _select(x: Any, rows: Tensor | None) -> Any:
    return x[rows] if isinstance(x, Tensor) and rows is not None else x


def _scatter(x: Tensor | None, rows: Tensor | None, n: int) -> Tensor | None:
    if x is None or rows is None:
        return x
    return x.new_zeros(n, *x.shape[1:]).index_copy_(0, rows, x)


def _dense(part: Tensor, rows: int, columns: int) -> Tensor:
    return part.view(-1)[: rows * columns].view(rows, columns)


def _rescale(direction: Tensor, before: Tensor, after: Tensor, t: float | Tensor) -> None:
    same = before == after  # also where both are -inf, whose difference is NaN
    direction.mul_(torch.where(same, 1, ((before - after) / t).exp())[:, None])


def _finish_direction(
    direction: Tensor, head: Head, ids: Tensor, t: float | Tensor, state: Tensor, logprobs: Tensor, log_sum:
    Tensor,
    scratch: _Scratch,
) -> None:  # fmt: skip
    """From ``sum over i != target of e_i f'_i W_i`` to ``(1 - p_t) f'_t W_t - sum of p_i f'_i W_i``, in
    place.

    The target's term stands apart because 1 - p_t, taken as a difference, loses all digits as p_t -> 1.
    """
    slope = head.logit_scale / t
    if head.softcap is not None:
        slope = slope * (1 - (state[3] / head.softcap) ** 2)
    pull = -torch.expm1(logprobs) * slope
    direction.mul_(-torch.exp(-log_sum)[:, None])
    inside = torch.where((ids >= 0) & (ids < head.weight.shape[0]), ids, 0)
    for a, b in scratch.chunks():
        w = head.weight[inside[a:b]].to(head.compute_dtype).float()
        direction[a:b].add_(w.mul_(pull[a:b, None]))


def _narrow(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """``wide.to(dtype)`` in the same memory, so that the two never stand side by side."""
    flat = wide.view(-1)
    narrow = flat.view(dtype)[: flat.numel()]
    step = 2**20
    for a in range(0, flat.numel(), step):  # ascending: what is written ends before what is still to be read
        narrow[a : a + step] = flat[a : a + step].to(dtype)
    return narrow.view(wide.shape)
