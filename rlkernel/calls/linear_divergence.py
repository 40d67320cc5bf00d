"""What a backend is asked for ``linear_divergence``, and what it answers."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults
from rlkernel.calls.linear_logprob import Head, Needs


class LinearDivergenceCall(NamedTuple):
    """Checked and flat.

    ``keep``: a backward pass will want the logits again, and the workspace may hold on to them.
    ``need_direction``: it will want d divergence / d hidden, the head being frozen.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None
    teacher_hidden: Tensor  # [N, K]
    teacher_weight: Tensor  # [V, K]
    teacher_bias: Tensor | None
    mask: Tensor | None  # [N] bool, dense
    beta: float
    temperature: float
    logit_scale: float
    softcap: float | None
    compute_dtype: torch.dtype  # of the product's operands
    teacher_logit_scale: float
    teacher_softcap: float | None
    teacher_compute_dtype: torch.dtype
    return_entropy: bool
    keep: bool = False
    need_direction: bool = False
    needs: Needs = (False, False, False)

    @property
    def heads(self) -> tuple[Head, Head]:
        """Of the student and of the teacher; a divergence has one temperature, and no targets to ignore."""
        own = self.bias, 1.0, self.logit_scale, self.softcap, -1, self.wide, self.compute_dtype
        other = self.teacher_bias, 1.0, self.teacher_logit_scale, self.teacher_softcap, -1, self.wide
        return Head(*own), Head(*other, self.teacher_compute_dtype)

    @property
    def wide(self) -> torch.dtype:
        """The dtype of the logits and of what is told of them."""
        return torch.promote_types(self.compute_dtype, torch.float32)

    def of_logits(self, logits: Tensor, teacher_logits: Tensor, mask: Tensor | None) -> DivergenceCall:
        return DivergenceCall(logits, teacher_logits, mask, self.beta, self.temperature, self.return_entropy)


class LinearDivergenceResults(NamedTuple):
    """What ``divergence`` says of the rows, [N] each, and ``direction`` [N, H] in hidden's dtype."""

    divergence: Tensor
    entropy: Tensor | None
    row_max: Tensor
    sum_exp: Tensor
    teacher_max: Tensor
    teacher_sum_exp: Tensor
    student_part: Tensor | None
    direction: Tensor | None = None

    @property
    def of_rows(self) -> DivergenceResults:
        return DivergenceResults(*self[:-1])

    @classmethod
    def empty(cls, call: LinearDivergenceCall) -> "LinearDivergenceResults":
        """Dense memory for what ``call`` asks for."""
        rows = DivergenceResults.of_rows(call.hidden, call.hidden.shape[:1], call.wide, call)
        return cls(*rows, torch.empty_like(call.hidden) if call.need_direction else None)
