"""The loss of SWIFT's distillation (GKD) by ``divergence``: without copies of the rows that count, and
without the tensors of the logits' size that its formula leaves for backward."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._replacing import (
    NARROW,
    Arguments,
    fraction,
    misplaced,
    replacement,
    unfit_temperature,
    unsuitable,
)
from rlkernel.integrations.swift import contract
from rlkernel.integrations.swift.swift_patch import SwiftPatch
from rlkernel.ops.divergence import divergence

IGNORED = -100
WHOLE, ROWS = "gkd_loss", "jsd_loss"
# what SWIFT's Megatron trainers give others for, whose ranks share out the vocabulary
OWN = ("log_softmax_fn", "kl_div_fn")


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch, in every module that has imported it by name."""
    home = importlib.import_module(contract.HOMES["losses"])

    def unable(given: Arguments) -> str | None:
        return _own_formula(home, given) or _unable(given)

    def unable_whole(given: Arguments) -> str | None:
        return _own_formula(home, given) or _unable_whole(given)

    for name, why, run in ((ROWS, unable, _of_rows), (WHOLE, unable_whole, _whole)):
        with patch.planning(name):
            original = contract.checked(home, name)
            new = replacement(patch, original, "divergence", why, run)
            patch.replace_everywhere("swift", name, new, expected=original)


def _own_formula(home: ModuleType, given: Arguments) -> str | None:
    default = {"log_softmax_fn": home.default_log_softmax, "kl_div_fn": home.default_kl_div}
    if any(given[name] is not default[name] for name in OWN):
        return "log_softmax_fn or kl_div_fn is the caller's own"
    return None if fraction(given["beta"]) else "beta is no number in [0, 1]"


def _unable(given: Arguments) -> str | None:
    return _unfit_pair(given["s_logits"], given["t_logits"])


def _unfit_pair(student: Any, teacher: Any) -> str | None:
    if reason := unsuitable(NARROW, student_logits=student, teacher_logits=teacher):
        return reason
    if student.dim() < 2 or not student.numel() or student.shape != teacher.shape:
        return "the logits of student and teacher are not [..., V] of one shape"
    if student.device != teacher.device:
        return "the logits of student and teacher are on two devices"
    return "the teacher's logits require a gradient" if teacher.requires_grad else None


def _unable_whole(given: Arguments) -> str | None:
    """Where SWIFT's function goes on with its own rows, whose loss is then ``divergence`` still."""
    student, output, labels = given["student_logits"], given["teacher_output"], given["labels"]
    if output.is_topk_mode or output.full_logits is None:
        return "the teacher has the likeliest tokens alone"
    if reason := _unfit_pair(student, output.full_logits) or unfit_temperature(given["temperature"]):
        return reason
    if reason := misplaced(labels=labels):
        return reason
    if labels.shape != student.shape[:-1] or labels.device != student.device:
        return "labels have not the shape and the device of the rows of the logits"
    others = output.labels
    if others is not None and not (others.shape == labels.shape and _same_rows(labels, others)):
        return "student and teacher have the response at different places"
    return None


def _same_rows(labels: Tensor, others: Tensor) -> bool:
    return torch.equal(labels != IGNORED, others.to(labels.device) != IGNORED)


def _of_rows(given: Arguments) -> Tensor:
    return divergence(given["s_logits"], given["t_logits"], beta=given["beta"]).divergence.sum()


def _whole(given: Arguments) -> tuple[Tensor, Tensor]:
    logits, mask = given["student_logits"], given["labels"] != IGNORED
    options = {name: given[name] for name in ("beta", "temperature")}
    rows = divergence(logits, given["teacher_output"].full_logits, mask=mask, **options).divergence
    return rows.sum(), mask.sum()
