"""The environment variables that every process of verl reads: what is asked for, and how strictly."""

from __future__ import annotations

import os
from typing import NamedTuple

from rlkernel.integrations._environment import chosen
from rlkernel.types import VerlPart

SWITCH = "VERL_RLKERNEL"  # "1": every part; or names of parts, with commas between them
STRICT = "VERL_RLKERNEL_STRICT"  # "1": what cannot be replaced is an error
MODULES = "VERL_USE_EXTERNAL_MODULES"  # verl's own: modules that it imports, whose errors it raises
PLUGIN = "rlkernel.integrations.verl.plugin"

OWN = (SWITCH, STRICT)
PARTS: tuple[VerlPart, ...] = ("logprobs", "fused_head", "losses", "advantages")


class Asked(NamedTuple):
    parts: tuple[str, ...]
    strict: bool


def is_strict() -> bool:
    return os.environ.get(STRICT) == "1"


def asked() -> Asked | None:
    """What the environment asks for; None where it asks for nothing.

    Raises:
        ValueError: it names a part that there is not.
    """
    text = os.environ.get(SWITCH, "").strip()
    if text in ("", "0"):
        return None
    names = PARTS if text == "1" else [name.strip() for name in text.split(",") if name.strip()]
    return Asked(chosen(names, PARTS, SWITCH), is_strict())


def ask(request: Asked) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before.

    By verl's list of modules: an entry point is there only where the package was installed with it.
    """
    before = {name: os.environ.get(name) for name in (*OWN, MODULES)}
    os.environ[SWITCH] = ",".join(request.parts)
    os.environ[STRICT] = "1" if request.strict else "0"
    modules = [name for name in os.environ.get(MODULES, "").split(",") if name]
    os.environ[MODULES] = ",".join([*modules, *([] if PLUGIN in modules else [PLUGIN])])
    return before
