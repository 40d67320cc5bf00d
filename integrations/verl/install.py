"""Put rlkernel under verl: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable

from rlkernel.integrations._parts import Asked
from rlkernel.integrations.verl import switch
from rlkernel.integrations.verl.contract import require_version
from rlkernel.integrations.verl.verl_patch import VerlPatch
from rlkernel.types import VerlPart

logger = logging.getLogger("rlkernel.patch_verl")


def patch(parts: Iterable[VerlPart] | None = None, *, strict: bool = True) -> VerlPatch:
    """Put rlkernel under verl, in this process and in those that it starts, until ``undo()``.

    Call it before Ray and the engines are started.  A second call while the patch is on returns the same
    object.  What is left to verl after all is counted, warned of once a reason, and summed up in the log by
    ``undo()``.

    Args:
        parts: what to replace, of ``"logprobs"``, ``"fused_head"``, ``"losses"`` and ``"advantages"``; None:
            all of it.
        strict: a version of verl that has not been run, or a function that is not what that version has, is
            an error, in the processes of Ray too.  Otherwise each such function is left to verl, with the
            reason in ``refused`` and in the log.

    Raises:
        ValueError: an argument is off.
        ImportError: verl is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, verl is not what was run.  Nothing is
            replaced then.
    """
    wanted = switch.called(parts, strict)
    require_version(strict)  # imports verl, whose import may put the patch on
    if (active := VerlPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    result = _installed(wanted)
    result.environment = switch.ask(wanted)
    return result


def register() -> None:
    """What verl's entry point does in each process: what ``VERL_RLKERNEL`` asks for, once."""
    try:
        request = switch.asked()
        if request is None or VerlPatch.in_place() is not None:
            return
        require_version(request.strict)
        _installed(request)
    except Exception as error:
        # of an entry point verl tells errors only where it logs at level DEBUG
        logger.warning("rlkernel leaves everything to verl: %s: %s", type(error).__name__, error)
        if switch.is_strict():
            raise


def _installed(request: Asked) -> VerlPatch:
    result = VerlPatch(*request)
    for part in request.parts:  # each has a module of its name, with its plan
        with result.planning(part):
            importlib.import_module(f"rlkernel.integrations.verl.{part}").plan(result)
    return result.apply()
