"""Put rlkernel under SWIFT: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable

from rlkernel.integrations.swift import switch
from rlkernel.integrations.swift.contract import HOMES, require_version
from rlkernel.integrations.swift.swift_patch import SwiftPatch
from rlkernel.types import SwiftPart

logger = logging.getLogger("rlkernel.patch_swift")


def patch(parts: Iterable[SwiftPart] | None = None, *, strict: bool = True) -> SwiftPatch:
    """Put rlkernel under SWIFT, in this process and in those that have its plugin, until ``undo()``.

    A second call while the patch is on returns the same object.  What is left to SWIFT after all is counted,
    warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"logprobs"``, ``"fused_head"``, ``"losses"`` and ``"advantages"``; None:
            all of it.
        strict: a version of SWIFT that has not been run, or a function that is not what that version has, is
            an error.  Otherwise each such function is left to SWIFT, with the reason in ``refused`` and in
            the log.

    Raises:
        ValueError: an argument is off.
        ImportError: SWIFT is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, SWIFT is not what was run.  Nothing
            is replaced then.
    """
    wanted = switch.called(parts, strict)
    require_version(strict)
    if (active := SwiftPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    result = SwiftPatch(wanted).put(ready=_imports)
    result.environment = switch.ask(wanted)
    return result


def register() -> None:
    """What ``SWIFT_RLKERNEL`` asks for, once, of what SWIFT has imported here and will import; an error of a
    process that is not strict is only told."""
    try:
        request = switch.asked()
        if request is None or SwiftPatch.in_place() is not None:
            return
        require_version(request.strict)
        SwiftPatch(request).put()
    except Exception as error:
        logger.warning("rlkernel leaves everything to SWIFT: %s: %s", type(error).__name__, error)
        if switch.is_strict():
            raise


def _imports(piece: str) -> bool:
    """False where SWIFT's trainers want what this machine has not: some of them import vLLM, or TRL's
    experiments.  What else does not import is told by its plan."""
    try:
        importlib.import_module(HOMES[piece])
    except ImportError as error:
        logger.info("%s waits for SWIFT's import of it: %s", piece, error)
        return False
    return True
