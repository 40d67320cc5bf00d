"""The environment variables that every process of SWIFT reads: what is asked for, and how strictly."""

from __future__ import annotations

import os

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.types import SwiftPart

PARTS: tuple[SwiftPart, ...] = ("logprobs", "fused_head", "losses", "advantages")
_SWITCH = Switch("SWIFT_RLKERNEL", PARTS)
OWN = SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked | None = None) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before.

    Without a request: for what the environment names, or else for everything.
    """
    before = {name: os.environ.get(name) for name in OWN}
    if request is not None:
        os.environ.update(_SWITCH.variables(request))
    os.environ.setdefault(SWITCH, "1")
    return before
