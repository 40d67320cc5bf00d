"""The loss of TRL's ``DistillationTrainer`` by ``linear_divergence``: of hidden states and both lm_heads."""

from __future__ import annotations

import functools
import inspect
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._replacing import (
    NARROW,
    Arguments,
    finite,
    fraction,
    replacement,
    unfit_temperature,
    unsuitable,
)
from rlkernel.integrations.trl.contract import DIVERGENCE
from rlkernel.integrations.trl.lm_heads import gathered_again, in_hidden_dtype, named_dtypes
from rlkernel.ops.linear_divergence import linear_divergence

MODELS = ("student", "teacher")


class DivergenceHead:
    """Stands in for TRL's ``ChunkedDivergenceFunction``, of which only ``apply`` is used."""

    def __init__(self, original: Any, patch: CountedPatch, utils: ModuleType) -> None:
        def apply(*args: Any) -> Any:
            return original.apply(*args)

        apply.__qualname__ = DIVERGENCE
        without_ctx = inspect.signature(functools.partial(original.forward, None))
        apply.__signature__ = without_ctx  # type: ignore[attr-defined]  # inspect's own name for it
        run = functools.partial(_divergence, utils)
        self.apply = replacement(patch, apply, "linear_divergence", _unable, run)

    def __repr__(self) -> str:
        return "rlkernel.linear_divergence"


def _head(given: Arguments, model: str) -> tuple[Tensor, Tensor, Tensor | None]:
    return given[f"{model}_hidden"], given[f"{model}_weight"], given[f"{model}_bias"]


def _unable(given: Arguments) -> str | None:
    heads = [_head(given, model) for model in MODELS]
    for model, (hidden, weight, bias) in zip(MODELS, heads, strict=True):
        named = {f"{model}_hidden": hidden, f"{model}_weight": weight, f"{model}_bias": bias}
        if reason := unsuitable(NARROW, **{name: x for name, x in named.items() if x is not None}):
            return reason
        if reason := _unfit_model(model, given):
            return reason
    (student, weight, _), (teacher, teacher_weight, _) = heads
    if len({x.device for head in heads for x in head if x is not None}) > 1:
        return "the tensors are on several devices"
    if student.shape[0] != teacher.shape[0]:
        return "student_hidden and teacher_hidden have not the same rows"
    if _whole(weight)[0] != _whole(teacher_weight)[0]:
        return "student_weight and teacher_weight are of two vocabularies"
    if teacher.requires_grad and torch.is_grad_enabled():
        return "teacher_hidden requires a gradient"
    if len(named_dtypes((student, weight), (teacher, teacher_weight))) > 1:
        return "the hidden states are of two dtypes, and a weight is wider than its own"
    if not fraction(given["beta"]):
        return "beta is no number in [0, 1]"
    return unfit_temperature(given["temperature"])


def _unfit_model(model: str, given: Arguments) -> str | None:
    hidden, weight, bias = _head(given, model)
    width, vocab = hidden.shape[-1:], _whole(weight)[:1]
    if hidden.dim() != 2 or not width.numel() or _whole(weight) != vocab + width or not vocab.numel():
        return f"{model}_hidden and {model}_weight are not [N, H] and [V, H]"
    if bias is not None and _whole(bias) != vocab:
        return f"{model}_bias is not [V]"
    if not finite(given[f"{model}_logit_scale"]):
        return f"{model}_logit_scale is no finite number"
    cap = given[f"{model}_final_logit_softcapping"]
    if cap is not None and not (finite(cap) and cap > 0):
        return f"{model}_final_logit_softcapping is no number above 0"
    return None


def _whole(parameter: Tensor) -> torch.Size:
    """The shape of what ZeRO-3 may have split over ranks."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def _divergence(utils: ModuleType, given: Arguments) -> tuple[Tensor, Tensor | None]:
    (hidden, weight, bias), (teacher, teacher_weight, teacher_bias) = (
        _head(given, model) for model in MODELS
    )
    with (
        utils.maybe_gather_lm_head_ctx(weight, bias),
        utils.maybe_gather_lm_head_ctx(teacher_weight, teacher_bias),
        gathered_again(utils, weight, bias, teacher_weight, teacher_bias),
        in_hidden_dtype((hidden, weight), (teacher, teacher_weight)),
    ):
        out = linear_divergence(
            hidden, weight, teacher, teacher_weight, bias=bias, teacher_bias=teacher_bias,
            beta=given["beta"], temperature=given["temperature"],
            logit_scale=given["student_logit_scale"], teacher_logit_scale=given["teacher_logit_scale"],
            softcap=given["student_final_logit_softcapping"],
            teacher_softcap=given["teacher_final_logit_softcapping"], return_entropy=True,
        )  # fmt: skip
    return out.divergence, out.entropy
