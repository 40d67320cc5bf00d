"""Time of several calls side by side, and the two ceilings that a time is held against."""

import contextlib
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

import torch

_FLUSH_BYTES = 256 * 2**20  # more than any GPU's L2
_CYCLES = 2e9  # of a GPU in a second, at most
_MAX_ROUNDS = 200


def interleave(
    calls: Mapping[str, Callable[[], object]], device: str, seconds: float, rounds: int = 3
) -> dict[str, list[float]]:
    """Seconds of every call in each of at least ``rounds`` rounds, and in more while they fit in ``seconds``.

    The calls take turns, forwards and backwards (A B C, C B A, ...), so that whatever else the machine does
    falls on all of them alike and their ratios hold even where their times do not. A call that takes longer
    than ``seconds`` is timed once.
    """
    order = list(calls)
    times: dict[str, list[float]] = {name: [] for name in order}
    once = set()
    for name in order:
        if _cpu_seconds(calls[name]) > seconds:  # the warm-up: compiles, allocates, fills caches
            once.add(name)
    watches = {name: _gpu_watch(host_seconds(calls[name])) for name in order} if device == "cuda" else {}
    began = time.perf_counter()
    for done in range(_MAX_ROUNDS):
        spent = time.perf_counter() - began
        if done >= rounds and spent * (done + 1) / done > seconds:
            break
        for name in order if done % 2 == 0 else reversed(order):
            if name in once and done:
                continue
            times[name].append(watches.get(name, _cpu_seconds)(calls[name]))
    return times


def quartiles(values: Sequence[float]) -> list[float] | None:
    """What the middle half of ``values`` lies between; None of fewer than three."""
    if len(values) < 3:
        return None
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _cpu_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def host_seconds(call: Callable[[], object]) -> float:
    """How long a call keeps the CPU, of which a GPU sees nothing as long as it has work queued."""
    times: list[float] = []
    while len(times) < 5 and sum(times) < 0.1:
        torch.cuda.synchronize()
        times.append(_cpu_seconds(call))
    torch.cuda.synchronize()
    return statistics.median(times)


def _gpu_watch(host: float) -> Callable[[Callable[[], object]], float]:
    """A watch for calls that take ``host`` seconds to queue: by then the GPU is still busy with a wait.

    So it tells the time on the GPU, as in a training step whose queue is full, and not Python's.  A call that
    waits for the GPU itself pays for what it queues after that.
    """
    cycles = int(2 * min(host, 0.1) * _CYCLES)

    def seconds(call: Callable[[], object]) -> float:
        _flush().zero_()  # what the previous call left in the L2 must not help this one
        torch.cuda._sleep(cycles)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    return seconds


@cache
def _flush() -> torch.Tensor:
    return torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")


@cache
def copy_bandwidth(size: int, device: str, threads: int) -> float:
    """Bytes per second that a copy of ``size`` bytes reads plus writes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = interleave({"copy": lambda: target.copy_(source)}, device, 0.2, rounds=5)
    return 2 * size / min(times["copy"])


@cache
def gemm_rate(m: int, n: int, k: int, dtype: torch.dtype, device: str, threads: int) -> float:
    """Operations per second of ``torch.mm`` on [m, k] x [k, n]."""
    a = torch.randn(m, k, device=device).to(dtype)
    b = torch.randn(n, k, device=device).to(dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    times = interleave({"mm": lambda: torch.mm(a, b.t(), out=out)}, device, 0.5, rounds=3)
    return 2 * m * n * k / min(times["mm"])


def best_gemm_rate(
    shape: tuple[int, int, int], dtypes: Iterable[torch.dtype], device: str, threads: int
) -> float:
    """The most operations per second of a product that a pass may be made of: a floor must not be beaten.

    ``shape`` itself, and as tiles that stay in a CPU's caches the product and those of its two gradients.
    """
    m, n, k = shape
    tiles = [(min(a, 1024), min(b, 4096), c) for a, b, c in ((m, n, k), (m, k, n), (n, k, m))]
    shapes = dict.fromkeys([shape, *tiles])
    return max(gemm_rate(*product, dtype, device, threads) for product in shapes for dtype in dtypes)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeoutError when the block takes longer; in the main thread of a Unix process only."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def expire(signum: int, frame: object) -> None:
        raise TimeoutError(f"took longer than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
