"""sampling at the ends of what parameters and logits may be: one answer, and no token that cannot be."""

import math
import re

import numpy as np
import pytest
import torch
from backends import is_slow, running
from bitwise import assert_equal
from sampling_cases import PAIRS, bitmask, sample, skip_unless_sampling
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel.ops import _scalars
from rlkernel.ops.sampling import inputs
from rlkernel.runtime import debug

COLDEST, HOTTEST = 2.0**-126, (2 - 2.0**-23) * 2.0**127  # the normal numbers of fp32

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
ON_FAST_BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in PAIRS if not is_slow(*pair.values)]
)
METHODS = pytest.mark.parametrize("method", ["grouped", "gumbel"])
LOGITS = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))

# Outside of the range, or so once they are fp32.
REFUSED = {
    "temperature": [math.nan, -1.0, 1e-45, 2e-39, 1e-38, HOTTEST * 1.001, 1e39, math.inf],
    "top_p": [math.nan, 0.0, 1e-50, -1e-30, 1.0 + 1e-7, 2.0],
    "min_p": [math.nan, -1e-40, 1.0 + 1e-7, math.inf],
    "top_n_sigma": [math.nan, 0.0, 1e-50, -1.0],
    "epsilon_cutoff": [math.nan, -1e-40, 1.0 + 1e-7],
    "eta_cutoff": [math.nan, -1.0, math.inf],
    "top_a": [math.nan, -1e-40, 2.0],
    "typical_p": [math.nan, 0.0, 1e-50, 2.0],
    "xtc_probability": [math.nan, -1e-40, 1.0 + 1e-7],
    "xtc_threshold": [math.nan, 0.0, 1.5],
    "top_k": [-2, -(2**40)],
}
# Inside, or so once they are fp32; what they come to.
TAKEN = {
    "temperature": {-0.0: 0.0, 1e-50: 0.0, COLDEST: COLDEST, HOTTEST: HOTTEST},
    "top_p": {1.0 + 1e-9: 1.0, 1.0 - 1e-9: 1.0, 1e-45: 2.0**-149, 1.0: 1.0},
    "min_p": {-1e-50: 0.0, 1e-50: 0.0, 1.0 + 1e-9: 1.0},
    "top_n_sigma": {1e39: math.inf, 3.4028235677973366e38: math.inf, 1e-45: 2.0**-149},
    "epsilon_cutoff": {1e-50: 0.0, 1.0 + 1e-9: 1.0, 1e-45: 2.0**-149},
    "eta_cutoff": {-1e-50: 0.0, 1e-45: 2.0**-149},
    "top_a": {1e-50: 0.0, 1.0: 1.0},
    "typical_p": {1.0 + 1e-9: 1.0, 1.0 - 1e-9: 1.0, 1e-45: 2.0**-149},
    "xtc_probability": {-1e-50: 0.0, 1.0 + 1e-9: 1.0},
    "xtc_threshold": {1.0 + 1e-9: 1.0},
    "top_k": {2**63 - 1: 40, 41: 40, -1: 0},
}


def as_tensor(name, value):
    return torch.tensor([1, value, 1], dtype=torch.int64 if name == "top_k" else torch.float64)


@pytest.mark.parametrize(("name", "value"), [(n, x) for n in REFUSED for x in REFUSED[n]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_number_and_a_tensor_are_refused_alike(name, value, dtype):
    logits = LOGITS.to(dtype)
    for backend in ("reference", "native"):
        skip_unless_sampling(backend, logits)
        with running(backend):
            with pytest.raises(ValueError, match=f"^{name} must be .*, got {re.escape(str(value))}$"):
                rlkernel.sample(logits, seeds=1, **{name: value})
            with pytest.raises(ValueError, match=rf"^{name}\[1\] must be .*, got "):
                rlkernel.sample(logits, seeds=1, **{name: as_tensor(name, value)})


@pytest.mark.parametrize(("name", "value"), [(n, x) for n in TAKEN for x in TAKEN[n]])
@ON_FAST_BACKENDS
def test_a_number_and_a_tensor_are_taken_alike(backend, device, name, value):
    """And as what is left of them in fp32."""
    logits, plain = (
        LOGITS.to(device),
        {"return_support": 40, "return_entropy": True, "seeds": torch.arange(3)},
    )
    plain["seeds"] = plain["seeds"].to(device)
    number = sample(backend, logits, **plain, **{name: value})
    rows = sample(backend, logits, **plain, **{name: as_tensor(name, value).to(device)})
    rounded = sample(backend, logits, **plain, **{name: TAKEN[name][value]})
    assert number.valid.all()
    for field in number._fields:
        got, want, row = (getattr(x, field) for x in (number, rounded, rows))
        if got is not None:
            assert_equal(field, got, want)
        if got is not None and field not in ("support_ids", "support_offsets"):
            assert_equal(field, row[1:2], want[1:2])


def test_numbers_are_rounded_as_tensors_are():
    values = [0.0, -0.0, 0.7, -0.7, 1e-45, 7e-46, 1e-40, 1.17549435e-38, 1e-30, 3.4e38, 3.4028235e38]
    values += [3.40282356e38, 3.4028236e38, 1e39, -1e39, 1e300, math.inf, -math.inf, math.pi * 2.0**-120]
    g = torch.Generator().manual_seed(0)
    values += (
        torch.randn(500, dtype=torch.float64, generator=g) * 10.0 ** torch.arange(-45, 5).repeat(10)
    ).tolist()
    assert [_scalars.fp32(x) for x in values] == torch.tensor(values, dtype=torch.float32).double().tolist()
    assert math.isnan(_scalars.fp32(math.nan))
    for dtype in (torch.float32, torch.float64):
        assert _scalars.rounded(10**400, dtype) == -_scalars.rounded(-(10**400), dtype) == math.inf


BAD = {
    "temperature": [math.nan, -1.0, math.inf, -math.inf, 1e-45, 2e-39, COLDEST / 2],
    "top_p": [math.nan, 0.0, -0.5, 1.5, math.inf],
    "min_p": [math.nan, -0.5, 1.5, math.inf],
    "top_n_sigma": [math.nan, 0.0, -1.0, -math.inf],
    "eta_cutoff": [math.nan, -0.5, 1.5, math.inf],
    "typical_p": [math.nan, 0.0, 1.5, -math.inf],
    "xtc_probability": [math.nan, -0.5, 1.5, math.inf],
    "xtc_threshold": [math.nan, 0.0, 1.5, math.inf],
    "top_k": [-2, -(2**62)],
}


@pytest.mark.parametrize("name", BAD)
@METHODS
@ON_EVERY_BACKEND
def test_rows_of_parameters_that_nobody_looked_at_are_not_valid(backend, device, method, name, monkeypatch):
    """As on a GPU outside of debug mode: no token, NaN, and the neighbours as without them."""
    values = BAD[name]
    rows = len(values) + 2
    logits = torch.randn(rows, 150, generator=torch.Generator().manual_seed(3)).to(device) * 3
    logits[:, 7], logits[1] = -math.inf, -math.inf
    logits[1, 33] = 0.5
    dtype = torch.int64 if name == "top_k" else torch.float32
    goods = {"top_k": 5, "temperature": 0.8, "top_p": 0.9, "min_p": 0.01, "top_n_sigma": 2.0}
    good = goods.get(name, 0.02)
    asked = torch.tensor([good, *values, good], dtype=dtype, device=device)
    others = {"top_k": 9, "top_p": 0.8} if name == "temperature" else {}
    options = {"method": method, "return_support": 150, "return_entropy": True, "return_rank": True, **others}
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    if name.startswith("xtc"):
        options["seeds"] = 3
    if name == "xtc_threshold":  # also of a row that XTC is not drawn in
        options["xtc_probability"] = torch.tensor(0.0, device=device)
    for more in ({}, {"token_ids": torch.arange(rows, device=device)}):
        if more:
            plain = {k: x for k, x in options.items() if k != "method"}
            skip_unless_sampling(backend, logits)
            with running(backend):
                got = rlkernel.score_tokens(logits, **more, **plain, **{name: asked})
                want = rlkernel.score_tokens(logits, **more, **plain, **{name: good})
        else:
            got, want = (sample(backend, logits, **options, **{name: x}) for x in (asked, good))
            assert (got.token_ids[1:-1] == -1).all()
        assert got.valid.tolist() == [True, *[False] * len(values), True]
        for field in ("raw_logprobs", "tempered_logprobs", "processed_logprobs", "kept_mass", "entropy"):
            assert getattr(got, field)[1:-1].isnan().all(), field
        assert (got.kept_count[1:-1] == 0).all() and (got.rank[1:-1] == 0).all()
        assert (got.support_offsets[1:-1] == got.support_offsets[1]).all() and not got.support_overflow.any()
        for row in (0, rows - 1):
            for field in ("token_ids", "processed_logprobs", "tempered_logprobs", "kept_mass", "kept_count"):
                assert_equal(field, getattr(got, field)[row], getattr(want, field)[row])


HUGE = 3e38
EXTREMES = {
    "one finite": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] - 2, x, -math.inf),
    "first alone": lambda x: torch.where(torch.arange(x.shape[1]) == 0, HUGE, -math.inf),
    "near the end of fp32": lambda x: torch.where(x > 0, HUGE, -HUGE),
    "one near the end": lambda x: torch.where(torch.arange(x.shape[1]) == 17, HUGE, x),
    "all near the end": lambda x: HUGE + x * 1e36,
    "far below": lambda x: x * 1e36 - HUGE,
    "denormal": lambda x: x * 1e-41,
    "holes": lambda x: torch.where(x < 0.5, -math.inf, x),
    "nothing": lambda x: torch.full_like(x, -math.inf),
    "zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
}
ORDINARY = ("one finite", "first alone", "holes", "nothing", "zeros")
SETTINGS = {
    "cold": {"temperature": COLDEST},
    "hot": {"temperature": HOTTEST},
    "hot, joint": {"temperature": 1e38, "top_p": 0.7, "min_p": 0.2, "filter_order": "joint"},
    "hot, top_p": {"temperature": HOTTEST, "top_p": 0.3},
    "cold, min_p": {"temperature": COLDEST, "min_p": 1e-45},
    "hot, min_p": {"temperature": HOTTEST, "min_p": 0.5},
    "hot, top_k": {"temperature": 1e20, "top_k": 7},
    "smallest top_p": {"top_p": 2.0**-149},
    "largest top_p": {"top_p": 1 - 2.0**-24},
    "joint": {"top_p": 1 - 2.0**-24, "top_k": 3, "filter_order": "joint", "min_p": 1.0},
    "min_p of 1": {"min_p": 1.0},
    "smallest sigma": {"top_n_sigma": 2.0**-149},
    "largest sigma": {"top_n_sigma": 3e38},
    "cold, all": {"temperature": 1e-20, "top_p": 2.0**-149, "min_p": 1.0, "top_k": 1, "top_n_sigma": 1e-38},
}


@pytest.mark.parametrize("setting", SETTINGS)
@METHODS
@ON_EVERY_BACKEND
def test_extremes_have_one_answer(backend, device, method, setting):
    slow = is_slow(backend, device)
    x = torch.randn(1, 150 if slow else 4200, generator=torch.Generator().manual_seed(5))
    logits = torch.cat([make(x).expand_as(x) for make in EXTREMES.values()]).to(device)
    options = {"method": method, "return_support": x.shape[1], **SETTINGS[setting]}
    allowed = torch.ones(x.shape[1], dtype=torch.bool)
    allowed[0::3] = False
    some = bitmask(allowed[None]).expand(len(logits), -1).to(device)
    for mask in (some,) if slow and method == "gumbel" else (None, some):
        got = sample(backend, logits, token_bitmask=mask, **options)
        want = sample(
            "reference", logits.cpu(), token_bitmask=None if mask is None else mask.cpu(), **options
        )
        z = logits if mask is None else logits.masked_fill(~allowed.to(device), -math.inf)
        token = got.token_ids
        assert ((token >= 0) & (token < x.shape[1]) == got.valid).all()
        drawn = z.gather(-1, token.clamp(min=0)[:, None])[:, 0]
        assert (drawn[got.valid] > -math.inf).all()
        assert got.tempered_logprobs[got.valid].le(0).all()
        assert torch.equal(got.valid.cpu(), want.valid)
        # where T and the logits are both near an end of fp32, few bits are left of d / T
        moderate = 1e-30 <= options.get("temperature", 1.0) <= 1e30
        same = torch.tensor([moderate or name in ORDINARY for name in EXTREMES])
        for field in ("token_ids", "kept_count"):
            mine, theirs = getattr(got, field).cpu()[same], getattr(want, field)[same]
            assert torch.equal(mine, theirs), (field, mine, theirs)
        for field in ("raw_logprobs", "tempered_logprobs", "processed_logprobs", "kept_mass"):
            mine, theirs = getattr(got, field).cpu()[same], getattr(want, field)[same]
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=2e-7, equal_nan=True)


class Operators(TorchDispatchMode):
    """The names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__.split(".")[0])
        return func(*args, **kwargs or {})


def test_good_temperatures_cost_one_reduction():
    """What a check of good values runs is paid in every step of a rollout."""
    good = torch.tensor([0.5, 1.0])
    with Operators() as run:
        inputs.temperature_of(good, inputs.Rows(good.shape, 7, torch.float32, good.device))
    assert run.names == ["aminmax", "_local_scalar_dense", "_local_scalar_dense"]


def test_a_plain_call_allocates_and_does_nothing_else():
    """Its seven results, and the records between the two passes."""
    logits, seeds = torch.randn(8, 100), torch.arange(8)
    with rlkernel.use_backend("native"), Operators() as run:
        rlkernel.sample(logits, seeds=seeds, positions=seeds)
    assert sorted(run.names) == ["empty"] * 4 + ["empty_like"] * 4


def test_numbers_of_numpy_and_seeds_of_64_bits():
    wants = rlkernel.sample(
        LOGITS, temperature=0.5, top_k=7, top_p=0.75, seeds=-5, positions=3, return_support=9
    )
    given = {"temperature": np.float32(0.5), "top_k": np.int64(7), "top_p": np.float64(0.75)}
    for seed in (np.int64(-5), 2**64 - 5, np.uint64(2**64 - 5)):
        gots = rlkernel.sample(LOGITS, **given, seeds=seed, positions=np.int32(3), return_support=np.int64(9))
        for field, got, want in zip(wants._fields, gots, wants, strict=True):
            assert got is want is None or torch.equal(got, want), field
    assert torch.equal(rlkernel.split_seeds(2**64 - 5, np.int64(4)), rlkernel.split_seeds(-5, 4))
    words = torch.from_numpy(np.array([1, 2**64 - 5, 2**63], dtype=np.uint64))
    same = torch.tensor([1, -5, -(2**63)])
    assert torch.equal(
        rlkernel.sample(LOGITS, seeds=words).token_ids, rlkernel.sample(LOGITS, seeds=same).token_ids
    )
    assert torch.equal(rlkernel.split_seeds(words, 3), rlkernel.split_seeds(same, 3))
    for wrong in (2**64, -(2**63) - 1, np.float32(1.0), True, np.bool_(True)):
        with pytest.raises(ValueError, match="seeds must be a 64-bit integer or a tensor, got"):
            rlkernel.sample(LOGITS, seeds=wrong)
