"""whiten: against fp64 written out by hand and verl's own function."""

import pytest
import torch
from backends import of, running
from bitwise import assert_equal

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.reference.whiten import make_inputs

BACKENDS = of("whiten")
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), BACKENDS)


def run(backend, x, mask=None, **options):
    with running(backend):
        return rlkernel.whiten(x, mask, **options)


@pytest.mark.parametrize("offset", [0.0, 1000.0])
@pytest.mark.parametrize("shape", [(2,), (3, 127), (2, 5000)], ids=str)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, shape, offset):
    inputs = make_inputs(*shape, device=device, masked=0)
    x = inputs["x"] + offset
    for eps, place, unbiased in ((1e-8, "variance", True), (1e-4, "std", True), (0.0, "std", False)):
        y = x.double()
        spread = y.var(correction=int(unbiased))
        scale = (spread + eps).sqrt() if place == "variance" else spread.sqrt() + eps
        options = {"eps": eps, "eps_in": place, "unbiased": unbiased}
        got = run(backend, x, **options)
        torch.testing.assert_close(got.double(), (y - y.mean()) / scale, rtol=2e-7, atol=1e-7)
        kept = run(backend, x, shift_mean=False, **options).double()
        torch.testing.assert_close(kept, (y - y.mean()) / scale + y.mean(), rtol=2e-7, atol=1e-7)


@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device):
    try:
        verl = _peers.verl_core_algos().verl_F
    except ImportError as reason:
        pytest.skip(str(reason))
    inputs = make_inputs(6, 50, device=device)
    for shift in (True, False):
        expected = verl.masked_whiten(inputs["x"], inputs["mask"].float(), shift)
        got = run(backend, **inputs, shift_mean=shift)
        torch.testing.assert_close(got[inputs["mask"]], expected[inputs["mask"]], rtol=2e-5, atol=2e-5)
        assert (got[~inputs["mask"]] == 0).all()


@ON_EVERY_BACKEND
def test_the_mask_hides_whatever_stands_there(backend, device):
    inputs = make_inputs(4, 30, device=device)
    clean = run(backend, **inputs)
    assert_equal("again", run(backend, **inputs), clean)
    dirty = torch.where(inputs["mask"], inputs["x"], torch.nan)
    assert_equal("dirty", run(backend, dirty, inputs["mask"]), clean)
    chosen = run(backend, inputs["x"][inputs["mask"]])
    torch.testing.assert_close(clean[inputs["mask"]], chosen, rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_weights_stand_for_repetitions(backend, device):
    x, weights = torch.randn(7, device=device), torch.tensor([1, 4, 2, 0, 3, 1, 9], device=device)
    repeated = run(backend, x.repeat_interleave(weights))
    got = run(backend, x, weights=weights.float())
    torch.testing.assert_close(got.repeat_interleave(weights), repeated, rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_one_element_or_none_gives_zero(backend, device):
    """verl raises there, which stops a run in which one rank has nothing."""
    x = torch.randn(3, 4, device=device)
    mask = torch.zeros(3, 4, dtype=torch.bool, device=device)
    assert (run(backend, x, mask) == 0).all()
    mask[1, 2] = True
    assert (run(backend, x, mask) == 0).all() and (run(backend, x[:0]) == 0).all()
    assert (run(backend, torch.full((50,), 0.1, device=device), eps=0.0) == 0).all()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(3, dtype=torch.int64)}, "x must be float16, .*, got int64"),
        ({"x": torch.zeros(3, requires_grad=True)}, "x must not require a gradient"),
        ({"mask": torch.ones(4)}, r"mask must have x's shape \(3,\), got \(4,\)"),
        ({"weights": torch.ones(4)}, r"weights must have x's shape \(3,\), got \(4,\)"),
        ({"eps": -1e-8}, "eps must be >= 0 and finite, got -1e-08"),
        ({"eps_in": "var"}, "eps_in must be one of 'variance', 'std', got 'var'"),
    ],
)
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.whiten(**{"x": torch.zeros(3), **change})


def test_debug_mode_names_the_element():
    x = torch.tensor([1.0, torch.inf])
    with rlkernel.debug.checks(), pytest.raises(ValueError, match=r"x\[1\] must be finite .*, got inf"):
        rlkernel.whiten(x)
