"""The environment variables that every process of OpenRLHF reads: what is asked for, and how strictly."""

from __future__ import annotations

import os
from typing import NamedTuple

from rlkernel.integrations._environment import chosen
from rlkernel.types import OpenRlhfPart

SWITCH = "OPENRLHF_RLKERNEL"  # "1": every part; or names of parts, with commas between them
STRICT = "OPENRLHF_RLKERNEL_STRICT"  # "1": what cannot be replaced is an error
BEFORE = "OPENRLHF_RLKERNEL_RAY_HOOK"  # the hook of Ray that stood there before ours, which calls it
RAY = "RAY_RUNTIME_ENV_HOOK"  # Ray's own: a function that ``ray.init`` hands the runtime environment to
HOOK = "rlkernel.integrations.openrlhf.runtime_env"

OWN = (SWITCH, STRICT, BEFORE)
PARTS: tuple[OpenRlhfPart, ...] = ("logprobs", "fused_head", "losses", "advantages")


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


def ask(request: Asked | None = None) -> dict[str, str | None]:
    """Ask for it in the processes that Ray starts for this one; what stood there before.

    Without a request: for what the environment names, or else for everything.
    """
    before = {name: os.environ.get(name) for name in (*OWN, RAY)}
    if request is not None:
        os.environ[SWITCH] = ",".join(request.parts)
        os.environ[STRICT] = "1" if request.strict else "0"
    os.environ.setdefault(SWITCH, "1")
    if before[RAY] not in (None, "", HOOK):
        os.environ[BEFORE] = str(before[RAY])
    os.environ[RAY] = HOOK
    return before
