"""Put rlkernel under LLaMA-Factory: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable
from pathlib import Path

from rlkernel.integrations.llamafactory import switch
from rlkernel.integrations.llamafactory.contract import require_version
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch
from rlkernel.types import LlamafactoryPart

logger = logging.getLogger("rlkernel.patch_llamafactory")
LAUNCHERS = ("llamafactory.launcher", "llamafactory.v1.launcher")
WORKER = str(Path(__file__).with_name("worker.py"))


def patch(parts: Iterable[LlamafactoryPart] | None = None, *, strict: bool = True) -> LlamafactoryPatch:
    """Put rlkernel under LLaMA-Factory in this process and those of its torchrun, until ``undo()``.

    Each part is put in its place where LLaMA-Factory has imported its module, or as soon as it does.  A
    second call while the patch is on returns the same object.  What is left to LLaMA-Factory after all is
    counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"logprobs"``, ``"dpo"``, ``"kto"``, ``"sft"`` and ``"v1"``; None:
            all of it.
        strict: a version of LLaMA-Factory that has not been run, or a function that is not what that version
            has, is an error; of a module that is imported later, when it is.  Otherwise each such function is
            left to LLaMA-Factory, with the reason in ``refused`` and in the log.

    Raises:
        ValueError: an argument is off.
        ImportError: LLaMA-Factory is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, LLaMA-Factory is not what was run.
            Nothing is replaced then.
    """
    wanted = switch.called(parts, strict)
    require_version(strict)
    if (active := LlamafactoryPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    result = _planned(LlamafactoryPatch(wanted)).put()
    result.environment = switch.ask(wanted)
    return result


def register() -> None:
    """What ``LLAMAFACTORY_RLKERNEL`` asks for in this process, once; an error that is not strict is only
    told."""
    try:
        request = switch.asked()
        if request is None or LlamafactoryPatch.in_place() is not None:
            return
        require_version(request.strict)
        _planned(LlamafactoryPatch(request)).put()
    except Exception as error:
        logger.warning("rlkernel leaves everything to LLaMA-Factory: %s: %s", type(error).__name__, error)
        if switch.is_strict():
            raise


def _planned(patch: LlamafactoryPatch) -> LlamafactoryPatch:
    """The launchers hand torchrun the path of their own file; the worker's stands there instead."""
    for name in LAUNCHERS:
        launcher = importlib.import_module(name)
        patch.replace(launcher, "__file__", WORKER, expected=vars(launcher)["__file__"])
    return patch
