"""Put rlkernel under SkyRL: what is replaced, in which process, and how it is asked for."""

from __future__ import annotations

import importlib
import logging
import sys
import warnings
from collections.abc import Iterable

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.skyrl import switch
from rlkernel.integrations.skyrl.contract import HOMES, require_version
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch
from rlkernel.types import SkyrlPart

logger = logging.getLogger("rlkernel.patch_skyrl")


def patch(parts: Iterable[SkyrlPart] | None = None, *, strict: bool = True) -> SkyrlPatch:
    """Put rlkernel under SkyRL, in this process and in those of Ray that it starts, until ``undo()``.

    Call it before Ray is started.  A second call while the patch is on returns the same object.  What is left
    to SkyRL after all is counted, warned of once a reason, and summed up in the log by ``undo()``.

    Args:
        parts: what to replace, of ``"logprobs"``, ``"fused_head"``, ``"losses"`` and ``"advantages"``; None:
            all of it.
        strict: a version of SkyRL that has not been run, a function that is not what that version has, or Ray
            started before, is an error; of a function in the processes of Ray too, when they import it.
            Otherwise each such function is left to SkyRL, with the reason in ``refused`` and in the log.

    Raises:
        ValueError: an argument is off.
        ImportError: SkyRL is not installed.
        PatchError: the patch is on with other parts; the Ray job has a ``worker_process_setup_hook`` already;
            or, if ``strict``, SkyRL is not what was run, or Ray runs.  Nothing is replaced then.
    """
    wanted = switch.called(parts, strict)
    require_version(strict)
    if (active := SkyrlPatch.in_place()) is not None:
        return active.asked_again(parts, wanted)
    _before_ray(strict)
    result = SkyrlPatch(wanted).put(ready=_imports)
    try:
        result.environment = switch.ask(wanted)
    except PatchError:
        result.undo()
        raise
    return result


def register() -> None:
    """What ``SKYRL_RLKERNEL`` asks for, once, of what SkyRL has imported here and will import."""
    request = switch.asked()
    if request is None or SkyrlPatch.in_place() is not None:
        return
    require_version(request.strict)
    SkyrlPatch(request).put()


def _before_ray(strict: bool) -> None:
    """The processes of a job that runs already have the environment that it began with."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return
    context = ray.get_runtime_context()
    hook = (context.runtime_env or {}).get("worker_process_setup_hook")
    if context.worker.mode != ray.SCRIPT_MODE or hook == switch.HOOK:
        return
    message = "Ray must be started after rlkernel.patch_skyrl(), which its processes do not know of otherwise"
    if strict:
        raise PatchError(f"{message}; patch_skyrl(strict=False) replaces what this process has")
    warnings.warn(message, stacklevel=4)  # of patch, which is called by rlkernel's


def _imports(part: str) -> bool:
    """False where SkyRL's models want what this machine has not, flash-attn or a GPU: of Ray's processes some
    run on others.  What else does not import is told by its plan."""
    if part != "fused_head":
        return True
    try:
        importlib.import_module(HOMES[part])
    except ImportError as error:
        logger.info("%s waits for SkyRL's import of its models: %s", part, error)
        return False
    return True
