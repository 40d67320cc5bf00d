"""The environment variables that every process of verl reads: what is asked for, and how strictly."""

from __future__ import annotations

import os

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.types import VerlPart

MODULES = "VERL_USE_EXTERNAL_MODULES"  # verl's own: modules that it imports, whose errors it raises
PLUGIN = "rlkernel.integrations.verl.plugin"

PARTS: tuple[VerlPart, ...] = ("logprobs", "fused_head", "losses", "advantages")
_SWITCH = Switch("VERL_RLKERNEL", PARTS)
OWN = SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before.

    By verl's list of modules: an entry point is there only where the package was installed with it.
    """
    before = {name: os.environ.get(name) for name in (*OWN, MODULES)}
    os.environ.update(_SWITCH.variables(request))
    modules = [name for name in os.environ.get(MODULES, "").split(",") if name]
    os.environ[MODULES] = ",".join([*modules, *([] if PLUGIN in modules else [PLUGIN])])
    return before
