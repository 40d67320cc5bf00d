"""How long a run will take: said before it begins, and corrected by what its cases have taken so far."""

import math
import time
from collections.abc import Callable, Mapping
from types import ModuleType

from rlkernel import dispatch
from rlkernel.bench.cases import Case
from rlkernel.bench.run import PASSES, Settings, suites_of

# What a core of a server does, roughly: it is for a first guess, which the first cases correct.
_ELEMENTS = 1e9  # of a temporary of plain PyTorch, forward and backward, a second
_FLOPS = 1e11
_GPU = 50  # times as much
_CASE = 0.3  # seconds for inputs, peers that are imported and what is tried on a few rows
_WEIGHED = 0.05  # for one pass of one contender whose memory is tracked
_CALLS = {"parity": 4.0, "memory": 2.0, "speed": 4.0}  # of each contender; the oracle counts as several
START = 8.0  # until peers, and what they import, are there
ON_CPU = ("native", "reference")  # the others ask for a GPU
INTERPRETED = 1.5  # seconds for an op in Triton's interpreter


def of_case(case: Case, module: ModuleType, settings: Settings) -> float:
    """Seconds of a case, by what it has to do."""
    faster = _GPU if settings.device == "cuda" else 1
    elements = module.row_elements(case) * case.rows
    call = (elements / _ELEMENTS + module.flops(case, True) / _FLOPS) / faster
    backends = settings.backends or [
        name
        for name in (ON_CPU if settings.device == "cpu" else dispatch.BACKENDS)
        if dispatch.has(name, case.op) and not (case.axis and name == "reference")
    ]
    peers = case.peers or settings.peers or [peer.name for peer in module.PEERS if not peer.on_request]
    contenders = len(backends) + len(peers)
    passes = len(PASSES) if case.gradients else 1
    total = _CASE
    for suite in suites_of(case, settings):
        total += contenders * call * _CALLS[suite]
        if suite == "memory":
            total += contenders * passes * _WEIGHED
        if suite == "speed":
            total += passes * settings.seconds + (0.8 if module.gemm(case) else 0.1)  # the floor's GEMMs
    return total


class Remaining:
    """Seconds that are left, from first guesses by key and what took how long."""

    def __init__(self, guesses: Mapping[str, float], clock: Callable[[], float] = time.monotonic) -> None:
        self.guesses, self._clock = dict(guesses), clock
        self.guessed = self.spent = 0.0  # of what is done
        self._running, self._began = "", 0.0

    def __call__(self) -> float:
        # a few seconds of the guess itself keep the first, short cases from having all the say
        share = (self.spent + 5.0) / (self.guessed + 5.0)
        gone = self._clock() - self._began if self._running else 0.0
        running = max(0.0, self.guesses.get(self._running, 0.0) * share - gone)
        others = sum(guess for key, guess in self.guesses.items() if key != self._running)
        return running + others * share

    def begin(self, key: str) -> None:
        self._running, self._began = key, self._clock()

    def done(self) -> float:
        """How long took what began last."""
        seconds = self._clock() - self._began
        self.guessed += self.guesses.pop(self._running)
        self.spent += seconds
        self._running = ""
        return seconds


def words(seconds: float) -> str:
    """``40 s``, ``2 min``, ``1 h 10 min``: no more digits than the guess has."""
    if seconds < 50:
        return f"{max(5, 5 * math.ceil(seconds / 5))} s"
    minutes = math.ceil(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
