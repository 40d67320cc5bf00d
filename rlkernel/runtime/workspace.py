"""Pre-allocated scratch memory.

A chunked op computes in tiles of one buffer whose size is a setting and does not depend on the number of
tokens.  There is one buffer per device and stream, so that two streams never share it; it grows to what an op
asks for, at most the limit, and is kept for the next call.  While a CUDA graph is captured the memory is of
the graph's own pool instead: graphs may be replayed side by side, whatever stream they were captured on.
"""

import contextlib
import math
import os
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.runtime import gpu

__all__ = ["limit", "limited", "release", "set_limit"]  # what users call

DEFAULT_LIMIT = 256 * 2**20
GPU_LIMIT = 2**30  # of tens of GiB: tiles of 8192 rows fill every multiprocessor
_MINIMUM = 2**20
ALIGNMENT = 256  # bytes: what cuBLAS and 16-byte vector loads want of every part


class _Buffer:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.memory: Tensor | None = None
        self.kept: _Kept | None = None


class _Kept(NamedTuple):
    owner: weakref.ref[Tensor]
    size: int
    note: Any


class Lease(NamedTuple):
    """The memory of a lease: first what an earlier one kept for the same owner, then what was asked for."""

    memory: Tensor  # uint8
    kept: int  # bytes
    note: Any


_limit: int | None = None
_blocks: list[list[int | None]] = []  # of ``limited``: what each restores
_blocks_lock = threading.Lock()
_lock = threading.Lock()
_buffers: dict[tuple[torch.device, int], _Buffer] = {}


def _after_fork() -> None:
    """The child of a fork has not the thread that held a lock, which would be held for ever."""
    global _lock, _blocks_lock
    _lock, _blocks_lock = threading.Lock(), threading.Lock()
    _buffers.clear()


os.register_at_fork(after_in_child=_after_fork)


def limit(device: torch.device | None = None) -> int:
    """The most bytes that one op's tiles may take on ``device``.

    Examples:
        >>> rlkernel.workspace.limit(torch.device("cpu")) // 2**20
        256
    """
    if _limit is not None:
        return _limit
    if (mib := os.environ.get("RLKERNEL_WORKSPACE_MIB")) is None:
        return DEFAULT_LIMIT if device is None or device.type == "cpu" else GPU_LIMIT
    try:
        size = int(float(mib) * 2**20)
    except (ValueError, OverflowError):  # no number, or infinity
        size = -1
    if size < _MINIMUM:
        raise ValueError(f"RLKERNEL_WORKSPACE_MIB must be a number >= 1, got {mib!r}")
    return size


def set_limit(size: int | None) -> None:
    """Set the most bytes that one op's tiles may take; None restores the environment's or the default, 256
    MiB on a CPU and 1 GiB on a GPU.

    Tiles follow from this limit, so it decides the last bits of ``linear_logprob``: use the same in rollout
    and trainer.  With ``RLKERNEL_STORE_SCORES=1`` also those of the gradients of ``prefix_shared_attention``.

    Raises:
        ValueError: ``size`` is less than 1 MiB.

    Examples:
        >>> rlkernel.workspace.set_limit(64 * 2**20)
        >>> rlkernel.workspace.limit() // 2**20
        64
        >>> rlkernel.workspace.set_limit(None)
    """
    global _limit
    if size is not None and size < _MINIMUM:
        raise ValueError(f"size must be >= {_MINIMUM} bytes (1 MiB), got {size}")
    _limit = size
    release()


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """``set_limit(size)`` inside the block, for the whole process.

    Blocks of several threads may end in any order; after the last one the limit is what it was before the
    first.

    Examples:
        >>> with rlkernel.workspace.limited(64 * 2**20):
        ...     rlkernel.workspace.limit() // 2**20
        64
    """
    block: list[int | None] = []
    try:
        with _blocks_lock:
            block.append(_limit)
            _blocks.append(block)
            set_limit(size)  # which frees buffers: time enough for an interrupt
        yield
    finally:
        with _blocks_lock:
            at = next((i for i, x in enumerate(_blocks) if x is block), None)
            if at is not None:  # else an interrupt came before
                if at + 1 == len(_blocks):
                    set_limit(block[0])
                else:  # a block that another thread entered later still stands: it restores what was found
                    _blocks[at + 1][0] = block[0]
                del _blocks[at]


def release() -> None:
    """Free the buffers. What a captured CUDA graph writes to is the graph's.

    Examples:
        >>> rlkernel.workspace.release()
    """
    with _lock:
        _buffers.clear()


@contextlib.contextmanager
def lease(size: int, device: torch.device, owner: Tensor | None = None) -> Iterator[Lease]:
    """At least ``size`` bytes of the buffer of ``device`` and its current stream, as a uint8 tensor.

    Other threads that want the same buffer wait until the block ends: on a GPU, autograd runs backward on a
    thread of its own, and what it launches then stands behind what the block launched on the same stream.

    What the last lease kept (see ``keep``) stands before them when ``owner`` is the very tensor that it was
    kept for, and there was room for both; it is lost with this lease in any case.
    """
    if gpu.capturing(device):
        yield Lease(torch.empty(size, dtype=torch.uint8, device=device), 0, None)
        return
    buffer = _buffer(device)
    with buffer.lock:
        if buffer.memory is None or buffer.memory.numel() < size:
            buffer.memory = buffer.kept = (
                None  # before the allocation, so that the old and the new do not stand side by side
            )
            buffer.memory = torch.empty(size, dtype=torch.uint8, device=device)
        memory, kept, buffer.kept = buffer.memory, buffer.kept, None
        there = kept is not None and owner is not None and kept.owner() is owner
        if kept is None or not there or kept.size + size > memory.numel():
            yield Lease(memory[:size], 0, None)
        else:
            yield Lease(memory[: kept.size + size], kept.size, kept.note)


def keep(device: torch.device, owner: Tensor, size: int, note: Any = None) -> None:
    """Inside a lease: leave its first ``size`` bytes to the next one, should it come for the same ``owner``.

    Nothing is reserved: any lease in between takes the memory, and then the owner computes again; so it does
    where a CUDA graph is captured.
    """
    if gpu.capturing(device):
        return
    buffer = _buffer(device)
    with buffer.lock:
        buffer.kept = _Kept(weakref.ref(owner), size, note)


def kept_for(device: torch.device, owner: Tensor) -> Any:
    """The note beside what was kept for ``owner``; None where that is not there any more."""
    kept = _buffer(device).kept
    return kept.note if kept is not None and kept.owner() is owner else None


def _buffer(device: torch.device) -> _Buffer:
    key = (device, gpu.raw_stream(device) if device.type == "cuda" else 0)
    if (buffer := _buffers.get(key)) is None:
        with _lock:
            buffer = _buffers.setdefault(key, _Buffer())
    return buffer


_COUNTED = torch.empty(0, dtype=torch.float32, device="cpu")


class Carver:
    """Cuts tensors from one workspace buffer, in order.

    Used twice with the same calls: without a buffer it counts the bytes, with one it hands out the parts.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        self.buffer, self.size = buffer, 0

    def part(self, *shape: int, dtype: torch.dtype) -> Tensor:
        start = self.size
        size = math.prod(shape) * dtype.itemsize
        self.size += -(-size // ALIGNMENT) * ALIGNMENT
        if self.buffer is None:
            return _COUNTED
        return self.buffer[start : start + size].view(dtype).view(shape)
