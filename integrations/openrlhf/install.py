"""Put rlkernel under OpenRLHF: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from rlkernel.integrations.openrlhf import switch
from rlkernel.integrations.openrlhf.contract import require_version
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch
from rlkernel.types import OpenRlhfPart

logger = logging.getLogger("rlkernel.patch_openrlhf")


def patch(parts: Iterable[OpenRlhfPart] | None = None, *, strict: bool = True) -> OpenRlhfPatch:
    """Put rlkernel under OpenRLHF, in this process and in those that Ray starts for it, until ``undo()``.

    Call it before ``ray.init``.  A second call while the patch is on returns the same object.  What is left
    to OpenRLHF after all is counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"logprobs"``, ``"fused_head"``, ``"losses"`` and ``"advantages"``; None:
            all of it.
        strict: a version of OpenRLHF that has not been run, or a function that is not what that version has,
            is an error, in the processes of Ray too.  Otherwise each such function is left to OpenRLHF, with
            the reason in ``refused`` and in the log.

    Raises:
        ValueError: an argument is off.
        ImportError: OpenRLHF is not installed.
        PatchError: the patch is on with other parts; or, if ``strict``, OpenRLHF is not what was run.
            Nothing is replaced then.
    """
    wanted = switch.called(parts, strict)
    require_version(strict)
    if (active := OpenRlhfPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    from rlkernel.integrations.openrlhf.processes import wait_no_more

    wait_no_more()  # what is planned imports OpenRLHF, behind which the environment's parts would be put on
    result = OpenRlhfPatch(strict)
    result.plan(wanted.parts)
    result.apply()
    result.environment = switch.ask(wanted)
    return result


def register(there: tuple[str, ...]) -> None:
    """What ``OPENRLHF_RLKERNEL`` asks for, as far as its modules are ``there``, once."""
    try:
        request = switch.asked()
        active = OpenRlhfPatch.in_place()
        done = () if active is None else active.parts
        if request is None or not (parts := [x for x in request.parts if x in there and x not in done]):
            return
        if active is not None:
            active.plan(parts)
            return
        require_version(request.strict)
        result = OpenRlhfPatch(request.strict)
        result.plan(parts)
        result.apply()
    except Exception as error:
        logger.warning("rlkernel leaves everything to OpenRLHF: %s: %s", type(error).__name__, error)
        if switch.is_strict():
            raise
