"""The environment variables that the processes of LLaMA-Factory read which torchrun starts."""

from __future__ import annotations

import os

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.types import LlamafactoryPart

PARTS: tuple[LlamafactoryPart, ...] = ("logprobs", "dpo", "kto", "sft", "v1")
_SWITCH = Switch("LLAMAFACTORY_RLKERNEL", PARTS)
OWN = SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ.update(_SWITCH.variables(request))
    return before
