"""A rule that is kept for the next call is the one that the call would have made, or its error."""

import inspect

import pytest
import torch

import rlkernel
from rlkernel import RolloutCorrection
from rlkernel.ops.policy_loss import rule as policy_rule
from rlkernel.ops.preference_loss import rule as preference_rule
from rlkernel.reference import policy_loss, preference_loss
from rlkernel.runtime.memo import remembered


def test_made_once_for_the_same_values_and_types():
    made = []

    @remembered
    def build(**arguments):
        made.append(arguments)
        return len(made)

    for x in (1, 1.0, True, "1", None, (1, 2.0), (True, 2.0), (1, (2, 3)), (1, (2, True)), ((1,), 2)):
        assert build(x=x, y=0) == build(x=x, y=0) == len(made)
    assert len(made) == 10
    assert build(x=1, y=False) == 11


@pytest.mark.parametrize("argument", [[1], {"a": 1}, torch.ones(1), (1, [2])])
def test_never_kept_where_it_could_change(argument):
    made = []
    build = remembered(lambda **arguments: made.append(arguments) or len(made))
    assert [build(x=argument), build(x=argument)] == [1, 2]


def test_an_error_is_not_kept():
    @remembered
    def build(x):
        raise ValueError(f"x must be good, got {x}")

    for _ in range(2):
        with pytest.raises(ValueError, match="x must be good, got 1"):
            build(x=1)


def test_torch_compile_does_not_trace_it():
    made = []
    build = remembered(lambda **arguments: made.append(arguments) or 3)

    @torch.compile(fullgraph=True, backend="eager")
    def twice(x):
        return x * build(x=1) * build(x=1)

    assert twice(torch.ones(())) == 9


BAD_POLICY = {
    "epsilon must be a number, got bool": (dict(epsilon=1), dict(epsilon=1.0), dict(epsilon=True)),
    "epsilon must be a number, got list": (dict(epsilon=0.2), dict(epsilon=[0.2])),
    "low must be a number, got bool": (
        dict(correction=RolloutCorrection(low=1)), dict(correction=RolloutCorrection(low=True)),
    ),
    "must be a RolloutCorrection or a name, got tuple": (
        dict(correction=RolloutCorrection()), dict(correction=tuple(RolloutCorrection())),
    ),
    "must be a RolloutCorrection or a name, got dict": (dict(correction="icepop"), dict(correction={})),
    "dp_size must be an integer of 64 bits, got bool": (dict(dp_size=1), dict(dp_size=True)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_POLICY)
def test_a_wrong_type_is_an_error_after_its_equal_was_right(message):
    *good, bad = BAD_POLICY[message]
    inputs = policy_loss.make_inputs(2, 9, extras=True)
    for options in good:
        rlkernel.policy_loss(**inputs, **{"correction": "icepop"} | options)
    with pytest.raises(ValueError, match=message):
        rlkernel.policy_loss(**inputs, **{"correction": "icepop"} | bad)


def test_a_wrong_weight_is_an_error_after_its_equal_was_right():
    inputs = preference_loss.make_inputs(2, 9)
    options = {"loss_type": ("sigmoid", "hinge")}
    rlkernel.preference_loss(**inputs, **options, loss_weights=(1, 1.0))
    with pytest.raises(ValueError, match="loss_weights must be a number, got bool"):
        rlkernel.preference_loss(**inputs, **options, loss_weights=(True, 1.0))
    a = rlkernel.preference_loss(**inputs, **options, loss_weights=(0.5, 2)).loss
    b = rlkernel.preference_loss(**inputs, loss_type=["sigmoid", "hinge"], loss_weights=[0.5, 2]).loss
    assert a == b


def test_the_rule_of_a_loss_is_not_made_anew_for_other_tensors():
    """Nor for another seed, which it does not know."""
    mask, misses = torch.ones(4, 3, dtype=torch.bool), set()
    kept = [inspect.getclosurevars(rule.build).nonlocals["kept"] for rule in (policy_rule, preference_rule)]
    for step in range(5):
        x = torch.randn(4, 3)
        rlkernel.policy_loss(x, x + 1, x[:, 0], mask, ref_logprobs=x, beta=0.1875, seed=step)
        rlkernel.preference_loss(x, x + 1, mask, beta=0.1875)
        misses.add(tuple(each.cache_info().misses for each in kept))
    assert len(misses) == 1
