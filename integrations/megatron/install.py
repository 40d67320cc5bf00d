"""Put rlkernel under Megatron-Core: what is replaced by what, and how it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

from rlkernel.integrations._parts import called
from rlkernel.integrations.megatron.contract import require_version
from rlkernel.integrations.megatron.megatron_patch import MegatronPatch
from rlkernel.types import MegatronPart

PARTS: tuple[MegatronPart, ...] = ("cross_entropy", "fused_head")


def patch(parts: Iterable[MegatronPart] | None = None, *, strict: bool = True) -> MegatronPatch:
    """Put rlkernel under Megatron-Core in this process until ``undo()``, or until the end of the ``with``
    block.

    Each rank calls it, before its training begins; models that exist already are patched, too.  A second call
    while the patch is on returns the same object.  What is left to Megatron after all is counted, warned of
    once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"cross_entropy"`` and ``"fused_head"``; None: both.
        strict: a version of Megatron-Core that has not been run, or a function that is not what that version
            has, is an error.  Otherwise each such function is left to Megatron, with the reason in
            ``refused`` and in the log.

    Raises:
        ValueError: an argument is off.
        ImportError: Megatron-Core is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, Megatron-Core is not what was run.
            Nothing is replaced then.
    """
    wanted = called(PARTS, parts, strict)
    if (active := MegatronPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    require_version(strict)
    result = MegatronPatch(*wanted)
    for part in wanted.parts:  # each has a module of its name, with its plan
        with result.planning(part):
            importlib.import_module(f"rlkernel.integrations.megatron.{part}").plan(result)
    return result.apply()


def init(args: Any = None) -> None:
    """What slime's ``--custom-megatron-init-path`` names: its actors call it when Megatron is initialised.

    slime gives its models no labels, and its Megatron, a commit between versions, has another
    ``GPTModel._postprocess``: of the parts, ``"cross_entropy"`` alone applies there.
    """
    active = MegatronPatch.in_place()
    if active is None or "cross_entropy" not in active.parts:
        patch(["cross_entropy"], strict=False)
