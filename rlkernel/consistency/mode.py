"""``rlkernel.batch_invariant``: while it is on, torch's own operations have bits that no batch changes."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rlkernel.consistency import aten, sharded
from rlkernel.runtime import invariance
from rlkernel.runtime.invariance import Setting
from rlkernel.types import InvarianceLevel

LEVELS = ("batch", sharded.LEVEL)


class ServedCall(NamedTuple):
    """How often an operation of torch ran while the mode was on, and on what."""

    op: str
    backend: str  # "torch": its own kernel, which is exact here, or was checked
    calls: int


class batch_invariant(contextlib.ContextDecorator):
    """Give torch's operations bits that do not depend on the batch, in the whole process.

    Inside the block a row of a matrix product, a reduction over the last dimension, a softmax, a norm, an
    activation or an attention has the same bits alone and in any batch, at any place, in any number of
    threads, forward and in autograd's backward.  Operations are replaced in torch's dispatcher, below
    autograd and for every thread; what ``torch.compile`` made runs eagerly.  Blocks nest, and each leaves
    what it found, also after an exception.

        with rlkernel.batch_invariant() as mode:
            logits = model(input_ids).logits
        mode.report()

    Args:
        level: "batch"; or "tensor_parallel", under which the sums of a linear layer are a tree over eight
            segments, so that the layers of ``rlkernel.tensor_parallel`` on 1, 2, 4 or 8 ranks, and the whole
            model on one, have the same bits, and reductions over ranks in a library's order are refused.
        strict: raise where an operation cannot be made invariant, instead of letting torch's run.
        vendor: on a GPU, let torch's own product take the place of ours in calls for which it had the same
            bits when both were compared there.

    Raises:
        ValueError: ``level`` is not known; ``strict`` or ``vendor`` is not a flag.
        RuntimeError: inside, and strict: the operation, and why its bits may depend on the batch.

    The fixed order of each sum follows Thinking Machines' ``batch_invariant_ops`` (2025), whose names are in
    ``rlkernel.batch_invariant_ops``.

    Examples:
        >>> layer, x = torch.nn.Linear(64, 8), torch.randn(32, 64)
        >>> with rlkernel.batch_invariant():
        ...     whole, one = layer(x), layer(x[:1])
        >>> torch.equal(whole[:1], one)
        True
    """

    def __init__(self, level: InvarianceLevel = "batch", strict: bool = True, vendor: bool = False) -> None:
        if level not in LEVELS:
            raise ValueError(f"level must be one of {', '.join(map(repr, LEVELS))}, got {level!r}")
        for name, flag in (("strict", strict), ("vendor", vendor)):
            if not isinstance(flag, bool):
                raise ValueError(f"{name} must be True or False, got {flag!r}")
        self.level, self.strict, self.vendor = level, strict, vendor
        self._entered: list[Setting] = []
        self._last = Setting(level, strict, vendor)

    def __call__(self, func: Any) -> Any:
        later = inspect.isgeneratorfunction, inspect.iscoroutinefunction, inspect.isasyncgenfunction
        if any(returns_before(func) for returns_before in later):
            name = getattr(func, "__qualname__", repr(func))
            raise ValueError(f"func must be done when it returns, got {name}: use a block inside of it")
        return super().__call__(func)

    def __enter__(self) -> batch_invariant:
        self._last = _enter(self.level, self.strict, self.vendor)
        self._entered.append(self._last)
        return self

    def __exit__(self, *exception: Any) -> None:
        _leave(self._entered.pop())

    def report(self) -> list[ServedCall]:
        """What ran inside the last block, the most frequent first."""
        return [ServedCall(op, backend, n) for (op, backend), n in self._last.calls.most_common()]

    @staticmethod
    def enable(level: InvarianceLevel = "batch", strict: bool = True, vendor: bool = False) -> None:
        """As entering a block that ``disable`` leaves; again: with these settings instead."""
        batch_invariant(level, strict, vendor)  # what is off is named before anything changes
        with invariance.lock:
            batch_invariant.disable()
            _enabled.append(_enter(level, strict, vendor))

    @staticmethod
    def disable() -> None:
        """Undo ``enable``; nothing where there was none."""
        with invariance.lock:
            if _enabled:
                _leave(_enabled.pop())

    @staticmethod
    def is_enabled() -> bool:
        """Also inside a block."""
        return invariance.is_on()


_enabled: list[Setting] = []
_installed: dict[str, contextlib.ExitStack] = {}  # by level; "batch" stands under the other
_suspended: list[list[Setting]] = []


def _enter(level: str, strict: bool, vendor: bool) -> Setting:
    with invariance.lock:
        setting = Setting(level, strict, vendor)
        _install(level)
        invariance.settings.append(setting)
        return setting


def _leave(setting: Setting) -> None:
    with invariance.lock:
        # blocks of several threads may end in any order, also while another thread has suspended them all
        for entered in (invariance.settings, *_suspended):
            entered[:] = [x for x in entered if x is not setting]
        _uninstall()


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Inside, torch's operations are its own, whatever block this stands in."""
    with invariance.lock:
        outer = invariance.settings[:]
        _suspended.append(outer)
        invariance.settings.clear()
        _uninstall()
    try:
        yield
    finally:
        with invariance.lock:
            _suspended[:] = [x for x in _suspended if x is not outer]
            for setting in outer:
                _install(setting.level)
            invariance.settings[:0] = outer


def _install(level: str) -> None:
    """What the level needs and is not there."""
    if "batch" not in _installed:
        with contextlib.ExitStack() as stack:
            stack.enter_context(aten.replaced())
            # what a compiler fuses is not torch's operations any more
            try:
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            except RuntimeError as error:
                raise RuntimeError(
                    "rlkernel.batch_invariant must be entered outside of what torch.compile made, "
                    f"got a block inside: {error}"
                ) from None
            _installed["batch"] = stack.pop_all()
    if level not in _installed:
        with contextlib.ExitStack() as stack:
            stack.enter_context(sharded.replaced())
            _installed[level] = stack.pop_all()


def _uninstall() -> None:
    """What no block needs any more."""
    needed = {setting.level for setting in invariance.settings} | (
        {"batch"} if invariance.settings else set()
    )
    for level in [x for x in reversed(_installed) if x not in needed]:
        _installed.pop(level).close()
