"""Checks that cost a GPU synchronisation: target ids in range, temperatures positive, rows without NaN."""

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

from torch import Tensor

from rlkernel.runtime import tracing

__all__ = ["checks", "enabled"]  # what users call

setting: ContextVar[bool | None] = ContextVar("rlkernel_debug", default=None)


def flag(name: str) -> bool:
    """An environment variable that is 0 or 1; raises ValueError for another word, such as "false"."""
    text = os.environ.get(name, "")
    if text not in ("", "0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {text!r}")
    return text == "1"


def set_up() -> None:
    """Look at ``RLKERNEL_DEBUG`` once, where rlkernel is imported: the calls that read it do not."""
    flag("RLKERNEL_DEBUG")


def enabled() -> bool:
    """Whether debug checks are on: inside ``checks()``, else by the environment variable
    ``RLKERNEL_DEBUG=1``.

    Examples:
        >>> with rlkernel.debug.checks():
        ...     rlkernel.debug.enabled()
        True
    """
    forced = setting.get()
    return os.environ.get("RLKERNEL_DEBUG", "0") not in ("", "0") if forced is None else forced


@contextlib.contextmanager
def checks(on: bool = True) -> Iterator[None]:
    """Turn the debug checks on (or off) inside the block.

    Examples:
        >>> with rlkernel.debug.checks(False):
        ...     rlkernel.debug.enabled()
        False
    """
    token = setting.set(on)
    try:
        yield
    finally:
        setting.reset(token)


def may_read(tensor: Tensor) -> bool:
    """Whether values of ``tensor`` may be looked at: free on a CPU, a synchronisation elsewhere; while
    torch is traced there are none."""
    if tracing.is_on():
        return False
    return tensor.device.type == "cpu" or (enabled() and tensor.device.type != "meta")
