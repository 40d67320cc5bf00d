"""The environment variables that every process of SGLang reads, and whether it will load us."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from typing import Any

from rlkernel.integrations._parts import Asked, Switch
from rlkernel.types import SglangPart

PARTS: tuple[SglangPart, ...] = ("sampler", "prompt_logprobs")
_SWITCH = Switch("SGLANG_RLKERNEL", PARTS)
SWITCH, STRICT = _SWITCH.name, _SWITCH.strict
INVARIANT = f"{SWITCH}_BATCH_INVARIANT"  # "1": the bits of transformers under rlkernel.batch_invariant
OWN = SWITCH, STRICT, INVARIANT
PLUGINS = "SGLANG_PLUGINS"  # SGLang's own: the entry points that it loads; all where it is empty
GROUP, ENTRY_POINT = "sglang.srt.plugins", "rlkernel"
asked, called, is_strict = _SWITCH.asked, _SWITCH.called, _SWITCH.is_strict


def ask(request: Asked, invariant: bool) -> dict[str, str | None]:
    """Ask for it in the processes that this one starts; what stood there before."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ.update(_SWITCH.variables(request) | {INVARIANT: "1" if invariant else "0"})
    return before


def asked_invariant(parts: tuple[str, ...]) -> bool:
    """Raises:
    ValueError: it is asked for without a part that it needs.
    """
    return checked_invariance(os.environ.get(INVARIANT) == "1", parts, INVARIANT)


def checked_invariance(asked: Any, parts: tuple[str, ...], argument: str) -> bool:
    """Whether tokens and prompts shall have one set of bits, which both parts must see to."""
    if not isinstance(asked, bool):
        raise ValueError(f"{argument} must be True or False, got {asked!r}")
    if asked and set(parts) != set(PARTS):
        raise ValueError(f"parts must be {PARTS} where {argument} is set, got {parts}")
    return asked


def left_out() -> str:
    """Why SGLang's other processes will not load us; empty where they will."""
    allowed = os.environ.get(PLUGINS, "")
    if allowed and ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        return f"{PLUGINS}={allowed} leaves {ENTRY_POINT!r} out"
    if not any(point.name == ENTRY_POINT for point in entry_points(group=GROUP)):
        return f"rlkernel is not installed with its entry point {ENTRY_POINT!r} of {GROUP}"
    return ""
