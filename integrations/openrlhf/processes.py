"""How the other processes of OpenRLHF come to be patched: Ray's actors, and what DeepSpeed's launcher starts.

OpenRLHF has no plugins.  Ray has two hooks: ``ray.init`` hands the runtime environment to the function that
``RAY_RUNTIME_ENV_HOOK`` names, and a runtime environment may name a function that every worker calls as it
starts.  The first, ``runtime_env``, adds the second, ``in_worker``, and that waits for OpenRLHF's models: a
worker that never imports them, such as one of vLLM's, which OpenRLHF keeps free of DeepSpeed, stays as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from rlkernel.integrations._arrivals import Arrivals
from rlkernel.integrations.openrlhf import switch
from rlkernel.integrations.openrlhf.install import register

# behind whose import which parts can be put on; OpenRLHF itself imports the first for the second
WHERE = {
    "openrlhf.models": ("logprobs", "fused_head", "losses"),
    "openrlhf.trainer.ppo_utils.experience_maker": ("advantages",),
}
waited_for = Arrivals(set(), lambda name: register(WHERE[name]))
WORKER, SETUP = "rlkernel.integrations.openrlhf.in_worker", "worker_process_setup_hook"


def watch() -> None:
    """Put on what the environment asks for, each part as soon as its modules are there."""
    if switch.asked() is None:
        return
    for name, parts in WHERE.items():
        if name in sys.modules:
            register(parts)
        else:
            waited_for.names.add(name)
    if waited_for.names:
        waited_for.begin()


def wait_no_more() -> None:
    """What has not been imported yet stays OpenRLHF's own."""
    waited_for.names.clear()
    waited_for.end()


def in_worker() -> None:
    """What a worker of Ray calls as it starts."""
    watch()


def runtime_env(given: Any) -> dict[str, Any]:
    """The runtime environment ``given`` to ``ray.init``, whose workers are patched."""
    if before := os.environ.get(switch.BEFORE):
        given = _named(before)(given)
    switch.ask()  # also where this hook was named and nothing else
    watch()
    result = dict(given or {})
    own = {name: os.environ[name] for name in (switch.SWITCH, switch.STRICT) if name in os.environ}
    result["env_vars"] = own | dict(result.get("env_vars") or {})
    theirs = result.get(SETUP)
    if theirs is None:
        result[SETUP] = WORKER
    elif theirs != WORKER:
        result[SETUP] = _both(theirs)
    return result


def _both(theirs: Any) -> Callable[[], None]:
    def set_up() -> None:  # no module has it by this name, so it travels by value
        from rlkernel.integrations.openrlhf.processes import _named, in_worker

        (_named(theirs) if isinstance(theirs, str) else theirs)()
        in_worker()

    return set_up


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
