"""The tiles of ``linear_divergence``: whole rows of logits forward, slices of the vocabulary backward."""

import torch

from rlkernel.calls.linear_divergence import LinearDivergenceCall
from rlkernel.drivers.linear_tiles import GPU_WHOLE_ROWS, Shape, Tile, narrower
from rlkernel.runtime import invariance, workspace
from rlkernel.runtime.workspace import ALIGNMENT

PARTS = 8 * ALIGNMENT  # what is lost where parts of the workspace begin at multiples of it


def forward_plan(call: LinearDivergenceCall) -> Tile:
    """As many rows of both logits as the limit holds, and the slices of the vocabulary in which they are
    multiplied; the same whether a gradient is wanted or not, and so are the bits."""
    shapes, copied, limit, wide = (
        _shapes(call),
        _copied(call),
        workspace.limit(call.hidden.device),
        _wide(call),
    )
    student = shapes[0]
    fixed = wide * sum(shape.size * of for shape, of in zip(shapes, copied, strict=True))
    logits = row_pitch(student.vocab) * student.logits_dtype.itemsize
    row = sum(logits + shape.size * shape.operand.itemsize for shape in shapes)
    row += wide * (student.cell - student.logits_dtype.itemsize) + 4 * student.size  # of the direction
    return Tile(_whole(min((limit - fixed - PARTS) // row, student.most.tokens)), wide)


def row_pitch(vocab: int) -> int:
    """The elements from one row of logits to the next: each begins at an address that a GEMM's widest stores
    and a kernel's widest loads want."""
    return -(-vocab // 64) * 64


def backward_plan(call: LinearDivergenceCall, n: int) -> Tile:
    """The tiles of both logits, and of the student's gradient, where the logits are computed again.

    On a GPU all ``n`` rows at once, as long as a slice of the vocabulary is wide enough beside them: the
    weight's gradient is then one product a slice.
    """
    (student, teacher), limit, wide = _shapes(call), workspace.limit(call.hidden.device), _wide(call)
    entry = _bytes_of_an_entry(call)
    row = student.size * (student.operand.itemsize + 4) + teacher.size * teacher.operand.itemsize

    def tokens(wide: int) -> int:
        cell = student.cell + teacher.logits_dtype.itemsize
        return int((limit - wide * entry - PARTS) // (cell * wide + row))

    if student.device.type == "cpu" or invariance.is_on():
        return Tile(_whole(min(max(tokens(wide), 16), student.most.tokens)), wide)
    narrow = wide
    while tokens(narrow) < n and narrow >= 2 * GPU_WHOLE_ROWS:
        narrow = narrower(narrow)
    if tokens(narrow) >= n:
        return Tile(max(n, 1), narrow)
    return Tile(_whole(max(tokens(wide), 16)), wide)


def _wide(call: LinearDivergenceCall) -> int:
    """The entries of the vocabulary in a slice, whose weights and gradient take a fourth of the limit."""
    student, entry = _shapes(call)[0], _bytes_of_an_entry(call)
    wide = min(student.vocab, student.most.vocab)
    while wide > 256 and wide * entry > workspace.limit(call.hidden.device) // 4:
        wide = narrower(wide)
    return wide


def _bytes_of_an_entry(call: LinearDivergenceCall) -> int:
    """Of a row of both weights, where they are copied, and of the student's fp32 gradient."""
    (student, teacher), (own, other) = _shapes(call), _copied(call)
    return student.size * (own + (0 if student.dtype == torch.float32 else 4)) + teacher.size * other


def _shapes(call: LinearDivergenceCall) -> tuple[Shape, Shape]:
    own, other = call.heads
    return Shape.of(call.weight, own), Shape.of(call.teacher_weight, other)


def _copied(call: LinearDivergenceCall) -> tuple[int, int]:
    """Bytes that an element of each weight takes as an operand, where it is none as it is and lies."""
    own, other = (
        shape.converted or (0 if weight.stride(-1) == 1 else shape.operand.itemsize)
        for shape, weight in zip(_shapes(call), (call.weight, call.teacher_weight), strict=True)
    )
    return own, other


def _whole(rows: int) -> int:
    """Rows in multiples of 128; a row at least."""
    return max(rows - rows % 128 if rows > 128 else rows, 1)
