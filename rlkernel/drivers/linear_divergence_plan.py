"""The tiles of ``linear_divergence``: whole rows of logits forward, slices of the vocabulary backward."""

import torch

from rlkernel.calls.linear_divergence import LinearDivergenceCall
from rlkernel.drivers.linear_tiles import GPU_WHOLE_ROWS, Shape, Tile, narrower
from rlkernel.runtime import invariance, workspace
from rlkernel.runtime.workspace import ALIGNMENT

PARTS = 8 * ALIGNMENT  # what is lost where parts of the workspace begin at multiples of it


def forward_plans(call: LinearDivergenceCall) -> tuple[Tile, Tile]:
    """As many rows of both logits as the limit holds, and of each weight what is copied at a time."""
    shapes, copied, limit = _shapes(call), _copied(call), workspace.limit(call.hidden.device)
    wide = [_copied_at_a_time(shape, of, limit) for shape, of in zip(shapes, copied, strict=True)]
    fixed = sum(w * shape.size * of for w, shape, of in zip(wide, shapes, copied, strict=True))
    row = sum(
        shape.vocab * shape.logits_dtype.itemsize + shape.size * shape.operand.itemsize for shape in shapes
    )
    tokens = _whole(min((limit - fixed - PARTS) // row, shapes[0].most.tokens))
    return Tile(tokens, wide[0]), Tile(tokens, wide[1])


def backward_plan(call: LinearDivergenceCall, n: int) -> Tile:
    """The tiles of both logits, and of the student's gradient.

    On a GPU all ``n`` rows at once, as long as a slice of the vocabulary is wide enough beside them: the
    weight's gradient is then one product a slice.
    """
    shapes, limit = _shapes(call), workspace.limit(call.hidden.device)
    (student, teacher), (own, other) = shapes, _copied(call)
    entry = student.size * (own + (0 if student.dtype == torch.float32 else 4)) + teacher.size * other
    row = student.size * (student.operand.itemsize + 4) + teacher.size * teacher.operand.itemsize

    def tokens(wide: int) -> int:
        cell = student.cell + teacher.logits_dtype.itemsize
        return int((limit - wide * entry - PARTS) // (cell * wide + row))

    wide = min(student.vocab, student.most.vocab)
    while wide > 256 and wide * entry > limit // 2:
        wide = narrower(wide)
    if student.device.type == "cpu" or invariance.is_on():
        return Tile(_whole(min(max(tokens(wide), 16), student.most.tokens)), wide)
    narrow = wide
    while tokens(narrow) < n and narrow >= 2 * GPU_WHOLE_ROWS:
        narrow = narrower(narrow)
    if tokens(narrow) >= n:
        return Tile(max(n, 1), narrow)
    return Tile(_whole(max(tokens(wide), 16)), wide)


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


def _copied_at_a_time(shape: Shape, copied: int, limit: int) -> int:
    """The entries of the vocabulary in a product: all of them, where the weight is an operand as it is."""
    wide = shape.vocab
    if copied:
        wide = min(wide, shape.most.vocab)
        while wide > 256 and wide * shape.size * copied > limit // 8:
            wide = narrower(wide)
    return wide


def _whole(rows: int) -> int:
    """Rows in multiples of 128; a row at least."""
    return max(rows - rows % 128 if rows > 128 else rows, 1)
