"""``trace``: the first module at which two runs of a model part."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlkernel.consistency import fingerprints
from rlkernel.consistency.findings import Difference, Trace, label
from rlkernel.consistency.fingerprints import Fingerprint, Room
from rlkernel.ops import _validate

Rows = Callable[[Tensor], Tensor | None]
Run = Callable[[nn.Module, Any], Any]
Names = Callable[[str], str | None]


def trace(
    model_a: nn.Module,
    model_b: nn.Module,
    batch: Any,
    batch_b: Any = None,
    *,
    run_a: Run | None = None,
    run_b: Run | None = None,
    rows_a: Rows | None = None,
    rows_b: Rows | None = None,
    names_b: Names | None = None,
    memory: int = 2**31,
) -> Trace:
    """Run two models and report the modules whose outputs differ in a bit, the first of them first.

    The models may be one and the same, run on two forms of a batch or under two settings.  Both runs begin
    with the same state of torch's random numbers; gradient mode and everything else is the caller's.

    Args:
        model_a, model_b: their modules are matched by name and count of calls
        batch: a dict is given to the model as keywords, a tuple or list as arguments, all else as one
        batch_b: that of ``model_b``, where it is another
        run_a, run_b: ``run(model, batch)`` calls the model where a plain call is not what is wanted: under a
            context, through an engine, for several steps
        rows_a, rows_b: from a tensor to rows [R, ...] that mean the same on both sides, or None where it has
            no such rows: ``padded_rows(mask)`` and ``packed_rows(count)``.  Without them a row is what the
            last dimension holds.
        names_b: from a name of ``model_b`` to that of its like in ``model_a``; None leaves it out
        memory: bytes of the first run's outputs that are kept on the CPU.  Of what finds no room there are
            the hashes of all rows and the values of some: which rows differ is known all the same, by how
            much is known of those some.

    Raises:
        ValueError: a model is no module, or no module's name and calls are the same in both.

    The hooks are removed whatever happens.

    Examples:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        >>> rlkernel.consistency.trace(model, model, torch.randn(2, 4)).identical
        True
    """
    for name, model in (("model_a", model_a), ("model_b", model_b)):
        if not isinstance(model, nn.Module):
            raise ValueError(f"{name} must be a torch.nn.Module, got {type(model).__name__}")
    _validate.number("memory", memory, 0)
    first = _Recorder(rows_a, Room(int(memory)))
    _record(model_a, batch, run_a, None, first)
    second = _Comparer(rows_b, first.seen)
    _record(model_b, batch if batch_b is None else batch_b, run_b, names_b, second)
    if not second.matched and not second.shapes:
        ours, theirs = (sorted({key.module for key in x})[:3] for x in (first.seen, second.only))
        raise ValueError(f"model_b must have modules that run under model_a's names {ours}, got {theirs}")
    return _findings(first, second, _Weights(model_a, model_b, names_b))


def padded_rows(mask: Tensor) -> Rows:
    """The rows of [B, L, ...] where ``mask`` [B, L] is set; of other tensors none.

    Examples:
        >>> rows = rlkernel.consistency.padded_rows(torch.tensor([[1, 1], [1, 0]]))
        >>> rows(torch.zeros(2, 2, 8)).shape
        torch.Size([3, 8])
    """
    chosen = mask != 0

    def rows(x: Tensor) -> Tensor | None:
        return x[chosen.to(x.device)] if x.shape[:2] == chosen.shape else None

    return rows


def packed_rows(count: int) -> Rows:
    """The rows of [1, N, ...] or [N, ...] up to ``count``; of other tensors none.

    Examples:
        >>> rows = rlkernel.consistency.packed_rows(3)
        >>> rows(torch.zeros(1, 4, 8)).shape
        torch.Size([3, 8])
    """

    def rows(x: Tensor) -> Tensor | None:
        if x.dim() > 1 and x.shape[0] == 1 and x.shape[1] >= count:
            x = x[0]
        return x[:count] if x.dim() and x.shape[0] >= count else None

    return rows


class _Key(NamedTuple):
    """A tensor that goes into a call of a module, or comes out."""

    module: str
    call: int
    side: str  # "in" or "out"
    slot: str


class _Watcher(abc.ABC):
    """Gets every tensor in the order of the run."""

    def __init__(self, rows: Rows | None) -> None:
        self.rows = rows
        self.calls: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        self.open: dict[str, list[int]] = {}

    def before(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = self.calls.get(name, 0)
        self.calls[name] = call + 1
        self.kinds[name] = type(module).__name__
        self.open.setdefault(name, []).append(call)
        self._take(name, call, "in", (*args, kwargs) if kwargs else args)

    def after(self, name: str, result: Any) -> None:
        self._take(name, self.open[name].pop(), "out", result)

    def _take(self, name: str, call: int, side: str, tensors: Any) -> None:
        for slot, x in _tensors(tensors):
            rows = _by_last(x) if self.rows is None else self.rows(x)
            if rows is not None:
                places = x.shape[: max(x.dim() - 1, 1)] if self.rows is None else rows.shape[:1]
                self.take(_Key(name, call, side, slot), rows, places or torch.Size([1]))

    @abc.abstractmethod
    def take(self, key: _Key, rows: Tensor, places: torch.Size) -> None:
        """``rows`` stand at ``places`` of the tensor."""


class _Recorder(_Watcher):
    def __init__(self, rows: Rows | None, room: Room) -> None:
        super().__init__(rows)
        self.room = room
        self.seen: dict[_Key, tuple[Fingerprint, torch.Size]] = {}

    def take(self, key: _Key, rows: Tensor, places: torch.Size) -> None:
        room = self.room if key.side == "out" else None
        self.seen[key] = fingerprints.fingerprint(rows, room), places


class _Comparer(_Watcher):
    def __init__(self, rows: Rows | None, seen: dict[_Key, tuple[Fingerprint, torch.Size]]) -> None:
        super().__init__(rows)
        self.seen = seen
        self.matched: dict[_Key, fingerprints.Distance | None] = {}
        self.only: list[_Key] = []
        self.shapes: dict[_Key, str] = {}

    def take(self, key: _Key, rows: Tensor, places: torch.Size) -> None:
        if key not in self.seen:
            self.only.append(key)
            return
        one, _ = self.seen[key]
        if one.shape != rows.shape or one.dtype.is_floating_point != rows.is_floating_point():
            self.shapes[key] = f"{list(one.shape)} and {list(rows.shape)}"
            return
        self.matched[key] = fingerprints.distance(one, rows)


def _by_last(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.dim() > 1 else x.reshape(-1)


def _tensors(x: Any, slot: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a module's arguments or result, with their place in it."""
    inside: Iterator[tuple[Any, Any]]
    if isinstance(x, Tensor):
        yield slot, x
        return
    if isinstance(x, Mapping):
        inside = iter(x.items())
    elif isinstance(x, (tuple, list)):
        inside = iter(enumerate(x))
        if len(x) == 1:  # a tensor by itself, for all that it matters
            yield from _tensors(x[0], slot)
            return
    elif dataclasses.is_dataclass(x) and not isinstance(x, type):
        inside = ((field.name, getattr(x, field.name)) for field in dataclasses.fields(x))
    else:
        return
    for name, value in inside:
        yield from _tensors(value, f"{slot}.{name}" if slot else str(name))


def _record(
    model: nn.Module,
    batch: Any,
    run: Run | None,
    names: Names | None,
    watcher: _Watcher,
) -> None:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    handles = []
    try:
        for own, module in model.named_modules():
            name = own if names is None else names(own)
            if name is not None:
                handles += _hooked(module, name, watcher)
        with torch.random.fork_rng(list(devices)):
            (run or _called)(model, batch)
    finally:
        for handle in handles:
            handle.remove()


def _hooked(module: nn.Module, name: str, watcher: _Watcher) -> list[Any]:
    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        watcher.before(name, module, args, kwargs)

    def after(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        watcher.after(name, result)

    return [
        module.register_forward_pre_hook(before, with_kwargs=True),
        module.register_forward_hook(after, with_kwargs=True),
    ]


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, (tuple, list)) else model(batch)


def _findings(first: _Recorder, second: _Comparer, weights: _Weights) -> Trace:
    inputs: dict[tuple[str, int], list[bool]] = {}
    for key, distance in second.matched.items():
        if key.side == "in":
            inputs.setdefault((key.module, key.call), []).append(distance is None)
    outputs = [k for k in first.seen if k.side == "out" and k in second.matched]
    differences = []
    for key in outputs:
        distance = second.matched[key]
        if distance is None:
            continue
        places = first.seen[key][1]
        went_in = inputs.get((key.module, key.call), [])
        difference = Difference(
            module=key.module,
            kind=first.kinds[key.module],
            call=key.call,
            output=key.slot,
            inputs_equal=all(went_in) if went_in else None,
            inputs_compared=len(went_in),
            weights_equal=weights.equal(key.module),
            place=tuple(
                int(x) for x in torch.unravel_index(torch.tensor(distance.first, device="cpu"), places)
            ),
            distance=distance,
        )
        differences.append(difference)
    missing = [k for k in first.seen if k not in second.matched and k not in second.shapes]
    alone = [_named(k) for k in (*missing, *second.only) if k.side == "out"]
    return Trace(
        differences=tuple(differences),
        compared=len(outputs),
        unmatched=tuple(dict.fromkeys(alone)),
        incomparable=tuple(f"{_named(k)} {text}" for k, text in second.shapes.items() if k.side == "out"),
        verdict=_verdict(first, second, differences),
    )


def _named(key: _Key) -> str:
    return label(key.module, key.call, key.slot)


def _verdict(first: _Recorder, second: _Comparer, differences: list[Difference]) -> str:
    """Who parts the runs, by the first tensor that differs, be it an input or an output."""
    if not second.matched:
        return "nothing could be compared"
    key = next((k for k in first.seen if second.matched.get(k) is not None), None)
    if key is None:
        return "all that was compared has the same bits"
    if key.side == "in":
        if not key.module:
            return "the two models get different inputs"
        parent, _, _ = key.module.rpartition(".")
        return (
            f"{label(key.module, key.call)} is the first whose inputs differ, and no output differs before: "
            f"the runs part in what {label(parent)} does between its modules"
        )
    found = differences[0]
    whose = f"{label(key.module, key.call)} ({found.kind})"
    if found.weights_equal is False:
        return f"{whose} is the first whose output differs, and its weights differ"
    if found.inputs_equal is None:
        return f"{whose} is the first whose output differs; none of its inputs could be compared"
    below = f"{key.module}." if key.module else ""
    has_modules = any(k.module.startswith(below) and k.module != key.module for k in first.seen)
    where = ", in what it does itself: the modules in it agree" if has_modules else ""
    return f"{whose} gives other bits for equal inputs{where}"


class _Weights:
    """Parameters and buffers of modules of equal names; each is compared once, when it is asked for."""

    def __init__(self, model_a: nn.Module, model_b: nn.Module, names_b: Names | None) -> None:
        self.a, self.b = _weights(model_a, None), _weights(model_b, names_b)
        self.known: dict[str, bool] = {}

    def equal(self, module: str) -> bool | None:
        below = f"{module}." if module else ""
        ours, theirs = ({x for x in side if x.startswith(below)} for side in (self.a, self.b))
        if ours != theirs or any(self.a[x].shape != self.b[x].shape for x in ours):
            return None
        return all(self._same(x) for x in sorted(ours))

    def _same(self, name: str) -> bool:
        if name not in self.known:
            a, b = self.a[name], self.b[name]
            self.known[name] = a is b or torch.equal(*(fingerprints.hashes(_by_last(x)) for x in (a, b)))
        return self.known[name]


def _weights(model: nn.Module, names: Names | None) -> dict[str, Tensor]:
    found = {}
    for own, module in model.named_modules():
        name = own if names is None else names(own)
        if name is not None:
            below = f"{name}." if name else ""
            for each in (module.named_parameters(recurse=False), module.named_buffers(recurse=False)):
                found.update({below + key: x for key, x in each})
    return found
