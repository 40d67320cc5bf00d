"""linear_divergence: masks, what is no number, filtered tokens, and the same bits every time."""

import linear_divergence_cases
import pytest
import torch
from backends import is_slow
from bitwise import assert_equal
from linear_divergence_cases import (
    BETAS,
    NAMES,
    ON_EVERY_BACKEND,
    check_against_fp64,
    double,
    inputs_of,
    run,
    upstream,
)

import rlkernel
from rlkernel.drivers import linear_chosen
from rlkernel.runtime import gpu, workspace

pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_divergence_cases.small_tiles
NO_NUMBER = (torch.nan, torch.inf, -torch.inf)


@pytest.fixture
def choice(request, monkeypatch, small_tiles):
    """Those that count are gathered, or all are computed and the others masked, as on a GPU."""
    monkeypatch.setattr(linear_chosen, "is_counted", lambda *_: request.param == "gathered")
    monkeypatch.setattr(gpu, "runs_ahead", lambda device: request.param == "masked")
    return request.param


CHOICES = pytest.mark.parametrize("choice", ["gathered", "masked"], indirect=True)


@ON_EVERY_BACKEND
@CHOICES
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_under_the_mask_leave_no_trace(backend, device, softcap, beta, choice):
    """Whatever they hold: not in an output, and not in a gradient, of which they are the products' rows."""
    inputs = inputs_of(19, 16, 133, device=device)
    mask = torch.arange(19, device=device) % 3 > 0
    options = {"beta": beta, "mask": mask, "softcap": softcap, "logit_scale": 0.9, "return_entropy": True}
    check_against_fp64(backend, inputs, **options)
    clean = run(backend, inputs, **options)
    assert all((clean[name][~mask] == 0).all() for name in ("divergence", "entropy", "grad of hidden"))
    for value in NO_NUMBER[:2] if is_slow(backend, device) else NO_NUMBER:
        dirty = {
            name: torch.where(mask[:, None], inputs[name], value) for name in ("hidden", "teacher_hidden")
        }
        for changed in (dirty, {"hidden": dirty["hidden"]}, {"teacher_hidden": dirty["teacher_hidden"]}):
            for name, x in run(backend, inputs | changed, **options).items():
                assert_equal(name, x, clean[name])
    kept = run(backend, inputs, **options | {"mask": mask.float() * -2.5})
    for name, x in kept.items():  # any number but 0 counts
        assert_equal(name, x, clean[name])


@ON_EVERY_BACKEND
@CHOICES
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_without_an_upstream_gradient_leave_no_trace(backend, device, softcap, choice):
    inputs = inputs_of(19, 16, 133, device=device)
    grad = upstream(torch.empty(19)).to(device)
    quiet = torch.arange(19, device=device) % 3 == 0
    grad[quiet] = 0.0
    options = {"beta": 0.3, "softcap": softcap, "teacher_softcap": softcap, "logit_scale": 1.2}
    check_against_fp64(backend, inputs, grad, **options)
    clean = run(backend, inputs, grad, **options)
    assert (clean["grad of hidden"][quiet] == 0).all()
    dirty = {name: inputs[name].clone() for name in ("hidden", "teacher_hidden")}
    for x in dirty.values():
        x[quiet] = torch.nan
    for needs in (NAMES, ("hidden",), ("weight",), ("bias",)):
        clean = run(backend, inputs, grad, needs, **options)  # of a frozen head it has other last bits
        got = run(backend, inputs | dirty, grad, needs, **options)
        assert got["divergence"].isnan().tolist() == quiet.tolist()
        assert_equal("divergence", got["divergence"][~quiet], clean["divergence"][~quiet])
        for name in needs:
            assert_equal(name, got[f"grad of {name}"], clean[f"grad of {name}"])


@ON_EVERY_BACKEND
@CHOICES
def test_nothing_counts(backend, device, choice):
    inputs = inputs_of(11, 16, 133, device=device)
    inputs["hidden"][:] = torch.nan
    none = torch.zeros(11, dtype=torch.bool, device=device)
    for x in run(backend, inputs, beta=0.3, mask=none, return_entropy=True).values():
        assert (x == 0).all()
    got = run(backend, inputs, torch.zeros(11), beta=1.0, softcap=3.0)
    assert all((got[f"grad of {name}"] == 0).all() for name in NAMES)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_rows_that_are_no_distribution(backend, device, softcap, small_tiles):
    """NaN in either row is NaN in its divergence and its gradients, and in no other row."""
    inputs = inputs_of(19, 16, 133, device=device)
    inputs["hidden"][3, 2] = inputs["teacher_hidden"][9, 1] = torch.nan
    off = torch.zeros(19, dtype=torch.bool, device=device)
    off[[3, 9]] = True
    for beta in BETAS:
        got = run(backend, inputs, torch.ones(19), beta=beta, softcap=softcap)
        assert got["divergence"].isnan().tolist() == off.tolist()
        assert got["grad of hidden"].isnan().any(-1).tolist() == off.tolist()
        assert got["grad of hidden"][off].isnan().all()
        assert got["grad of weight"].isnan().all() and got["grad of bias"].isnan().all()


@ON_EVERY_BACKEND
@pytest.mark.parametrize("beta", BETAS)
def test_tokens_that_a_bias_filters(backend, device, beta, small_tiles):
    """-inf in both biases leaves the vocabulary without these tokens, whose gradients are 0."""
    inputs = inputs_of(11, 16, 101, device=device)
    out = torch.arange(101, device=device) % 7 == 3
    for name in ("bias", "teacher_bias"):
        inputs[name][out] = -torch.inf
    options = {"beta": beta, "return_entropy": True, "logit_scale": 1.2}
    got = run(backend, inputs, **options)
    few = {name: x[~out] if x.shape[0] == 101 else x for name, x in inputs.items()}
    without = run(backend, few, **options)
    for name, x in got.items():
        part = x
        if name in ("grad of weight", "grad of bias"):
            assert (x[out] == 0).all()
            part = x[~out]
        torch.testing.assert_close(part, without[name], rtol=1e-5, atol=1e-5)


@ON_EVERY_BACKEND
def test_tokens_that_one_bias_filters(backend, device, small_tiles):
    """The divergence is infinite where the weight is on what the other has not."""
    for name in ("bias", "teacher_bias"):
        inputs = inputs_of(11, 16, 101, device=device)
        inputs[name][[5, 77]] = -torch.inf
        for beta in BETAS:
            got, truth = (run(b, x, beta=beta) for b, x in ((backend, inputs), ("reference", double(inputs))))
            assert got["divergence"].isinf().all() == (beta == {"bias": 0.0, "teacher_bias": 1.0}[name])
            assert (got["divergence"] > 0).all()
            for leaf, x in got.items():
                exact = truth[leaf].float()
                torch.testing.assert_close(x, exact, rtol=1e-4, atol=1e-5, equal_nan=True)
            if name == "bias" and beta:  # else the teacher would have some of the student's there
                assert (got["grad of bias"][[5, 77]] == 0).all()


@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device, small_tiles):
    """With the workspace full of anything, with and without gradients, and for any that are wanted."""
    inputs = inputs_of(19, 33, 133, dtype=torch.bfloat16, device=device)
    options = {"beta": 0.3, "softcap": 6.0, "return_entropy": True}
    first = run(backend, inputs, **options)
    for needs in (NAMES, (), ("weight",), ("bias",), NAMES):
        for name, x in run(backend, inputs, needs=needs, **options).items():
            assert_equal(name, x, first[name])
    frozen = run(backend, inputs, needs=("hidden",), **options)  # whose gradient is a direction's multiple
    torch.testing.assert_close(frozen["grad of hidden"], first["grad of hidden"], rtol=2**-7, atol=1e-4)
    for _ in range(2):
        for name, x in run(backend, inputs, needs=("hidden",), **options).items():
            assert_equal(name, x, frozen[name])
            if "grad" not in name:
                assert_equal(name, x, first[name])
    alone = run(backend, inputs, **options | {"return_entropy": False})
    assert_equal("divergence", alone["divergence"], first["divergence"])


def test_threads_do_not_show_in_batch_invariant_mode(small_tiles):
    inputs, before = inputs_of(40, 33, 500), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with rlkernel.batch_invariant():
                found.append(run("native", inputs, beta=0.3, return_entropy=True))
    finally:
        torch.set_num_threads(before)
    for name, x in found[0].items():
        assert_equal(name, found[1][name], x)


@pytest.mark.parametrize("limit", [2**20, 2**28])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_row_does_not_feel_the_others(dtype, limit):
    """In batch-invariant mode: alone, in another order, and beside rows that are masked."""
    inputs = inputs_of(67, 40, 1500, dtype=dtype)
    grad = upstream(torch.empty(67))
    per_row = ("hidden", "teacher_hidden")
    of_row = ("divergence", "entropy", "grad of hidden")
    options = {"beta": 0.3, "return_entropy": True, "softcap": 9.0}
    with rlkernel.batch_invariant(), workspace.limited(limit):
        whole = run("native", inputs, grad, **options)
        for rows in (
            torch.tensor([0]),
            torch.tensor([66, 3, 40]),
            torch.arange(66, -1, -1),
            torch.arange(30),
        ):
            part = inputs | {name: inputs[name][rows] for name in per_row}
            got = run("native", part, grad[rows], **options)
            for name in of_row:
                assert_equal(name, got[name], whole[name][rows])
        mask = torch.arange(67) % 4 == 1
        got = run("native", inputs, grad, mask=mask, **options)
        for name in of_row:
            assert_equal(name, got[name][mask], whole[name][mask])
