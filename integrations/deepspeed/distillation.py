"""DeepSpeed's generalised JSD by ``divergence``, or by its own formula a few rows at a time: without its
tensors of ``[B, L, V]``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._replacing import NARROW, finite, unsuitable
from rlkernel.integrations.deepspeed.contract import JSD
from rlkernel.ops.divergence import divergence
from rlkernel.runtime import workspace
from rlkernel.runtime.modes import once_differentiable

TENSORS = 12  # of the size of the logits that the formula and its gradient hold at most


def chunked_jsd(original: Callable[..., Any], patch: CountedPatch) -> Callable[..., Any]:
    """``original`` with the memory of a few rows; rows that the mask leaves out are not computed."""

    def generalized_jsd_loss(
        student_logits: Tensor,
        teacher_logits: Tensor,
        response_mask: Tensor,
        beta: float = 0.5,
        temperature: float = 1.0,
        teacher_top_k: int | None = None,
        pointwise_clip: float | None = None,
    ) -> Any:
        options = {
            "beta": beta, "temperature": temperature, "teacher_top_k": teacher_top_k,
            "pointwise_clip": pointwise_clip,
        }  # fmt: skip
        shape = student_logits.shape
        if len(shape) != 3 or shape != teacher_logits.shape or response_mask.shape != shape[:2]:
            return original(student_logits, teacher_logits, response_mask, **options)  # which says so
        # DeepSpeed's other checks, and what it returns, of no row
        none = original(student_logits[:, :0], teacher_logits[:, :0], response_mask[:, :0], **options)
        weights = response_mask.to(none.loss_sum.dtype)
        patch.count(patch.calls, JSD)
        if _is_plain(student_logits, teacher_logits, beta, temperature, (teacher_top_k, pointwise_clip)):
            of_rows = divergence(
                student_logits, teacher_logits, beta=beta, temperature=temperature, mask=response_mask != 0
            ).divergence
            loss_sum = (of_rows * response_mask).sum().to(weights.dtype)
        else:
            formula = functools.partial(_rows_sum, original, options)
            loss_sum = _ByRows.apply(student_logits, teacher_logits, weights, formula)
        count = response_mask.to(none.loss_sum.dtype).sum().to(torch.long)
        return type(none)(loss=loss_sum / count.clamp_min(1), loss_sum=loss_sum, valid_token_count=count)

    generalized_jsd_loss.__module__, generalized_jsd_loss.__qualname__ = "rlkernel", JSD
    return generalized_jsd_loss


def _is_plain(student: Tensor, teacher: Tensor, beta: Any, temperature: Any, cut: tuple[Any, Any]) -> bool:
    """Whether whole rows count, of a student alone that learns, in dtypes that ``divergence`` takes.

    Of fp64 DeepSpeed's formula is as exact."""
    if cut != (None, None) or teacher.requires_grad or not (finite(beta) and finite(temperature)):
        return False
    return not unsuitable(NARROW, student_logits=student, teacher_logits=teacher) and student.shape[-1] > 0


def _rows_sum(
    original: Callable[..., Any], options: dict[str, Any], student: Tensor, teacher: Tensor, weights: Tensor
) -> Tensor:
    """The sum over rows [n, V] with weights [n]."""
    return original(student[None], teacher[None], weights[None], **options).loss_sum


class _ByRows(torch.autograd.Function):
    """``formula(student, teacher, weights)``, a sum over rows, some rows at a time in both directions."""

    @staticmethod
    def forward(ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor, formula: Any) -> Tensor:
        ctx.save_for_backward(student, teacher, weights)
        ctx.formula = formula
        device = student.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        total = torch.zeros(
            (), dtype=torch.promote_types(weights.dtype, torch.float32), device=weights.device
        )
        for rows in _chunks(student, weights):
            total += formula(student[rows], teacher[rows], weights[rows])
        return total.to(weights.dtype)

    @staticmethod
    @once_differentiable("generalized_jsd_loss")
    def backward(ctx: Any, saved: tuple[Tensor, ...], grad: Tensor) -> Any:
        *sources, weights = saved
        needs = ctx.needs_input_grad[:2]
        grads = [torch.zeros_like(x) if need else None for x, need in zip(sources, needs, strict=True)]
        for rows in _chunks(sources[0], weights):
            parts = [x[rows].detach().requires_grad_(n) for x, n in zip(sources, needs, strict=True)]
            with (
                torch.enable_grad(),
                torch.autocast(**ctx.autocast),
            ):  # GPUs' decides what softmax computes in
                loss = ctx.formula(*parts, weights[rows])
            found = iter(torch.autograd.grad(loss, [x for x in parts if x.requires_grad], grad))
            for whole in grads:
                if whole is not None:
                    whole[rows] = next(found)
        return *grads, None, None


def _chunks(logits: Tensor, weights: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Indices (batch, position) of rows whose weight is not 0, as many as the workspace's limit has room
    for."""
    batch, position = weights.nonzero(as_tuple=True)
    step = max(workspace.limit(logits.device) // (TENSORS * 4 * max(logits.shape[-1], 1)), 1)
    for a in range(0, len(batch), step):
        yield batch[a : a + step], position[a : a + step]
