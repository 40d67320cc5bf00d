"""The short way of ``group_advantages`` gives what the long one gives, to the bit, or declines."""

import functools

import numpy as np
import pytest
import torch
from bitwise import assert_equal

import rlkernel
from rlkernel import dispatch, native
from rlkernel.calls.group_advantages import ESTIMATORS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OPTIONS = [
    {},
    {"scale_rewards": "none", "unbiased": False},
    {"eps": 0.5, "singletons": "reward", "scale_rewards": "batch"},
    {"batch_eps": 0.0, "batch_eps_in": "std"},
]

way = functools.cache(lambda: dispatch.direct("group_advantages"))
long = rlkernel.group_advantages.__wrapped__


def short(*args, **kwargs):
    """What the short way makes of a call, None where it declines."""
    return way()(args, kwargs)


def rewards(*shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(sum(shape))
    return torch.randint(0, 4, shape, generator=g).to(dtype) / 3


@pytest.fixture(autouse=True)
def _chosen_before():
    """The first call of an op chooses its backend, the long way."""
    long(rewards(2, 3))
    assert rlkernel.last_backend("group_advantages") == "native"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_it_has_the_bits_of_the_long_way(estimator, dtype):
    lengths = torch.arange(1.0, 25.0)
    kept = torch.arange(24) % 5 != 0
    ids = torch.tensor([7, -3, 2**60] * 8)
    for options in OPTIONS:
        for given in ({}, {"lengths": lengths}, {"mask": kept}):
            if estimator == "opo":
                given = given | {"lengths": lengths}
            if estimator == "remax":
                given = given | {"baselines": lengths / 24}
            flat = rewards(24, dtype=dtype)
            for named in ({"group_size": 8}, {"group_size": 24}, {"group_size": 1}, {"group_ids": ids}):
                call = {"estimator": estimator, **options, **given, **named}
                got = short(flat, **call)
                assert_equal(str(call), got, long(flat, **call))
            rows = {name: x.view(3, 8) for name, x in given.items()}
            got = short(flat.view(3, 8), estimator=estimator, **options, **rows)
            assert_equal("rows", got, long(flat.view(3, 8), estimator=estimator, **options, **rows))


def test_what_is_not_finite_and_does_not_count():
    x = rewards(4, 6)
    x[1, 2], x[3, 0] = torch.nan, torch.inf
    assert short(x) is None
    assert short(x, mask=x.isfinite() | x.isnan()) is None
    assert_equal("masked", short(x, mask=x.isfinite()), long(x, mask=x.isfinite()))


FLAT = rewards(12)
DECLINED = {
    "fp64": lambda: short(rewards(2, 6, dtype=torch.float64)),
    "integers": lambda: short(rewards(2, 6).long()),
    "columns": lambda: short(rewards(6, 2).mT),
    "three dimensions": lambda: short(rewards(2, 3, 2)),
    "empty": lambda: short(rewards(0, 3)),
    "a gradient": lambda: short(rewards(2, 6).requires_grad_()),
    "no groups": lambda: short(FLAT),
    "named twice": lambda: short(FLAT.view(2, 6), group_size=6),
    "ids and a size": lambda: short(FLAT, group_ids=torch.arange(12), group_size=6),
    "a size that does not divide": lambda: short(FLAT, group_size=5),
    "a size below 1": lambda: short(FLAT, group_size=-3),
    "ids of 32 bits": lambda: short(FLAT, group_ids=torch.arange(12).int()),
    "too few ids": lambda: short(FLAT, group_ids=torch.arange(11)),
    "offsets": lambda: short(FLAT, group_offsets=torch.tensor([0, 12])),
    "a mask of numbers": lambda: short(FLAT, group_size=6, mask=torch.ones(12)),
    "a mask of another shape": lambda: short(FLAT, group_size=6, mask=torch.ones(2, 6).bool()),
    "integer lengths": lambda: short(FLAT, group_size=6, lengths=torch.arange(12)),
    "opo without lengths": lambda: short(FLAT, group_size=6, estimator="opo"),
    "remax without baselines": lambda: short(FLAT, estimator="remax"),
    "baselines of another": lambda: short(FLAT, group_size=6, baselines=FLAT),
    "reinforce++ of a size that does not divide": lambda: short(
        FLAT, group_size=5, estimator="reinforce_plus_plus"
    ),
    "an unknown estimator": lambda: short(FLAT, group_size=6, estimator="ppo"),
    "an integer eps": lambda: short(FLAT, group_size=6, eps=0),
    "a negative eps": lambda: short(FLAT, group_size=6, eps=-1e-4),
    "NaN as eps": lambda: short(FLAT, group_size=6, eps=float("nan")),
    "an infinite batch_eps": lambda: short(FLAT, group_size=6, batch_eps=float("inf")),
    "NumPy's size": lambda: short(FLAT, group_size=np.int64(6)),
    "a second place": lambda: short(FLAT, None, group_size=6),
    "an unknown name": lambda: short(FLAT, group_size=6, size=6),
}


@pytest.mark.parametrize("name", DECLINED)
def test_it_declines(name):
    assert DECLINED[name]() is None


def test_where_a_setting_is_on_it_declines():
    x = rewards(2, 6)
    assert short(x) is not None
    with rlkernel.use_backend("reference"):
        assert short(x) is None
    with native.emulated(native.extension().cpu):
        assert short(x) is None
    with dispatch.asking() as answer:
        rlkernel.group_advantages(x)
    assert answer and short(x) is not None


def test_what_is_declined_is_worded_by_the_long_way():
    with pytest.raises(ValueError, match="group_size must divide the 12 rewards, got 5"):
        rlkernel.group_advantages(FLAT, group_size=5)
    with pytest.raises(ValueError, match="rewards"):
        rlkernel.group_advantages(torch.tensor([[1.0, torch.nan]]))
    assert_equal(
        "NumPy's", rlkernel.group_advantages(FLAT, group_size=np.int64(6)), short(FLAT, group_size=6)
    )
