"""The environment variables that the processes of AReaL read which ``__main__`` starts."""

from __future__ import annotations

import os

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.types import ArealPart

PARTS: tuple[ArealPart, ...] = ("logprobs", "fused_head", "advantages")
_SWITCH = Switch("AREAL_RLKERNEL", PARTS)
OWN = SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ.update(_SWITCH.variables(request))
    return before
