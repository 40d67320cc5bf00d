"""``assert_invariant``: a row's bits depend on no other row, nor on its place or its address."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.consistency import bits
from rlkernel.ops import _validate

# around the widths of tiles, where libraries change their kernels
SIZES = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 127, 128, 129, 257)


class Arrangement(NamedTuple):
    """The ``rows`` of the inputs, in this order; ``keeps`` is None, or which of them are compared."""

    name: str
    rows: Tensor
    inputs: tuple[Tensor, ...]
    keeps: Tensor | None = None


def assert_invariant(
    fn: Callable[..., Any],
    inputs: Tensor | Sequence[Tensor],
    *,
    sizes: Sequence[int] = SIZES,
    rows: int = 4,
    neighbours: Sequence[float] = (math.nan, math.inf, -math.inf),
    seed: int = 0,
) -> None:
    """Raise unless every row of ``fn(*inputs)`` has the same bits in whatever batch it is.

    ``fn`` runs on all rows, and then on ``rows`` single rows; on the first M and on M random ones in
    random order, for each M of ``sizes`` that is smaller than the number of rows; on all rows in another
    order, at another address, and with every second row, or all but one, replaced by each of ``neighbours``.

    ``torch.equal`` to the rows of the first run is what is asked; only NaN counts as equal to NaN.

    Args:
        fn: takes the inputs, gives a tensor or a tuple, list or dict of tensors (or None), each with a row
            for each row of the inputs.  What all rows share, such as a weight, it brings itself; for
            gradients it calls autograd itself.
        inputs: one or more tensors [N, ...]; ``fn`` gets copies
        sizes: numbers of rows
        rows: how many single rows, spread over the batch
        neighbours: what takes the place of a row's neighbours in inputs of floats; () where fn refuses it
        seed: of the random orders

    Raises:
        AssertionError: says in which arrangement which row differs, in how many elements and by how much, and
            whether the first run gives other bits when it is repeated.
        ValueError: an input has no rows, they differ in number, or an output has not one for each.

    Examples:
        >>> weight = torch.randn(32, 8)
        >>> rlkernel.consistency.assert_invariant(lambda x: rlkernel.matmul(x, weight), torch.randn(64, 32))
    """
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    count = _rows(given)
    for size in sizes:
        _validate.at_least_one("sizes", size)
    _validate.at_least_one("rows", rows)

    def first_run() -> list[tuple[str, Tensor]]:
        return _run(fn, tuple(x.clone() for x in given), count)

    whole = first_run()
    for case in _arrangements(given, count, sizes, rows, neighbours, seed):
        got = _run(fn, case.inputs, len(case.rows))
        if [name for name, _ in got] != [name for name, _ in whole]:
            raise ValueError(f"fn must give the same outputs for any rows, got others for {case.name}")
        for (name, a), (_, b) in zip(got, whole, strict=True):
            if told := _difference(case, name, a, b[case.rows.to(b.device)], count):
                again = dict(first_run())
                if any(bool(bits.differ(again[name], x).any()) for name, x in whole):
                    told += "; a second run of the same batch differs too"
                raise AssertionError(told)


def _rows(given: tuple[Tensor, ...]) -> int:
    if not given:
        raise ValueError("inputs must be a tensor or several, got none")
    for i, x in enumerate(given):
        _validate.is_tensor(f"inputs[{i}]", x)
        if x.dim() == 0 or len(x) == 0:
            raise ValueError(f"inputs[{i}] must have at least one row, got shape {tuple(x.shape)}")
        if len(x) != len(given[0]):
            raise ValueError(f"inputs[{i}] must have {len(given[0])} rows as inputs[0] has, got {len(x)}")
    return len(given[0])


def _run(fn: Callable[..., Any], inputs: tuple[Tensor, ...], count: int) -> list[tuple[str, Tensor]]:
    outputs = list(_named(fn(*inputs), "the output"))
    if not outputs:
        raise ValueError("fn must give a tensor, got none")
    for name, x in outputs:
        if x.dim() == 0 or len(x) != count:
            raise ValueError(f"{name} of fn must have a row for each of {count}, got {tuple(x.shape)}")
    return outputs


def _named(result: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(result, Tensor):
        yield name, result.detach()
    elif isinstance(result, dict):
        for key, value in result.items():
            yield from _named(value, f"output {key!r}")
    elif isinstance(result, (tuple, list)):
        for i, value in enumerate(result):
            yield from _named(value, f"output {i}")
    elif result is not None:
        raise ValueError(f"fn must give tensors, got {type(result).__name__}")


def _arrangements(
    given: tuple[Tensor, ...],
    count: int,
    sizes: Sequence[int],
    rows: int,
    neighbours: Sequence[float],
    seed: int,
) -> Iterator[Arrangement]:
    generator = torch.Generator().manual_seed(seed)

    def take(name: str, index: Tensor) -> Arrangement:
        return Arrangement(name, index, tuple(x[index.to(x.device)] for x in given))

    every = torch.arange(count, device="cpu")
    spread = [
        round(x)
        for x in torch.linspace(0, count - 1, min(rows, count), dtype=torch.float32, device="cpu").tolist()
    ]
    for size in sizes:
        if size == 1:
            for row in dict.fromkeys(spread):
                yield take(f"a batch of row {row} alone", every[row : row + 1])
        elif size < count:
            yield take(f"a batch of the first {size} rows", every[:size])
            yield take(f"a batch of {size} rows in random order", _order(count, generator)[:size])
    yield take("a batch of all rows in random order", _order(count, generator))
    yield Arrangement("a batch of all rows at another address", every, tuple(map(_elsewhere, given)))
    if count > 1 and any(x.is_floating_point() for x in given):
        for value in neighbours:
            yield _poisoned(given, every % 2 == 0, f"a batch in which every second row is {value}", value)
            kept = every == spread[len(spread) // 2]
            yield _poisoned(given, kept, f"a batch in which all rows but one are {value}", value)


def _order(count: int, generator: torch.Generator) -> Tensor:
    return torch.randperm(count, generator=generator, device="cpu")


def _elsewhere(x: Tensor) -> Tensor:
    """The same rows, beginning one element further."""
    room = x.new_empty(x.numel() + 1)[1:]
    return room.copy_(x.flatten()).view(x.shape)


def _poisoned(given: tuple[Tensor, ...], kept: Tensor, name: str, value: float) -> Arrangement:
    inputs = []
    for x in given:
        x = x.clone()
        if x.is_floating_point():
            x[~kept.to(x.device)] = value
        inputs.append(x)
    return Arrangement(name, torch.arange(len(kept), device="cpu"), tuple(inputs), kept)


def _difference(case: Arrangement, name: str, got: Tensor, want: Tensor, count: int) -> str:
    """What differs of an output; empty where nothing does."""
    if got.shape != want.shape or got.dtype != want.dtype:
        what = f"{tuple(want.shape)} {want.dtype} in {case.name}, got {tuple(got.shape)} {got.dtype}"
        raise ValueError(f"{name} of fn must be {what}")
    wrong = bits.differ(got, want)
    if case.keeps is not None:
        wrong[~case.keeps.to(wrong.device)] = False
    if not bool(wrong.any()):
        return ""
    by_row = wrong.flatten(1).any(1) if wrong.dim() > 1 else wrong
    place = int(by_row.nonzero()[0])
    row, elements = int(case.rows[place]), wrong[place]
    inside = elements.nonzero()[0].tolist()
    first = tuple([place, *inside])
    a, b = got[first], want[first]
    compared = len(case.rows) if case.keeps is None else int(case.keeps.sum())
    return (
        f"row {row} has other bits in {case.name} than in the batch of all {count}: "
        f"{int(elements.sum())} of {elements.numel()} elements of {name} differ"
        f"{_distance(got[place][elements], want[place][elements])}; the first, {[row, *inside]}, is "
        f"{a.item()!r} for {b.item()!r}; {int(by_row.sum())} of {compared} rows differ"
    )


def _distance(a: Tensor, b: Tensor) -> str:
    """By how much, over what is a number on both sides."""
    if not a.is_floating_point():
        return ""
    finite = a.isfinite() & b.isfinite()
    if not bool(finite.any()):
        return ", where a side is not finite"
    a, b = a[finite], b[finite]
    far = (a.double() - b.double()).abs().max().item()
    steps = int(bits.ulps(a, b).max())
    return f" by up to {steps:,} ULP{'' if steps == 1 else 's'} ({far:.3g})"
