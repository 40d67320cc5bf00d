"""Pre-allocated scratch memory.

A chunked op computes in tiles of one buffer whose size is a setting and does not depend on the number of
tokens.  There is one buffer per device and stream, so that two streams never share it; it grows to what an op
asks for, at most the limit, and is kept for the next call.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

import torch
from torch import Tensor

DEFAULT_LIMIT = 256 * 2**20
_MINIMUM = 2**20
_ALIGNMENT = 256  # bytes: what cuBLAS and 16-byte vector loads want of every part


class _Buffer:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.memory: Tensor | None = None


_limit: int | None = None
_lock = threading.Lock()
_buffers: dict[tuple[torch.device, int], _Buffer] = {}
_captured: list[Tensor] = []  # a CUDA graph holds addresses, not references: its memory must stay


def limit() -> int:
    """The most bytes that one op's tiles may take."""
    if _limit is not None:
        return _limit
    if (mib := os.environ.get("RLKERNEL_WORKSPACE_MIB")) is None:
        return DEFAULT_LIMIT
    try:
        size = int(float(mib) * 2**20)
    except ValueError:
        size = -1
    if size < _MINIMUM:
        raise ValueError(f"RLKERNEL_WORKSPACE_MIB must be a number >= 1, got {mib!r}")
    return size


def set_limit(size: int | None) -> None:
    """Set the most bytes that one op's tiles may take; None restores the environment's or the default 256
    MiB.

    Tiles follow from this limit, so it decides the last bits of ``linear_logprob``: use the same in rollout
    and trainer.

    Raises:
        ValueError: ``size`` is less than 1 MiB.
    """
    global _limit
    if size is not None and size < _MINIMUM:
        raise ValueError(f"size must be >= {_MINIMUM} bytes (1 MiB), got {size}")
    _limit = size
    release()


@contextlib.contextmanager
def limited(size: int) -> Iterator[None]:
    """``set_limit(size)`` inside the block."""
    before = _limit
    set_limit(size)
    try:
        yield
    finally:
        set_limit(before)


def release() -> None:
    """Free the buffers, except those that a captured CUDA graph will write to."""
    with _lock:
        _buffers.clear()


@contextlib.contextmanager
def lease(size: int, device: torch.device) -> Iterator[Tensor]:
    """At least ``size`` bytes of the buffer of ``device`` and its current stream, as a uint8 tensor.

    Other threads that want the same buffer wait until the block ends: on a GPU, autograd runs backward on a
    thread of its own, and what it launches then stands behind what the block launched on the same stream.
    """
    on_gpu = device.type == "cuda"
    key = (device, torch.cuda.current_stream(device).cuda_stream if on_gpu else 0)
    with _lock:
        buffer = _buffers.setdefault(key, _Buffer())
    with buffer.lock:
        if buffer.memory is None or buffer.memory.numel() < size:
            buffer.memory = (
                None  # before the allocation, so that the old and the new do not stand side by side
            )
            buffer.memory = torch.empty(size, dtype=torch.uint8, device=device)
        memory = buffer.memory
        if on_gpu and torch.cuda.is_current_stream_capturing() and all(memory is not x for x in _captured):
            _captured.append(memory)
        yield memory[:size]


_COUNTED = torch.empty(0)


class Carver:
    """Cuts tensors from one workspace buffer, in order.

    Used twice with the same calls: without a buffer it counts the bytes, with one it hands out the parts.
    """

    def __init__(self, buffer: Tensor | None = None) -> None:
        self.buffer, self.size = buffer, 0

    def part(self, *shape: int, dtype: torch.dtype) -> Tensor:
        start = self.size
        count = 1
        for extent in shape:
            count *= extent
        self.size += -(-count * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        if self.buffer is None:
            return _COUNTED
        return self.buffer[start : start + count * dtype.itemsize].view(dtype).view(shape)
