"""Names of ops in a profile: ranges of torch's profilers, and of NVTX for a profiler outside of the process.

``rlkernel::gae[native]`` is a forward pass over that backend, ``rlkernel::logprob.backward[triton]``
a backward pass.  While nobody looks, an op asks two variables for that and nothing else.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd import profiler

from rlkernel import dispatch
from rlkernel.runtime import debug

VARIABLE = "RLKERNEL_NVTX"

nvtx = False  # of the process: on a GPU autograd runs backward on a thread of its own

_NOTHING = contextlib.nullcontext()
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
_always = False
_blocks: list["_Block"] = []  # the last one counts
_lock = threading.Lock()


class _Block:
    def __init__(self, on: bool) -> None:
        self.on = on


def asked() -> bool:
    """Whether ``RLKERNEL_NVTX`` is 1.

    Raises:
        RuntimeError: torch was built without NVTX.
        ValueError: the variable is neither 0 nor 1.
    """
    on = debug.flag(VARIABLE)
    if on:
        _need_nvtx(f"{VARIABLE}={os.environ[VARIABLE]}")
    return on


def set_up() -> None:
    """Let ``RLKERNEL_NVTX=1`` name the ops as ``nvtx_ranges`` does, as long as the process; raises as
    ``asked`` does."""
    global _always
    _always = asked()
    _settle()


@contextlib.contextmanager
def nvtx_ranges(on: bool = True) -> Iterator[None]:
    """Name every op that runs inside the block by a range of NVTX (roctx on AMD): its name, pass and backend.

    For profilers outside of the process, such as Nsight Systems; ``RLKERNEL_NVTX=1`` is one block around the
    whole process.  Profilers of torch's, ``emit_nvtx`` among them, show these names by themselves.  Blocks
    nest, each restores what it found, and they count for all threads.

    Raises:
        RuntimeError: it is to be on, and torch was built for a CPU alone.

    Examples:
        >>> with rlkernel.nvtx_ranges(torch.cuda.is_available()):
        ...     rlkernel.whiten(torch.tensor([1.0, 3.0]))
        tensor([-0.7071,  0.7071])
    """
    if on:
        _need_nvtx("nvtx_ranges")
    block = _Block(bool(on))
    try:
        with _lock:
            _blocks.append(block)
            _settle()
        yield
    finally:
        with _lock:
            if block in _blocks:  # no interrupt came before
                _blocks.remove(block)
            _settle()


def _settle() -> None:
    global nvtx
    nvtx = _blocks[-1].on if _blocks else _always


def _need_nvtx(what: str) -> None:
    if not hasattr(torch._C, "_nvtx"):
        raise RuntimeError(f"{what} needs a torch built for CUDA or ROCm, got {torch.__version__}")


def watched() -> bool:
    """Whether anybody looks; never a compiler, which is to see neither the question nor the range."""
    if _is_dynamo_compiling() or not (profiler._is_profiler_enabled or nvtx):
        return False
    return not torch.compiler.is_compiling()


def of(op: str, impl: Any = None, backward: bool = False) -> contextlib.AbstractContextManager[None]:
    """The range of one pass of ``op`` over ``impl``, which is what its ``pick`` gave: a backend's module, or
    several, of which the first gives the name; None for an op that is made of others."""
    if not watched():
        return _NOTHING
    return _range(name_of(op, impl, backward))


def name_of(op: str, impl: Any = None, backward: bool = False) -> str:
    one = impl[0] if isinstance(impl, tuple) else impl
    return f"rlkernel::{op}{'.backward' if backward else ''}{f'[{dispatch.backend_of(one)}]' if one else ''}"


@contextlib.contextmanager
def _range(name: str) -> Iterator[None]:
    recorded = profiler._is_profiler_enabled
    # emit_nvtx makes a range of what is recorded
    pushed = nvtx and not (recorded and torch._C._autograd._profiler_type().name == "NVTX")
    with profiler.record_function(name) if recorded else _NOTHING:
        if pushed:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if pushed:
                torch.cuda.nvtx.range_pop()
