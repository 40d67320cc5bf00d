"""Times of a call as it is and under ``rlkernel.batch_invariant``, taken by turns.

Whatever else the machine does falls on both of a pair alike, so their ratio holds where their times do not.
"""

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from rlkernel.consistency.mode import batch_invariant

MODES = ("default", "batch_invariant")
LEAST_SECONDS = 0.004  # of a sample: shorter calls are repeated, or the clock's grain would show
COLD_SECONDS = 0.1  # longer calls do not see in what state the caches were
MOST_PAIRS = 41
Call = Callable[[], object]


class Pairs(NamedTuple):
    """Seconds of one call in each pair, of both modes."""

    default: list[float]
    batch_invariant: list[float]

    def summary(self) -> dict[str, Any]:
        """Medians, and of the pairs' ratios the median and what the middle half of them lies between."""
        ratios = sorted(b / a for a, b in zip(*self, strict=True))
        low, high = (ratios[0], ratios[-1])
        if len(ratios) >= 4:
            low, _, high = statistics.quantiles(ratios, n=4)
        return {
            "default_seconds": statistics.median(self.default),
            "invariant_seconds": statistics.median(self.batch_invariant),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [low, high],
            "pairs": len(ratios),
        }


def mode_named(mode: str) -> AbstractContextManager[object]:
    return batch_invariant() if mode == "batch_invariant" else contextlib.nullcontext()


def pairs(default: Call, invariant: Call, seconds: float, least: int = 3) -> Pairs:
    """At least ``least`` pairs, and more while they fit in ``seconds``.

    Which of a pair is first changes from pair to pair.  Entering the mode is not timed, nor is a first call
    in each mode, which checks torch's kernels and fills caches.
    """
    calls = dict(zip(MODES, (default, invariant), strict=True))
    fastest = math.inf
    for mode, call in calls.items():
        with mode_named(mode):
            call()
            fastest = min(fastest, _each(call))
    repeats = max(1, math.ceil(LEAST_SECONDS / fastest))
    found = Pairs([], [])
    began = time.perf_counter()
    for done in range(MOST_PAIRS):
        spent = time.perf_counter() - began
        if done >= least and spent * (done + 1) / done > seconds:
            break
        for mode in MODES if done % 2 else reversed(MODES):
            with mode_named(mode):
                if fastest < COLD_SECONDS:
                    for _ in range(1 + repeats // 4):  # what entering the mode pushed out of the caches
                        calls[mode]()
                getattr(found, mode).append(timed(calls[mode], repeats))
    return found


def _each(call: Call) -> float:
    """Seconds of one call, of so many that the clock sees them."""
    repeats = 1
    while (seconds := timed(call, repeats)) * repeats < LEAST_SECONDS:
        repeats *= 4
    return seconds


def timed(call: Call, repeats: int = 1) -> float:
    """Seconds of a call: of the processor where one thread works, of the clock where several do or a GPU."""
    on_a_gpu = torch.get_default_device().type == "cuda"
    clock = time.process_time if torch.get_num_threads() == 1 and not on_a_gpu else time.perf_counter
    wait = torch.cuda.synchronize if on_a_gpu else time.process_time
    wait()
    began = clock()
    for _ in range(repeats):
        call()
    wait()
    return (clock() - began) / repeats
