"""The environment variables that every process of vLLM reads: what is asked for, and how strictly.

Their names begin with ``VLLM_`` because Ray hands only such variables to its workers.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

from rlkernel.integrations._environment import chosen
from rlkernel.types import VllmOp

SWITCH = "VLLM_RLKERNEL"  # names of ops, with commas between them
STRICT = "VLLM_RLKERNEL_STRICT"  # "1": what cannot be replaced is an error
SUPPORT = "VLLM_RLKERNEL_SUPPORT"  # room for the kept tokens of each sampled one; 0, unset: only on request
INVARIANT = "VLLM_RLKERNEL_BATCH_INVARIANT"  # "1": attention serves every step
PLUGINS = "VLLM_PLUGINS"  # vLLM's own: the entry points that it loads; all where it is not set
ENTRY_POINT = "rlkernel"

OWN = (SWITCH, STRICT, SUPPORT, INVARIANT)
OPS: tuple[VllmOp, ...] = ("sampler", "support", "prompt_logprobs", "rejection", "attention", "v2")
DEFAULT = OPS[:4]  # attention pays for long shared prompts alone, and v2 has run in no engine: by name only


class Asked(NamedTuple):
    ops: tuple[str, ...]
    strict: bool
    return_support: int = 0
    batch_invariant: bool = False


def is_on() -> bool:
    return bool(os.environ.get(SWITCH))


def is_strict() -> bool:
    return os.environ.get(STRICT) == "1"


def asked() -> Asked | None:
    """What the environment asks for; None where it asks for nothing.

    Raises:
        ValueError: it names an op that there is not, or not one that its other variables need, or its
            ``VLLM_RLKERNEL_SUPPORT`` is no room.
    """
    text = os.environ.get(SWITCH, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        return None
    ops, room = chosen(names, OPS, SWITCH), os.environ.get(SUPPORT) or "0"
    return Asked(
        ops,
        is_strict(),
        checked_room(int(room) if room.isdecimal() else room, ops, SUPPORT),
        checked_invariance(os.environ.get(INVARIANT) == "1", ops, INVARIANT),
    )


def checked_room(room: Any, ops: tuple[str, ...], argument: str) -> int:
    """How many kept tokens travel with each sampled one, which ``"support"`` among ``ops`` sees to."""
    if not isinstance(room, int) or isinstance(room, bool) or not 0 <= room < 2**31:
        raise ValueError(f"{argument} must be an integer in [0, 2**31), got {room!r}")
    if room and not {"sampler", "support"} <= set(ops):
        raise ValueError(f"ops must name 'sampler' and 'support' where {argument} is {room}, got {ops}")
    return room


def checked_invariance(asked: Any, ops: tuple[str, ...], argument: str) -> bool:
    """Whether ``"attention"`` among ``ops`` serves every step, as the bits of a request want it."""
    if not isinstance(asked, bool):
        raise ValueError(f"{argument} must be True or False, got {asked!r}")
    if asked and "attention" not in ops:
        raise ValueError(f"ops must name 'attention' where {argument} is set, got {ops}")
    return asked


def ask(request: Asked) -> dict[str, str | None]:
    """Ask for it in this process and in those that it starts; what stood there before."""
    before = {name: os.environ.get(name) for name in OWN}
    os.environ[SWITCH] = ",".join(request.ops)
    os.environ[STRICT] = "1" if request.strict else "0"
    os.environ[SUPPORT] = str(request.return_support)
    os.environ[INVARIANT] = "1" if request.batch_invariant else "0"
    return before


def make_known() -> None:
    """vLLM warns of variables with its prefix that it does not know, or refuses to start."""
    import vllm.envs

    for name in OWN:
        vllm.envs.environment_variables.setdefault(name, functools.partial(os.environ.get, name))


def forget() -> None:
    import vllm.envs

    for name in OWN:
        vllm.envs.environment_variables.pop(name, None)


def left_out() -> str:
    """Why vLLM's other processes will not load us; empty where they will."""
    allowed = os.environ.get(PLUGINS)
    if allowed is not None and ENTRY_POINT not in allowed.split(","):
        return f"{PLUGINS}={allowed} leaves {ENTRY_POINT!r} out"
    from importlib.metadata import entry_points

    if not any(point.name == ENTRY_POINT for point in entry_points(group="vllm.general_plugins")):
        return f"rlkernel is not installed with its entry point {ENTRY_POINT!r} of vllm.general_plugins"
    return ""
