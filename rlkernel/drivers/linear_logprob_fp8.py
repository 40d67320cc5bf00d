"""FP8 heads in the tiles of ``linear_logprob``: the weight becomes an operand one slice at a time.

Where ``hidden`` stays wide, a slice is multiplied with its scales and rounded to the product's dtype: the
driver then goes on as with any head.  Where ``hidden`` is rounded to FP8 too, a backend that multiplies FP8
hands over ``multiply``; without one the operands are the fp32 numbers that FP8 and the scales stand for.

Bytes beside those of a wide head: ``hidden`` as FP8, N H, and its scales, 4 N for each group of a row.
"""

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head, LinearLogprobCall
from rlkernel.drivers.linear_products import Scratch, rows_of
from rlkernel.runtime.workspace import Carver

PIECE = {"cpu": 2**20}  # elements that are converted at a time, beside which stand a few fp32 copies
GPU_PIECE = 2**24


class Codes(NamedTuple):
    """FP8 numbers and what each ``group`` of columns is to be multiplied with; of all rows where [1, 1]."""

    values: Tensor  # [N, H]
    scale: Tensor  # [N, ceil(H / group)] fp32
    group: int


class Multiply(Protocol):
    """Writes ``hidden @ weight.T`` of scaled FP8 numbers to ``out``.

    ``weight`` are rows from ``first`` on of those whose blocks ``weight_scale`` has, ``block`` entries by
    columns each.
    """

    def __call__(
        self,
        hidden: Codes,
        weight: Tensor,
        weight_scale: Tensor,
        block: tuple[int, ...],
        first: int,
        out: Tensor,
    ) -> None: ...


class Fp8Scratch(Scratch):
    """The workspace of a call with an FP8 weight, and its products."""

    def __init__(
        self, call: LinearLogprobCall, multiply: Multiply | None, hidden: Tensor, weight: Tensor, head: Head,
        *args: int, **options: object,
    ) -> None:  # fmt: skip
        assert call.weight_scale is not None
        self._call, self._multiply, self._scale = call, multiply, call.weight_scale
        self._codes: Codes | None = None
        self._place = 0, 0
        super().__init__(hidden, weight, head, *args, **options)  # type: ignore[arg-type]

    def _carve_operands(self, carver: Carver, rows: int, wide: int) -> None:
        super()._carve_operands(carver, rows, wide)
        if self._multiply is None and self._call.input_scheme and self._h is None:
            self._h = carver.part(rows, self.source.shape[1], dtype=self.operand)

    def weight_slices(self) -> Iterator[tuple[int, int, Tensor]]:
        vocab = self.weight.shape[0]
        for v0 in range(0, vocab if self.n else 0, self.plan.vocab):
            v1 = min(v0 + self.plan.vocab, vocab)
            if self._multiply is not None and not self._gradients:
                yield v0, v1, rows_of(self.weight, v0, v1)
                continue
            assert self._w is not None
            out = self._w[: v1 - v0]
            for a, b in pieces(self.weight, v0, v1):
                self._dequantise(
                    rows_of(self.weight, a, b), torch.arange(a, b, device=out.device), out[a - v0 : b - v0]
                )
            yield v0, v1, out

    def rows_at(self, index: Tensor) -> Tensor:
        w = torch.empty(len(index), self.weight.shape[1], dtype=torch.float32, device=index.device)
        return self._dequantise(self.weight[index], index, w)

    def _dequantise(self, codes: Tensor, index: Tensor, out: Tensor) -> Tensor:
        """The numbers that these rows of the weight stand for, of which ``index`` tells the place."""
        rows, columns = self._call.weight_block
        scale_columns(out.copy_(codes), self._scale[index // rows], columns)
        if not self._call.input_scheme and out.dtype != self.head.compute_dtype:
            out.copy_(out.to(self.head.compute_dtype))
        return out

    def hidden(self, rows: Tensor | None, a: int, b: int) -> Tensor:
        if not self._call.input_scheme:
            return super().hidden(rows, a, b)
        if self._codes is None:
            source = self.source if rows is None else self.source[rows]
            self._codes = quantised(source, self._call)
        codes = rows_of(self._codes.values, a, b)
        if self._multiply is not None:
            return codes
        assert self._h is not None
        return scale_columns(
            self._h[: b - a].copy_(codes), _of_rows(self._codes.scale, a, b), self._codes.group
        )

    def logits(self, h: Tensor, w: Tensor, v0: int, a: int) -> Tensor:
        self._place = v0, a
        return super().logits(h, w, v0, a)

    def _product(self, tile: Tensor, h: Tensor, w: Tensor) -> Tensor:
        if not self._call.input_scheme:
            return super()._product(tile, h, w)
        if self._multiply is None:  # no dtype but fp32 holds the operands
            product = torch.mm(h, w.T, out=tile if tile.dtype == h.dtype else self.gradient(tile))
            return product if product is tile else tile.copy_(product)
        assert self._codes is not None
        (v0, a), block = self._place, self._call.weight_block
        codes = Codes(h, _of_rows(self._codes.scale, a, a + h.shape[0]), self._codes.group)
        self._multiply(codes, rows_of(self.weight, v0, v0 + w.shape[0]), self._scale, block, v0, tile)
        return tile


def _of_rows(scale: Tensor, a: int, b: int) -> Tensor:
    return scale if scale.shape[0] == 1 else scale[a:b]


def pieces(x: Tensor, begin: int, end: int) -> Iterator[tuple[int, int]]:
    step = max(1, PIECE.get(x.device.type, GPU_PIECE) // max(x.shape[1], 1))
    return ((a, min(a + step, end)) for a in range(begin, end, step))


def scale_columns(x: Tensor, scale: Tensor, group: int) -> Tensor:
    """``x`` [R, H] times ``scale`` [R or 1, ceil(H / group)] of each ``group`` of columns, in place."""
    if scale.shape[1] == 1:
        return x.mul_(scale)
    whole = x.shape[1] // group
    x[:, : whole * group].unflatten(1, (whole, group)).mul_(scale[:, :whole, None])
    if whole < scale.shape[1]:
        x[:, whole * group :].mul_(scale[:, whole:])
    return x


def scale_of_rows(
    scale: Tensor, block: tuple[int, ...], begin: int, end: int
) -> tuple[Tensor, tuple[int, ...]]:
    """The scales of some rows of a weight, and their blocks, which begin at the first of them."""
    rows = block[0]
    if begin % rows == 0:
        return scale[begin // rows : -(-end // rows)], block
    return scale[torch.arange(begin, end, device=scale.device) // rows], (1, *block[1:])


def quantised(hidden: Tensor, call: LinearLogprobCall) -> Codes:
    """``hidden`` as an engine rounds it, in fp32, of values that the product's dtype has."""
    dtype, (n, size) = call.weight.dtype, hidden.shape
    values = torch.empty(n, size, dtype=dtype, device=hidden.device)
    # not 240, with which engines found models on e4m3fnuz to lose accuracy; on the device, as 1 / 448 is not
    # what a division by 448 gives
    most = 224.0 if dtype == torch.float8_e4m3fnuz else 448.0
    largest = torch.full((), most, dtype=torch.float32, device=hidden.device)
    if call.input_scheme == "static":
        assert call.input_scale is not None
        scale, group = call.input_scale.view(1, 1), size
    else:
        group = call.input_group
        scale = torch.empty(n, -(-size // group), dtype=torch.float32, device=hidden.device)
    for a, b in pieces(hidden, 0, n):
        x = hidden[a:b].to(call.compute_dtype).to(torch.float32, copy=True)
        if call.input_scheme == "static":
            x.mul_(1 / scale)
        else:
            _divide(x, scale[a:b], group, call.input_scheme, largest)
        values[a:b] = x.clamp_(-largest, largest)
    return Codes(values, scale, group)


def _divide(x: Tensor, scale: Tensor, group: int, scheme: str, largest: Tensor) -> None:
    """``x`` by the scale of each group, which is found here."""
    whole, parts = x.shape[1] // group, []
    if whole:
        parts.append((x[:, : whole * group].unflatten(1, (whole, group)), scale[:, :whole]))
    if whole < scale.shape[1]:
        parts.append((x[:, None, whole * group :], scale[:, whole:]))
    for columns, of in parts:
        top = torch.linalg.vector_norm(columns, torch.inf, -1)
        if scheme == "token":
            of.copy_((top / largest).clamp_(min=1 / (512 * largest)))
        else:
            of.copy_(top.clamp_(min=1e-10) / largest)
        if scheme == "group_ue8m0":  # up to a power of two: a mantissa carries into the exponent
            bits = of.clamp_(min=1e-10).view(torch.int32)
            bits.add_(0x7FFFFF).bitwise_and_(-0x800000)
        columns.div_(of[..., None])
