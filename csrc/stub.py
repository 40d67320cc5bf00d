"""Writes `rlkernel/_C.pyi` from what the built extension says of itself: `python csrc/stub.py`.

The docstring of a kernel is its signature, made from the struct that C++ reads its arguments into.
"""

from pathlib import Path
from types import ModuleType

from rlkernel import native

PATH = Path(__file__).resolve().parents[1] / "rlkernel/_C.pyi"
HEAD = '''"""The compiled kernels. Written by csrc/stub.py: do not edit.

`rlkernel.native.kernels` picks the part by device and fills in the stream.
"""

from collections.abc import Callable
from contextvars import ContextVar
from threading import local
from types import ModuleType
from typing import Any, Protocol

from torch import Tensor

from rlkernel.calls.paged_prefix_attention import PagedRule
from rlkernel.calls.policy_loss import CovariancePick, PolicyRule
from rlkernel.calls.preference_loss import PreferenceRule

ENUMS: dict[str, tuple[str, ...]]  # the names of each enum that Python has too, in order

def direct(
    op: str,
    *,
    forced: ContextVar[str],
    asked: ContextVar[Any],
    last: dict[str, str],
    emulated: list[Any],
    debug: ContextVar[bool | None],
    levels: list[Any],
    forward_ad: dict[str, Any],
    module: ModuleType | None,
) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """The short way of a call, or None: see csrc/include/rlkernel/direct.h."""

def replaced(
    op: str,
    *,
    counted: tuple[str, str],
    used: local,
    otherwise: Callable[..., Any],
    asides: list[None],
    emulated: list[Any],
    levels: list[Any],
    forward_ad: dict[str, Any],
) -> Callable[..., Any]:
    """What takes an operation's place in torch's dispatcher: see csrc/include/rlkernel/replaced.h."""

def built() -> dict[str, list[str]]:
    """Which parts were built, and for which instruction sets or architectures."""

def cuda_versions() -> tuple[int, int]:
    """Of the CUDA runtime that is linked in, and what the driver knows; there where the cuda part is."""

class Kernels(Protocol):
    """A part: where a tensor's memory is not what a kernel asks for, it raises ValueError."""

    def __hash__(self) -> int: ...
'''
TAIL = """
# where their parts were built
cpu: Kernels
cuda: Kernels
hip: Kernels
"""


def text(part: ModuleType) -> str:
    members = sorted((name, x) for name, x in vars(part).items() if not name.startswith("_"))
    constants = [f"    {name}: {type(x).__name__}\n" for name, x in members if not callable(x)]
    return (
        HEAD + "".join([*constants, *(_method(name, x.__doc__) for name, x in members if callable(x))]) + TAIL
    )


def _method(name: str, signature: str) -> str:
    parameters, result = signature.strip()[1:].split(") -> ")
    lines = "".join(f"        {parameter},\n" for parameter in ["self", *parameters.split(", ")])
    return f"    def {name}(\n{lines}    ) -> {result}: ...\n"


if __name__ == "__main__":
    PATH.write_text(text(native.extension().cpu))
