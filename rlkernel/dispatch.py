"""Choose which backend runs an op.

A backend is a package with one module per op, named like the op.  A module defines
``unsupported(*tensors, **options) -> list[str]`` (why these inputs cannot run here; empty when they can) and
the functions of the reference.  A backend without the op's module simply does not have the op.
"""

import contextlib
import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.types import Backend

# Auto mode tries these in order, unless the op's public module has an order of its own.  Adding a backend is
# adding a line.
BACKENDS = {
    "native": "rlkernel.native",  # csrc/: CPU, CUDA or HIP, by the tensor's device
    "flashinfer": "rlkernel.flashinfer",  # libraries that have an op or two; only where they are installed
    "aiter": "rlkernel.aiter",
    "triton": "rlkernel.triton_ops",
    "reference": "rlkernel.reference",
}
_ORDER = tuple(BACKENDS)


class Reasons(dict[str, list[str]]):
    """Every backend's reasons for not running a call; empty where it can.

    ``paths`` says, of those that can and have several ways to run it, which one they would take and why: that
    is what ``path(*tensors, **options)`` of such a module answers.
    """

    def __init__(self) -> None:
        super().__init__()
        self.paths: dict[str, str] = {}


_log = logging.getLogger("rlkernel")
_forced: ContextVar[str] = ContextVar("rlkernel_backend", default="auto")
_asked: ContextVar[Reasons | None] = ContextVar("rlkernel_asked", default=None)
_last: dict[str, str] = {}


@contextlib.contextmanager
def use_backend(name: Backend) -> Iterator[None]:
    """Run every op inside the block on backend ``name``, or raise with its reasons: it never falls back.

    ``"auto"`` inside the block of another backend restores the free choice.  Blocks nest; each restores what
    it found, also after an exception, and counts only for the thread or task that entered it.

    Raises:
        ValueError: ``name`` is not a backend.

    Examples:
        >>> with rlkernel.use_backend("reference"):
        ...     logprobs = rlkernel.logprob(torch.zeros(1, 4), torch.tensor([0])).logprobs
        >>> rlkernel.last_backend("logprob"), logprobs
        ('reference', tensor([-1.3863]))
    """
    if not isinstance(name, str) or (name != "auto" and name not in BACKENDS):
        raise ValueError(f"name must be 'auto' or one of {', '.join(map(repr, BACKENDS))}, got {name!r}")
    found = _forced.get()
    try:
        _forced.set(name)  # no token of it: an interrupt between the call and what it returns would lose it
        yield
    finally:
        _forced.set(found)


def reasons(op: str, *tensors: Tensor, **options: Any) -> Reasons:
    """Every backend's reasons for not running ``op`` on what ``pick`` gets."""
    found = Reasons()
    for name in BACKENDS:
        module, found[name] = _load(name, op, tensors, options)
        if not found[name] and "path" in vars(module):
            found.paths[name] = vars(module)["path"](*tensors, **options)
    return found


class _Answered(BaseException):
    """Ends a call that is asked about, past all that would handle its errors."""


@contextlib.contextmanager
def asking() -> Iterator[Reasons]:
    """The first op that is picked inside the block ends it; the reasons of all backends are then in the dict.

    It stays empty where nothing was picked.
    """
    answer = Reasons()
    token = _asked.set(answer)
    try:
        yield answer
    except _Answered:
        pass
    finally:
        _asked.reset(token)


def last(op: str) -> str | None:
    """The backend that ran ``op`` most recently in this process."""
    return _last.get(op)


@contextlib.contextmanager
def watching() -> Iterator[dict[str, str]]:
    """The dict has, after the block, the backend of every op that ran inside it."""
    ran: dict[str, str] = {}
    before = dict(_last)
    _last.clear()
    try:
        yield ran
    finally:
        ran.update(_last)
        for op, name in before.items():
            _last.setdefault(op, name)


def ops() -> list[str]:
    """The names of all ops: the public modules of ``rlkernel.ops``."""
    import pkgutil

    modules = pkgutil.iter_modules([str(Path(__file__).parent / "ops")])
    return sorted(m.name for m in modules if not m.name.startswith("_"))


def has(name: str, op: str) -> bool:
    """Whether backend ``name`` has ``op`` and the package under it, be it able to run here or not."""
    try:
        return all(importlib.util.find_spec(path) for path in (BACKENDS[name], f"{BACKENDS[name]}.{op}"))
    except ImportError:  # the package says that what it stands on is not installed
        return False


def pick(op: str, *tensors: Tensor, **options: Any) -> ModuleType:
    """The module that will run ``op``: the forced backend, else the first that supports the inputs.

    Raises:
        NotImplementedError: no allowed backend can run these inputs; lists every backend's reasons.
    """
    answer = _asked.get()
    if answer is not None:
        found = reasons(op, *tensors, **options)
        answer.update(found)
        answer.paths.update(found.paths)
        raise _Answered
    forced = _forced.get()
    rejected: dict[str, list[str]] = {}
    for name in order(op, tensors[0].device) if forced == "auto" else (forced,):
        module, why_not = _load(name, op, tensors, options)
        if module is not None and not why_not:
            if _last.get(op) != name:
                _last[op] = name
                passed_over = "".join(f"; not {other}: {'; '.join(why)}" for other, why in rejected.items())
                _log.debug("%s runs on %s%s", op, name, passed_over)
            return module
        rejected[name] = why_not
    shapes = ", ".join(
        f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} on {t.device}" for t in tensors
    )
    tried = "\n".join(f"  {name}: {'; '.join(why)}" for name, why in rejected.items())
    raise NotImplementedError(f"no backend can run {op} on {shapes}\n{tried}")


def able(op: str, names: tuple[str, ...], *tensors: Tensor, **options: Any) -> tuple[str, ModuleType] | None:
    """The first of these backends that can run ``op``, and its module, whichever backend is forced."""
    for name in names:
        module, why_not = _load(name, op, tensors, options)
        if module is not None and not why_not:
            return name, module
    return None


def direct(op: str) -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    """The short way of ``op``'s public call: its result, or None, of arguments by place and by name.

    It takes calls that ``pick`` would give the compiled kernels and did give them last, while no other
    backend is forced and nobody asks.  None where there is no such way.
    """
    try:
        native = importlib.import_module(BACKENDS["native"])
        found: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None = native.direct(
            op, forced=_forced, asked=_asked, last=_last, module=_import("native", op)[0]
        )
        return found
    except ImportError:
        return None


def backend_of(module: ModuleType) -> str:
    """The backend that a module of an op belongs to."""
    package = module.__name__.rpartition(".")[0]
    return next((name for name, path in BACKENDS.items() if path == package), package)


def order(op: str, device: torch.device) -> tuple[str, ...]:
    """The order in which auto mode tries the backends for ``op`` on a device.

    An op's public module may have an ``ORDER`` of its own, or a function ``order_on`` of the device.
    """
    public = vars(_public(op))
    if "order_on" in public:
        chosen: tuple[str, ...] = public["order_on"](device)
        return chosen
    return public.get("ORDER", _ORDER)


@functools.cache
def _public(op: str) -> ModuleType:
    return importlib.import_module(f"rlkernel.ops.{op}")


def _load(
    name: str, op: str, tensors: tuple[Tensor, ...], options: dict[str, Any]
) -> tuple[ModuleType | None, list[str]]:
    module, why_not = _import(name, op)
    return module, [why_not] if module is None else module.unsupported(*tensors, **options)


@functools.cache
def _import(name: str, op: str) -> tuple[ModuleType | None, str]:
    path = f"{BACKENDS[name]}.{op}"
    try:
        if importlib.util.find_spec(BACKENDS[name]) is None or importlib.util.find_spec(path) is None:
            return None, f"has no {op}"
        return importlib.import_module(path), ""
    except ImportError as error:  # the backend's own dependency is missing: Triton, FlashInfer, the extension
        return None, str(error)
