"""Peak extra memory of a call: what it holds at its worst, beyond what was there when it began.

On a GPU the caching allocator's own statistics. On a CPU every allocation and release of PyTorch's CPU
allocator, in order: exact to the byte, also inside operators, but blind to what a library takes elsewhere.
``peak_resident`` sees that too, from the kernel's high-water mark, to the page and only for large blocks.
"""

import contextlib
import ctypes
import gc
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from rlkernel.runtime import workspace

METHOD = {
    "cpu": "every allocation of PyTorch's CPU allocator during the call, tracked in order",
    "cuda": "torch.cuda.max_memory_allocated during the call, minus what was allocated before it",
}


@contextlib.contextmanager
def quick_collection() -> Iterator[None]:
    """Inside the block, garbage collection skips what was there before it: peers import a million objects."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def peak_extra(call: Callable[[], object], device: str) -> int:
    """Bytes that ``call`` holds at its peak beyond what there was before; the workspace counts as its own."""
    workspace.release()
    gc.collect()
    if device == "cuda":
        return _peak_cuda(call)
    return max(itertools.accumulate(_allocations(call), initial=0))


def _peak_cuda(call: Callable[[], object]) -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _allocations(call: Callable[[], object]) -> list[int]:
    """Bytes of each allocation (positive) and release (negative) of the CPU allocator, in order.

    The record-only profiler behind ``torch.autograd``: the Kineto one prints to stderr whenever it starts.
    """
    from torch.autograd import (
        ProfilerConfig,
        ProfilerState,
        _disable_profiler_legacy,
        _enable_profiler_legacy,
    )

    experimental: Any = torch._C._profiler._ExperimentalConfig()
    shapes, memory, stack, flops, scopes = False, True, False, False, False
    _enable_profiler_legacy(
        ProfilerConfig(ProfilerState.CPU, shapes, memory, stack, flops, scopes, experimental)
    )
    try:
        result = call()
    finally:
        threads = _disable_profiler_legacy()
    del result
    begin = threads[0][0]
    # one list per thread; a CPU backward runs in the calling thread, so there is normally one
    events = [
        (begin.cpu_elapsed_us(e), e.cpu_memory_usage())
        for t in threads
        for e in t
        if e.kind() == "memory_alloc"
    ]
    if len(threads) > 1:
        events.sort(key=lambda event: event[0])
    return [change for _, change in events]


def peak_resident(call: Callable[[], object]) -> int | None:
    """Growth of the resident set at its highest during ``call``, in bytes; None where Linux does not tell."""
    workspace.release()
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # glibc hands out freed pages again, and they would not show
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark falls to what is resident now
        before = stated("/proc/self/status", "VmHWM")
        call()
        return stated("/proc/self/status", "VmHWM") - before
    except (OSError, AttributeError):  # no such file, or a libc without malloc_trim
        return None


def stated(path: str, field: str) -> int:
    """Bytes that a line of a file of /proc states.  Raises OSError where there is no such file or line."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"{path} must have {field}")


def available(device: str) -> int:
    """Bytes that one more call may take on ``device`` without driving the machine out of memory."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        limits = [stated("/proc/meminfo", "MemAvailable")]
    except OSError:  # not Linux: assume a small machine
        limits = [4 * 2**30]
    # a container may be allowed less than the machine has
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            root = Path("/sys/fs/cgroup")
            limits.append(int((root / limit).read_text()) - int((root / used).read_text()))
        except (OSError, ValueError):  # this kind of limit does not exist here, or is "max"
            continue
    return min(limits)


def predict(measure: Callable[[int], int], size: int) -> int:
    """Peak bytes at ``size`` rows, from two small measurements: a constant plus a share of the rows."""
    small, twice = max(1, size // 16), max(2, size // 8)
    first, second = measure(small), measure(twice)
    slope = max(0.0, (second - first) / (twice - small))
    return int(first + slope * (size - small))
