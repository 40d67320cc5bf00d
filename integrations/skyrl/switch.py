"""The environment variables that every process of SkyRL reads, and how they come to Ray's."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from typing import Any

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.integrations._patch import PatchError
from rlkernel.types import SkyrlPart

JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # Ray's own: what ray.init adds to the runtime_env that it is given
HOOK = "rlkernel.integrations.skyrl.plugin.register"

PARTS: tuple[SkyrlPart, ...] = ("logprobs", "fused_head", "losses", "advantages")
_SWITCH = Switch("SKYRL_RLKERNEL", PARTS)
OWN = SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before.

    Not by ``RAY_RUNTIME_ENV_HOOK``, which Ray passes over in what ``uv run`` has started.

    Raises:
        PatchError: the job that this process belongs to has another function to start its processes with, or
            no ``runtime_env`` that can be read.
    """
    own = _SWITCH.variables(request)
    job = _with_hook(os.environ.get(JOB), own)
    before = {name: os.environ.get(name) for name in (*OWN, JOB)}
    os.environ.update(own | {JOB: job})
    return before


def _with_hook(text: str | None, variables: dict[str, str]) -> str:
    job = _job(text)
    environment = job["runtime_env"] = job.get("runtime_env") or {}
    hook = environment.setdefault("worker_process_setup_hook", HOOK)
    if hook != HOOK:
        raise PatchError(
            f"the worker_process_setup_hook of {JOB} must be free for {HOOK}, got {hook!r}: "
            "let that function call this one"
        )
    environment["env_vars"] = (environment.get("env_vars") or {}) | variables
    return json.dumps(job)


def _job(text: str | None) -> dict[str, Any]:
    try:
        job = json.loads(text or "{}")
    except ValueError as error:
        raise PatchError(f"{JOB} must be JSON: {error}, got {text!r}") from error
    if isinstance(job, dict):
        environment = job.get("runtime_env") or {}
        if isinstance(environment, dict) and isinstance(environment.get("env_vars") or {}, dict):
            return job
    raise PatchError(f"{JOB} must be a job's config with a runtime_env, got {text!r}")


def forget_job() -> None:
    """In a process of the job, forget what told the driver's ``ray.init`` of it, which is in its environment
    where the driver started Ray: vLLM's engine calls ``ray.init`` in a process of its own, with its actor's
    ``runtime_env``, and Ray takes no hook twice."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized() or ray.get_runtime_context().worker.mode != ray.WORKER_MODE:
        return
    with contextlib.suppress(PatchError):
        if (_job(os.environ.get(JOB)).get("runtime_env") or {}).get("worker_process_setup_hook") == HOOK:
            del os.environ[JOB]
