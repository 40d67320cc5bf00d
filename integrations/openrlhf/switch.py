"""The environment variables that every process of OpenRLHF reads: what is asked for, and how strictly."""

from __future__ import annotations

import os

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.types import OpenRlhfPart

BEFORE = "OPENRLHF_RLKERNEL_RAY_HOOK"  # the hook of Ray that stood there before ours, which calls it
RAY = "RAY_RUNTIME_ENV_HOOK"  # Ray's own: a function that ``ray.init`` hands the runtime environment to
HOOK = "rlkernel.integrations.openrlhf.runtime_env"

PARTS: tuple[OpenRlhfPart, ...] = ("logprobs", "fused_head", "losses", "advantages")
_SWITCH = Switch("OPENRLHF_RLKERNEL", PARTS)
SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
OWN = (SWITCH, STRICT, BEFORE)
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked | None = None) -> dict[str, str | None]:
    """Ask for it in the processes that Ray starts for this one; what stood there before.

    Without a request: for what the environment names, or else for everything.
    """
    before = {name: os.environ.get(name) for name in (*OWN, RAY)}
    if request is not None:
        os.environ.update(_SWITCH.variables(request))
    os.environ.setdefault(SWITCH, "1")
    if before[RAY] not in (None, "", HOOK):
        os.environ[BEFORE] = str(before[RAY])
    os.environ[RAY] = HOOK
    return before
