"""Put rlkernel under AReaL: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rlkernel.integrations.areal import switch
from rlkernel.integrations.areal.areal_patch import ArealPatch
from rlkernel.integrations.areal.contract import require_version
from rlkernel.types import ArealPart

logger = logging.getLogger("rlkernel.patch_areal")


def patch(parts: Iterable[ArealPart] | None = None, *, strict: bool = True) -> ArealPatch:
    """Put rlkernel under AReaL in this process, and ask for it in those that it starts, until ``undo()``.

    Each part is put in its place where AReaL has imported its module, or as soon as it does.  Of the
    processes that it starts, those do as they are asked whose command is ``python -m
    rlkernel.integrations.areal``.  A second call while the patch is on returns the same object.  What is left
    to AReaL after all is counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"logprobs"``, ``"fused_head"`` and ``"advantages"``; None: all of it.
        strict: a version of AReaL that has not been run, or a function that is not what that version has, is
            an error; of a module that is imported later, when it is.  Otherwise each such function is left to
            AReaL, with the reason in ``refused`` and in the log.

    Raises:
        ValueError: an argument is off.
        ImportError: AReaL is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, AReaL is not what was run.  Nothing
            is replaced then.
    """
    wanted = switch.called(parts, strict)
    require_version(strict)
    if (active := ArealPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    result = ArealPatch(wanted).put()
    result.environment = switch.ask(wanted)
    return result


def register() -> None:
    """What ``AREAL_RLKERNEL`` asks for in this process, once; an error that is not strict is only told."""
    try:
        request = switch.asked()
        if request is None or ArealPatch.in_place() is not None:
            return
        require_version(request.strict)
        ArealPatch(request).put()
    except Exception as error:
        logger.warning("rlkernel leaves everything to AReaL: %s: %s", type(error).__name__, error)
        if switch.is_strict():
            raise
