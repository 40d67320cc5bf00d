"""What a backend is asked for ``divergence``, and what it answers."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor


class DivergenceOutput(NamedTuple):
    """Of each row, in nats; fp32 (fp64 for fp64 logits).  0 where the mask is.

    ``divergence`` has a gradient; ``entropy`` is that of the student, without one (None unless asked for).
    """

    divergence: Tensor
    entropy: Tensor | None


class DivergenceCall(NamedTuple):
    """Checked and normalised: last dimensions are dense, and all tensors side by side."""

    logits: Tensor  # [..., V]
    teacher_logits: Tensor  # as logits, of any dtype but that both or neither are fp64
    mask: Tensor | None  # [...] bool, dense
    beta: float  # with p of the student and q of the teacher, 0: KL(q || p), 1: KL(p || q), else in between
    temperature: float
    return_entropy: bool
    inplace_backward: bool = False  # the gradient may be written over the logits


class DivergenceResults(NamedTuple):
    """[...] each.  ``p_i = exp((x_i - row_max) / T) / sum_exp``, and likewise of the teacher.

    ``student_part`` is the divergence of p, which its gradient is measured from: KL(p || q), or from the
    mixture; None where ``beta`` is 0.
    """

    divergence: Tensor
    entropy: Tensor | None
    row_max: Tensor
    sum_exp: Tensor
    teacher_max: Tensor
    teacher_sum_exp: Tensor
    student_part: Tensor | None

    @classmethod
    def empty(cls, call: DivergenceCall) -> "DivergenceResults":
        """Dense memory for what ``call`` asks for."""
        dtype = torch.promote_types(call.logits.dtype, torch.float32)
        return cls.of_rows(call.logits, call.logits.shape[:-1], dtype, call)

    @classmethod
    def of_rows(
        cls, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, asked: Any
    ) -> "DivergenceResults":
        """The same for rows of ``shape`` on the device of ``like``."""
        row = functools.partial(torch.empty, shape, dtype=dtype, device=like.device)
        entropy = row() if asked.return_entropy else None
        return cls(row(), entropy, row(), row(), row(), row(), row() if asked.beta else None)
