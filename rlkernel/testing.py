"""What tests of numerical operators ask: equal bits, a distance in ulps, an error budget, odd shapes.

    from rlkernel import testing

    testing.assert_bitwise(mine, theirs)
    testing.assert_close_ulps(mine, theirs, 2)
    testing.assert_within_budget(mine, torchs, truth)  # truth in fp64
    testing.assert_batch_invariant(run, (logits, target_ids))

rlkernel's own tests stand on these; they need torch alone, and ``shapes`` Hypothesis.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkernel.consistency import assert_invariant as assert_batch_invariant
from rlkernel.consistency import bits

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = [
    "assert_batch_invariant",
    "assert_bitwise",
    "assert_close_ulps",
    "assert_within_budget",
    "poisoned",
    "shapes",
    "ulps",
]

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_bitwise(got: Tensor, want: Tensor, name: str = "result") -> None:
    """Raise AssertionError unless the two have the same bits; NaN equals NaN, and -0 is not 0.

    The message says how many elements differ, where the first one stands, and what is there in each.

    Examples:
        >>> x = torch.tensor([1.0, torch.nan])
        >>> testing.assert_bitwise(x * 2, x + x)
        >>> testing.assert_bitwise(torch.tensor([-0.0]), torch.tensor([0.0]))
        Traceback (most recent call last):
        AssertionError: result[0] is tensor(-0.), want tensor(0.); 1 differ
    """
    _same_kind(got, want, name)
    differs = bits.differ(got, want)
    if bool(differs.any()):
        where = tuple(differs.nonzero()[0].tolist())
        count = int(differs.sum())
        raise AssertionError(f"{name}{list(where)} is {got[where]!r}, want {want[where]!r}; {count} differ")


def ulps(got: Tensor, want: Tensor) -> Tensor:
    """How many floating-point numbers each two elements are apart, as int64: neighbours are 1 apart.

    -0 and 0 are the same number here; two NaN are 0 apart, and a NaN is 2**62 from any number.  Doubles with
    other signs count as 2**61 from 0 at most.

    Args:
        got: floating-point, of one, two, four or eight bytes an element.
        want: of the same shape and dtype.

    Examples:
        >>> testing.ulps(torch.tensor([1.0, 0.0]), torch.tensor([1.0 + 2**-22, -0.0]))
        tensor([2, 0])
    """
    _same_kind(got, want, "got")
    if not got.is_floating_point():
        raise ValueError(f"got must be floating-point, got {got.dtype}")
    nan = got.isnan(), want.isnan()
    a, b = _place(got), _place(want)
    far = a.abs().clamp(max=2**61) + b.abs().clamp(max=2**61)  # of doubles with other signs: within 64 bits
    distance = torch.where((a < 0) == (b < 0), (a - b).abs(), far)
    distance = torch.where(nan[0] ^ nan[1], 2**62, distance)
    return torch.where(nan[0] & nan[1], 0, distance)


def assert_close_ulps(got: Tensor, want: Tensor, most: int, name: str = "result") -> None:
    """Raise AssertionError where two elements are more than ``most`` units in the last place apart.

    Examples:
        >>> x = torch.rand(100)
        >>> testing.assert_close_ulps(x * 3, x + x + x, 1)
    """
    _same_kind(got, want, name)
    distance = ulps(got, want)
    if distance.numel() and int(distance.max()) > most:
        where = tuple((distance == distance.max()).nonzero()[0].tolist())
        count = int((distance > most).sum())
        raise AssertionError(
            f"{name}{list(where)} is {got[where]!r}, {int(distance[where])} units in the last place from "
            f"{want[where]!r}, at most {most} are allowed; {count} are further away"
        )


def assert_within_budget(
    got: Tensor, torchs: Tensor, truth: Tensor, name: str = "result", *, magnitude: float = 0.0
) -> None:
    """Raise AssertionError where ``got`` errs more than twice as much as PyTorch, and one unit besides.

    The budget is ``2 * max|torchs - truth| + eps * max(max|truth|, magnitude)``, where eps belongs to the
    dtype of ``got``.  NaN and infinities must stand at the same places as in the truth.

    Args:
        got: what is tested.
        torchs: the same by PyTorch, in the dtype of the inputs.
        truth: the same in fp64.
        magnitude: of the numbers whose difference the result is, where it may itself come out smaller.

    Examples:
        >>> x = torch.randn(4, 32)
        >>> mine = x - rlkernel.logprob(x, torch.zeros(4, dtype=torch.int64)).lse[:, None]
        >>> testing.assert_within_budget(mine, x.log_softmax(-1), x.double().log_softmax(-1))
    """
    ours, theirs = largest_error(got, truth), largest_error(torchs, truth)
    finite = truth[truth.isfinite()]
    largest = finite.abs().max().item() if finite.numel() else 0.0
    unit = torch.finfo(got.dtype).eps * max(largest, magnitude)
    if not ours <= 2 * theirs + unit:
        raise AssertionError(f"{name}: {ours:.3e} from fp64, PyTorch {theirs:.3e}, one ulp {unit:.1e}")


def largest_error(got: Tensor, truth: Tensor) -> float:
    """Largest absolute difference of what is finite; NaN and infinities must stand at the same places."""
    got, truth = got.detach().double().cpu(), truth.detach().double().cpu()
    if got.shape != truth.shape:
        raise AssertionError(f"shape {tuple(got.shape)}, truth has {tuple(truth.shape)}")
    special = ~truth.isfinite()
    same = torch.equal(got[special].nan_to_num(7e77), truth[special].nan_to_num(7e77))
    if not same or not bool(got[~special].isfinite().all()):
        raise AssertionError(f"non-finite values differ: {got} against {truth}")
    return (got - truth)[~special].abs().max().item() if bool((~special).any()) else 0.0


def poisoned(*shape: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """An output that nothing has written yet, so that what is forgotten shows: NaN, the least integer, True.

    Examples:
        >>> testing.poisoned(2, 3)
        tensor([[nan, nan, nan],
                [nan, nan, nan]])
    """
    if dtype == torch.bool:
        worst: Any = True
    else:
        worst = torch.nan if dtype.is_floating_point or dtype.is_complex else torch.iinfo(dtype).min
    return torch.full(shape, worst, dtype=dtype, device=device)


def shapes(
    *dimensions: Sequence[int], width: int = 32, make: Callable[..., Any] = tuple
) -> "SearchStrategy[Any]":
    """A Hypothesis strategy of shapes that find faults: empty, one row, lengths around multiples of a width.

    Args:
        dimensions: the smallest and the largest of each dimension.
        width: of a vector, a warp or a tile.
        make: of the numbers drawn, for example a function that makes the inputs.

    Examples:
        >>> from hypothesis import given
        >>> @given(testing.shapes((0, 5), (1, 100)))
        ... def holds(shape):
        ...     testing.assert_close_ulps(torch.ones(shape).exp().log(), torch.ones(shape), 1)
        >>> holds()
    """
    from hypothesis import strategies

    def lengths(low: int, high: int) -> "SearchStrategy[int]":
        edges = {low, high, low + 1, *(n + d for n in range(width, high + 1, width) for d in (-1, 0, 1))}
        inside = sorted(n for n in edges if low <= n <= high)
        return strategies.one_of(strategies.sampled_from(inside), strategies.integers(low, high))

    return strategies.tuples(*(lengths(*dimension) for dimension in dimensions)).map(make)


def _same_kind(got: Tensor, want: Tensor, name: str) -> None:
    if got.shape != want.shape or got.dtype != want.dtype:
        raise AssertionError(
            f"{name} must be {tuple(want.shape)} {want.dtype}, got {tuple(got.shape)} {got.dtype}"
        )


def _place(x: Tensor) -> Tensor:
    """Where a number stands among all of its dtype, 0 in the middle."""
    if x.dtype == torch.float8_e8m0fnu:  # of scales: a power of two without a sign
        return x.contiguous().view(torch.uint8).long()
    whole = x.contiguous().view(_INTEGERS[x.element_size()]).long()
    least = -(1 << (8 * x.element_size() - 1))
    return torch.where(whole < 0, least - whole, whole)
