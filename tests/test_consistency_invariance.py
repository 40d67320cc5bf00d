"""``consistency.assert_invariant`` finds what makes a row depend on its batch, and nothing else."""

import math

import bitwise
import pytest
import torch

import rlkernel
from rlkernel.consistency import assert_invariant, invariance


def rows(count=130, width=48, seed=0):
    """Sums that depend on their order."""
    return bitwise.probe(count, width, torch.float32, "cpu")


def total(x, parts=1):
    """Of each row, added one column after another, in so many parts."""
    sums = [sum(part.unbind(1)) for part in x.chunk(parts, 1)]
    return sum(sums)


def test_what_is_invariant_passes():
    x = rows()
    assert_invariant(total, x)
    assert_invariant(lambda x: (total(x), None, {"twice": total(x) * 2}), [x])
    assert_invariant(lambda x, ids: x.gather(1, ids), (x, torch.arange(130)[:, None] % 48))
    assert_invariant(lambda x: x / 0, x)  # infinities
    assert_invariant(lambda x: x * (math.nan if len(x) > 1 else -math.nan), x)  # all NaNs are alike
    logits, ids = rows(20, 300), torch.arange(20)
    assert_invariant(lambda x, i: rlkernel.logprob(x, i).logprobs, (logits, ids))


def test_every_arrangement_is_tried():
    seen = []

    def spy(x):
        seen.append(x.clone())
        return x[:, 0]

    x = torch.arange(300.0)[:, None] * torch.ones(1, 2) + 1
    assert_invariant(spy, x)
    assert {len(one) for one in seen} == {*invariance.SIZES, 300}
    assert sum(len(one) == 1 for one in seen) == 4
    alone = [one[0, 0].item() for one in seen if len(one) == 1]
    assert (alone[0], alone[-1]) == (1, 300)
    assert any(len(one) == 17 and one[0, 0] != 1 for one in seen)
    for value in (math.nan, math.inf, -math.inf):
        poisoned = [(~(one == value) & ~one.isnan()).all(1) for one in seen if len(one) == 300]
        assert {int(kept.sum()) for kept in poisoned} >= ({1, 150} if math.isnan(value) else {150})
    assert [one for one in seen if len(one) == 300][0].equal(x)
    few = []
    assert_invariant(lambda x: few.append(len(x)) or x, x[:5], sizes=(2, 5, 8), rows=1, neighbours=())
    assert few == [5, 2, 2, 5, 5]


def by_size(x):
    """A library that splits the sum of few rows."""
    return total(x, 4 if len(x) < 129 else 1)


def at_one_size(x):
    return total(x, 2 if len(x) == 33 else 1)


def by_place(x):
    """Noise that is keyed by the row of the launch."""
    return total(x) + torch.arange(len(x)) * 1e-3


def leaking(x):
    """Nothing times a neighbour: only NaN and infinity show it."""
    return total(x) + 0 * x.flip(0)[:, 0]


def by_neighbour_maximum(x):
    """One maximum for the batch in place of a row's own, as a tile of several rows would take."""
    return (x - x.max()).exp().log()[:, 0]


def by_address(x):
    return total(x, 1 if x.data_ptr() % 16 == 0 else 3)


def signed_zero(x):
    return torch.zeros(len(x)) if len(x) > 1 else -torch.zeros(len(x))


def by_chance(x):
    return total(x) + torch.rand(len(x))


VIOLATORS = {
    "by size": (by_size, r"row \d+ has other bits in a batch of row 0 alone than in the batch of all 130"),
    "at one size": (at_one_size, "in a batch of the first 33 rows"),
    "by place": (by_place, "in a batch of row 43 alone"),
    "leaking": (leaking, "in a batch in which every second row is nan"),
    "by maximum": (by_neighbour_maximum, "in a batch of row "),
    "by address": (by_address, "in a batch of all rows at another address"),
    "signed zero": (signed_zero, r"the first, \[0\], is -0.0 for 0.0"),
    "by chance": (by_chance, "rows differ; a second run of the same batch differs too$"),
}


@pytest.mark.parametrize("name", VIOLATORS)
def test_what_is_not_invariant_is_found(name):
    fn, text = VIOLATORS[name]
    with pytest.raises(AssertionError, match=text):
        assert_invariant(fn, rows())
    with pytest.raises(AssertionError) as raised:
        assert_invariant(fn, rows())
    assert ("a second run" in str(raised.value)) == (fn is by_chance)


def test_the_message_says_which_row_how_many_elements_and_by_how_much():
    def fn(x):
        y = x.clone()
        if len(x) == 3:
            y[1, 2:4] = torch.nextafter(y[1, 2:4], y[1, 2:4] + 1)
            y[1, 3] += 0.5
        return {"y": y, "first": y[:, 0]}

    x = torch.ones(8, 6)
    want = (
        r"row 1 has other bits in a batch of the first 3 rows than in the batch of all 8: 2 of 6 elements of "
        r"output 'y' differ by up to 4,194,305 ULPs \(0.5\); the first, \[1, 2\], is 1.0000001\d* for 1.0; "
        r"1 of 3 rows differ"
    )
    with pytest.raises(AssertionError, match=want):
        assert_invariant(fn, x)


def test_a_row_is_named_by_its_place_in_the_inputs():
    x = torch.arange(9.0)[:, None]
    with pytest.raises(AssertionError, match=r"row 4 .* is 40.0 for 4.0; 1 of 2 rows"):
        assert_invariant(
            lambda x: torch.where((x == 4) & (x[:1] != 0), 40.0, x), x, sizes=(2,), neighbours=(), seed=3
        )


def test_integers_and_infinities_say_no_ulps():
    with pytest.raises(AssertionError, match=r"of the output differ; the first, \[0, 0\], is 1 for 0"):
        assert_invariant(lambda x: (x == len(x)).long(), torch.ones(3, 2))
    with pytest.raises(AssertionError, match=r"differ, where a side is not finite; .* is inf for 1.0"):
        assert_invariant(lambda x: x if len(x) > 1 else x / 0, torch.ones(3, 2))


def test_a_linear_layer_of_the_library():
    """What torch.mm does depends on the processor: the harness says so, or it passes, and both are right."""
    weight = rows(64, 64, seed=1).T.contiguous()
    x = rows(130, 64)
    try:
        assert_invariant(lambda x: x @ weight, x)
    except AssertionError as error:
        assert "elements of the output differ by up to" in str(error)


def test_gradients_are_what_fn_makes_of_them():
    def gradient(x):
        x = x.requires_grad_()
        return torch.autograd.grad(total(x * x).sum(), x)

    assert_invariant(gradient, rows())


def test_one_row():
    assert_invariant(total, rows(1))


ERRORS = {
    r"inputs must be a tensor or several, got none": lambda x: assert_invariant(total, []),
    r"inputs\[1\] must be a tensor, got int": lambda x: assert_invariant(total, [x, 3]),
    r"inputs\[0\] must have at least one row, got shape \(0, 4\)": lambda x: assert_invariant(total, x[:0]),
    r"inputs\[1\] must have 3 rows as inputs\[0\] has, got 2": lambda x: assert_invariant(total, [x, x[:2]]),
    r"the output of fn must have a row for each of 3, got \(\)": lambda x: assert_invariant(torch.sum, x),
    r"fn must give tensors, got int": lambda x: assert_invariant(len, x),
    r"fn must give a tensor, got none": lambda x: assert_invariant(lambda x: None, x),
    r"sizes must be an integer >= 1, got 0": lambda x: assert_invariant(total, x, sizes=(0,)),
    r"rows must be an integer >= 1, got 0": lambda x: assert_invariant(total, x, rows=0),
    r"output of fn must be \(1, 4\) torch.float32 in a batch of row 0 alone, got \(1, 4\) torch.float64": (
        lambda x: assert_invariant(lambda x: x.double() if len(x) == 1 else x, x)
    ),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_argument(text):
    with pytest.raises(ValueError, match=text):
        ERRORS[text](torch.ones(3, 4))
