"""Runs cases: parity, then memory, then speed of what passed; one row per backend and pass."""

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.bench import measure, memory, parity
from rlkernel.bench.cases import Bare, Call, Case, Peer
from rlkernel.bench.progress import Progress
from rlkernel.runtime import workspace

Row = dict[str, Any]
PASSES = ("forward", "forward+backward")
_GIB = 2**30
_START_LIMIT = 180.0  # seconds that a peer may take to start: torch.compile


@dataclass
class Settings:
    """What a run measures and on what."""

    suites: tuple[str, ...]
    device: str = "cpu"
    backends: tuple[str, ...] = ()  # () means all that this machine has
    peers: tuple[str, ...] | None = None  # None means all but those that run on request
    seconds: float = 1.0  # spent on the rounds of one pass of one case
    thorough: bool = True  # memory: also the resident set, and series also forward


@dataclass
class Contender:
    """A backend or a peer on one case, with what was found out about it."""

    name: str
    call: Call | None
    peer: Peer | None = None  # None: it is a backend
    skipped: str = ""
    errors: dict[str, parity.Error] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # of answers that no error of rounding excuses
    seconds: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)  # seconds of the CPU, where a GPU does the work
    peak: dict[str, int] = field(default_factory=dict)
    resident: dict[str, int | None] = field(default_factory=dict)

    @property
    def is_peer(self) -> bool:
        return self.peer is not None

    @property
    def bare(self) -> Bare | None:
        return None if self.peer is None else self.peer.bare

    def step(
        self, inputs: dict[str, Any], case: Case, grads: Mapping[str, Tensor], backward: bool
    ) -> Callable[[], Any]:
        """One pass as a call without arguments; with backward it returns outputs and gradients."""
        if self.bare is not None:
            return self.bare(inputs, case, backward)
        call = self.call
        assert call is not None
        if backward:
            return lambda: parity.outcome(call, inputs, case, grads)

        def forward() -> dict[str, Tensor]:
            with torch.no_grad():
                return call(inputs, case)

        return forward

    def found(self, p: str) -> dict[str, Any]:
        """What was found out about a pass."""
        errors = {n: e for n, e in self.errors.items() if n.startswith("grad_") == (p != "forward")}
        return {
            "skipped": self.skipped,
            "error": max(
                (e.largest if p == "forward" else e.relative for e in errors.values()), default=None
            ),
            "errors": {n: {"largest": e.largest, "relative": e.relative} for n, e in errors.items()},
            "seconds": statistics.median(self.seconds[p]) if p in self.seconds else None,
            "seconds_quartiles": measure.quartiles(self.seconds.get(p, ())),
            "host_seconds": self.host.get(p),
            "peak_extra_bytes": self.peak.get(p, self.peak.get("foreseen")),
        }


def steps(cases: Iterable[Case], settings: Settings) -> int:
    """How many progress steps ``run`` will make."""
    return sum(1 + len(suites_of(case, settings)) for case in cases)


def run(
    cases: Iterable[Case], modules: Mapping[str, ModuleType], settings: Settings, progress: Progress
) -> list[Row]:
    """Measure every case on every backend and peer; one that cannot run leaves its reason in the row."""
    return [row for case in cases for row in one(case, modules[case.op], settings, progress)]


def one(case: Case, module: ModuleType, settings: Settings, progress: Progress) -> list[Row]:
    """The rows of one case."""
    progress.step(f"{case.op} {case.name} {case.dtype}: inputs")
    with contextlib.ExitStack() as scaled:
        scaled.enter_context(workspace.limited(case.workspace or workspace.limit()))
        bench = _Bench(case, module, settings)
        for contender in bench.contenders if case.scale > 1 else ():
            if contender.peer is not None and contender.peer.shrink is not None:
                scaled.enter_context(contender.peer.shrink(case.scale))
        rows = bench.rows(progress)
    if settings.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def suites_of(case: Case, settings: Settings) -> list[str]:
    wanted = [suite for suite in settings.suites if suite in case.suites]
    # nothing is timed that was not shown to be right
    return ["parity", *wanted] if "speed" in wanted and "parity" not in wanted else wanted


class _Bench:
    def __init__(self, case: Case, module: ModuleType, settings: Settings) -> None:
        self.case, self.module, self.settings = case, module, settings
        self.inputs = parity.make_inputs(module, case, settings.device)
        self.grads = parity.upstream(module, case, self.inputs)
        self.backends = [Contender(n, parity.ours(module, case.op, n)) for n in _backends(settings, case)]
        self.passes = PASSES if settings.thorough or not case.axis else PASSES[1:]
        if not case.gradients:  # nothing is differentiated: a second pass would be the first once more
            self.passes = PASSES[:1]
        self.peers = [_peer(peer) for peer in _wanted(module.PEERS, settings, case)]
        # plain PyTorch is the yardstick of parity, also when it is not shown
        self.torch = next((p for p in self.peers if p.name == "torch"), None) or _peer(module.PEERS[0])
        self.floor: dict[str, float] = {}

    @property
    def contenders(self) -> list[Contender]:
        """Everything that can still run this case."""
        return [c for c in [*self.backends, *self.peers] if not c.skipped]

    def rows(self, progress: Progress) -> list[Row]:
        suites = suites_of(self.case, self.settings)
        self._probe()
        for suite in suites:
            progress.step(f"{self.case.op} {self.case.name} {self.case.dtype}: {suite}")
            getattr(self, f"_{suite}")()
        return [self._row(backend, p) for backend in self.backends for p in self.passes]

    def _probe(self) -> None:
        """Find out on a few rows what can run this case at all, and start what is slow to start."""
        for contender in [c for c in [*self.backends, *self.peers] if c.bare is None]:
            small = self.case.replace(sizes={**self.case.sizes, self.module.DIMS[0]: min(2, self.case.rows)})
            inputs, grads = self._first_rows(small.rows)
            if not contender.skipped:
                self._attempt(contender, contender.step(inputs, small, grads, backward=True))
        if self._needs() > memory.available(self.settings.device) // 4:
            for contender in self.contenders:
                self._guard(contender)

    def _needs(self) -> int:
        """Bytes of a few fp32 tensors of the size that a naive implementation makes."""
        return 16 * self.module.row_elements(self.case) * self.case.rows

    def _first_rows(self, count: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if hasattr(self.module, "first_rows"):
            return self.module.first_rows(self.inputs, self.grads, count)
        shared = parity.shared(self.module, self.inputs)
        inputs = {k: v if k in shared else v[:count] for k, v in self.inputs.items()}
        return inputs, {name: grad[:count] if grad.dim() else grad for name, grad in self.grads.items()}

    def _guard(self, contender: Contender) -> None:
        """Skip what would run the machine out of memory, as foreseen from two small calls."""

        def peak(count: int) -> int:
            inputs, grads = self._first_rows(count)
            return memory.peak_extra(contender.step(inputs, self.case, grads, True), self.settings.device)

        # bare GEMMs write one whole result of which _needs counts four
        need = self._needs() // 4 if contender.bare else memory.predict(peak, self.case.rows)
        free = memory.available(self.settings.device)
        if need > 0.8 * free:  # others use this machine too
            contender.skipped = (
                f"out of memory: needs {need / _GIB:.1f} GiB, {free / _GIB:.1f} GiB are available"
            )
            contender.peak["foreseen"] = need

    def _attempt(self, contender: Contender, action: Callable[[], Any]) -> None:
        """Run ``action``; a peer that fails is reported, not raised. A backend may only decline."""
        try:
            with measure.time_limit(_START_LIMIT):
                action()
        except NotImplementedError as error:
            contender.skipped = _reason(str(error), contender.name)
        except torch.OutOfMemoryError:
            contender.skipped = "out of memory"
        except Exception as error:
            if not contender.is_peer:
                raise
            contender.skipped = f"{type(error).__name__}: {error}".splitlines()[0]

    def _parity(self) -> None:
        truth = parity.Truth(self.module, self.case, self.inputs, self.grads)

        def judge(contender: Contender) -> None:
            got = self._step(contender, PASSES[1])()
            contender.errors = truth.errors(got)
            if hasattr(self.module, "wrong") and not contender.is_peer and contender.call is not None:
                contender.wrong = self.module.wrong(contender.call, self.inputs, self.case, got)

        for contender in {id(c): c for c in [self.torch, *self.contenders]}.values():
            if contender.bare is None:
                self._attempt(contender, functools.partial(judge, contender))
        if not self.torch.errors:  # it has not the memory for all rows at once
            slices = parity.Slices(self.module, self.case, self.inputs, self.grads)
            yardstick = self.module.PEERS[0].load()
            self.torch.errors = truth.errors(slices.outcome(yardstick, tuple(self.grads)))
        if hasattr(self.module, "of_every_token"):  # those that PyTorch drew may be the lucky ones
            self.torch.errors |= self.module.of_every_token(self.inputs, self.case)
        for backend in self.backends:
            backend.failures = [*parity.failures(backend.errors, self.torch.errors), *backend.wrong]

    def _memory(self) -> None:
        with memory.quick_collection():
            for contender in [c for c in self.contenders if c.bare is None]:
                for p in self.passes:
                    self._attempt(contender, functools.partial(self._weigh, contender, p))

    def _weigh(self, contender: Contender, p: str) -> None:
        step, device = self._step(contender, p), self.settings.device
        contender.peak[p] = memory.peak_extra(step, device)
        if not contender.is_peer and device == "cpu" and self.settings.thorough:
            contender.resident[p] = memory.peak_resident(step)

    def _step(self, contender: Contender, p: str) -> Callable[[], Any]:
        return contender.step(self.inputs, self.case, self.grads, p != "forward")

    def _speed(self) -> None:
        racers = [c for c in self.contenders if not c.failures]
        if all(c.is_peer for c in racers):
            return
        for p in self.passes:
            calls = {c.name: self._step(c, p) for c in racers}
            times = measure.interleave(calls, self.settings.device, self.settings.seconds)
            for contender in racers:
                contender.seconds[p] = times[contender.name]
                if self.settings.device == "cuda":
                    contender.host[p] = measure.host_seconds(calls[contender.name])
            self.floor[p] = self._floor(p != "forward")

    def _floor(self, backward: bool) -> float:
        """The least time that the copy bandwidth and the GEMM rate measured here allow for this pass."""
        device, threads = self.settings.device, torch.get_num_threads()
        largest = max(x.nbytes for x in self.inputs.values() if isinstance(x, Tensor))
        size = min(max(2 ** math.ceil(math.log2(largest)), 2**24), 2**29)
        seconds = self.module.bytes_moved(self.case, backward) / measure.copy_bandwidth(size, device, threads)
        if (shape := self.module.gemm(self.case)) is not None:
            # without matrix units a CPU multiplies bf16 slower than fp32
            dtypes = {self.case.torch_dtype, torch.float32} if device == "cpu" else {self.case.torch_dtype}
            rate = measure.best_gemm_rate(shape, dtypes, device, threads)
            seconds = max(seconds, self.module.flops(self.case, backward) / rate)
        return seconds

    def _row(self, backend: Contender, p: str) -> Row:
        case, backward = self.case, p != "forward"
        gradients = sum(self.inputs[name].nbytes for name in case.gradients) if backward else 0
        found, of_torch = backend.found(p), self.torch.found(p)
        return {
            "op": case.op,
            "case": case.name,
            "sizes": dict(case.sizes),
            "dtype": case.dtype,
            "device": self.settings.device,
            "backend": backend.name,
            "pass": p,
            "failures": [f for f in backend.failures if f.startswith("grad_") == backward],
            **found,
            "torch_error": of_torch["error"],
            "torch_errors": of_torch["errors"],
            "rounds": len(backend.seconds.get(p, ())),
            "bytes": self.module.bytes_moved(case, backward),
            "flops": self.module.flops(case, backward),
            "ratios": self.module.ratios(case, backward) if hasattr(self.module, "ratios") else {},
            "floor_share": self.floor[p] / found["seconds"] if found["seconds"] and p in self.floor else None,
            "peak_resident_bytes": backend.resident.get(p),
            "gradient_bytes": gradients,
            "workspace_bytes": case.workspace or workspace.limit(),
            "scale": case.scale,
            "axis": list(case.axis) if case.axis else None,
            "preferred": backend is self._preferred,
            "peers": {peer.name: self._peer_entry(peer, backend, p) for peer in self.peers},
        }

    @property
    def _preferred(self) -> Contender | None:
        """The backend that a user gets: the first able one in the op's order."""
        able = {c.name: c for c in self.backends if not c.skipped}
        order = dispatch.order(self.case.op, torch.device(self.settings.device))
        return next((able[name] for name in order if name in able), None)

    def _peer_entry(self, contender: Contender, backend: Contender, p: str) -> dict[str, Any]:
        note = contender.peer.cpu_note if contender.peer and self.settings.device == "cpu" else ""
        rounds = zip(
            contender.seconds.get(p, ()), backend.seconds.get(p, ()), strict=False
        )  # one may have less
        ratios = measure.quartiles([peer / own for peer, own in rounds])
        found = {**contender.found(p), "ratio_quartiles": ratios}
        return {**found, "bare": contender.bare is not None, "note": note}


def _backends(settings: Settings, case: Case) -> list[str]:
    if settings.backends:
        return list(settings.backends)
    # a series is about what a user gets; the reference is the oracle
    names = [name for name in dispatch.BACKENDS if not case.axis or name != "reference"]
    return [name for name in names if dispatch.has(name, case.op)]


def _wanted(peers: Iterable[Peer], settings: Settings, case: Case) -> list[Peer]:
    if settings.peers is None:
        return [peer for peer in peers if (peer.name in case.peers if case.peers else not peer.on_request)]
    return [peer for peer in peers if peer.name in settings.peers or "all" in settings.peers]


def _peer(peer: Peer) -> Contender:
    try:
        return Contender(peer.name, peer.load() if peer.bare is None else None, peer)
    except ImportError as error:
        return Contender(peer.name, None, peer, skipped=str(error))


def _reason(message: str, name: str) -> str:
    """Of the message that lists every backend's reasons, those of ``name``."""
    for line in message.splitlines():
        if line.strip().startswith(f"{name}: "):
            return line.strip().removeprefix(f"{name}: ")
    return message.splitlines()[0] if message else "not implemented"
