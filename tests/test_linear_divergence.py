"""linear_divergence: one body of tests for every backend, against fp64; TRL's and Liger's the peers."""

import linear_divergence_cases
import pytest
import torch
from backends import is_slow, running
from bitwise import assert_equal
from linear_divergence_cases import (
    BETAS,
    NAMES,
    ON_EVERY_BACKEND,
    both_logits,
    check_against_fp64,
    double,
    inputs_of,
    make_inputs,
    run,
    upstream,
)
from test_divergence import definition

import rlkernel
from rlkernel.runtime import workspace

pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_divergence_cases.small_tiles
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
EVERY_OPTION = {
    "temperature": 0.8, "logit_scale": 1.3, "softcap": 5.0,
    "teacher_logit_scale": 0.7, "teacher_softcap": 7.0,
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "hot": {"temperature": 2.5},
    "scale": {"logit_scale": 0.25},
    "scale of the teacher": {"teacher_logit_scale": 1.7},
    "negative scale": {"logit_scale": -1.5},
    "no scale": {"logit_scale": 0.0},
    "softcap": {"softcap": 4.0},
    "softcap of the teacher": {"teacher_softcap": 3.0},
    "all": EVERY_OPTION,
}


@pytest.mark.parametrize("beta", (0.0, 0.25, 1 - 1e-6, 1.0))
@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
def test_the_reference_is_the_definition(option, biases, beta):
    inputs, options = double(inputs_of(7, 6, 30, biases=biases)), OPTIONS[option]
    got = run("reference", inputs, beta=beta, return_entropy=True, **options)
    leaves = {name: x.clone().requires_grad_(name in NAMES) for name, x in inputs.items()}
    logits, teacher_logits = both_logits(leaves, options)
    temperature = options.get("temperature", 1.0)
    want = definition(logits, teacher_logits, beta, temperature)
    torch.testing.assert_close(got["divergence"], want, rtol=1e-9, atol=1e-13)
    entropy = torch.distributions.Categorical(logits=logits / temperature).entropy()
    torch.testing.assert_close(got["entropy"], entropy)
    wanted = [name for name in NAMES if name in inputs]
    grads = torch.autograd.grad(want, [leaves[name] for name in wanted], upstream(want))
    for name, grad in zip(wanted, grads, strict=True):
        torch.testing.assert_close(got[f"grad of {name}"], grad, rtol=1e-7, atol=1e-12)


# one element; a single row; V smaller than a slice; N and V past several tiles with ragged ends; H odd
@DTYPES
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 1), (1, 7, 33), (19, 32, 133), (3, 65, 500)], ids=str)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, shape, beta, dtype, small_tiles):
    if is_slow(backend, device) and (dtype == torch.float16 or shape[2] == 500):
        shape = (3, 9, 100)
    inputs = inputs_of(*shape, dtype=dtype, device=device)
    check_against_fp64(backend, inputs, beta=beta, return_entropy=True)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("biases", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("option", OPTIONS)
def test_options(backend, device, option, biases, small_tiles):
    inputs = inputs_of(11, 16, 101, biases=biases, device=device)
    for beta in (0.3,) if is_slow(backend, device) else BETAS:
        check_against_fp64(backend, inputs, beta=beta, return_entropy=True, **OPTIONS[option])


@ON_EVERY_BACKEND
@pytest.mark.parametrize("widest", [None, "hidden", "weight", "teacher_hidden", "teacher_weight", "bias"])
def test_mixed_dtypes(backend, device, widest, small_tiles):
    """A product is one in the wider of its two dtypes, whatever the other model's is."""
    inputs = inputs_of(11, 16, 101, dtype=torch.bfloat16, device=device)
    if widest is None:
        inputs |= {name: inputs[name].half() for name in ("teacher_hidden", "teacher_weight")}
    else:
        inputs[widest] = inputs[widest].float()
    check_against_fp64(backend, inputs, beta=0.3, **EVERY_OPTION)


@ON_EVERY_BACKEND
def test_no_product_is_in_the_dtype_of_the_other(backend, device, small_tiles):
    """A teacher in fp32 keeps its digits beside a student in bf16, and the other way round."""
    for of_student, of_teacher in ((torch.bfloat16, torch.float32), (torch.float32, torch.float16)):
        inputs = inputs_of(11, 16, 101, device=device)
        inputs = {
            name: x.to(of_teacher if name.startswith("teacher") else of_student) for name, x in inputs.items()
        }
        got = run(backend, inputs, beta=0.3)["divergence"]
        want = definition(*both_logits(double(inputs), {}), 0.3)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-6)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("needs", [(x,) for x in NAMES] + [NAMES[::2], NAMES[1:], NAMES[:2]], ids=str)
def test_only_the_needed_gradients(backend, device, needs, small_tiles):
    inputs = inputs_of(11, 16, 101, dtype=torch.bfloat16, device=device)
    check_against_fp64(backend, inputs, needs=needs, beta=0.3, softcap=5.0)
    mask = torch.arange(11, device=device) % 3 > 0
    check_against_fp64(backend, inputs, needs=needs, beta=0.3, logit_scale=0.8, mask=mask)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_any_limit_of_the_workspace(backend, device, dtype):
    """The smallest holds few rows of logits, and slices of 256 entries; the largest all of both."""
    shape = (9, 40, 700) if is_slow(backend, device) else (150, 400, 3000)
    inputs = inputs_of(*shape, dtype=dtype, device=device)
    for limit in (2**20, 2**28):
        with workspace.limited(limit):
            check_against_fp64(backend, inputs, beta=0.5, return_entropy=True, softcap=9.0)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("beta", BETAS)
def test_is_the_divergence_of_the_logits(backend, device, beta, small_tiles):
    inputs, mask = inputs_of(19, 16, 133, device=device), torch.arange(19, device=device) % 4 > 0
    got = run(backend, inputs, beta=beta, mask=mask, return_entropy=True, **EVERY_OPTION)
    leaves = {name: x.clone().requires_grad_(name in NAMES) for name, x in inputs.items()}
    logits, teacher_logits = both_logits(leaves, EVERY_OPTION)
    with running(backend):
        want = rlkernel.divergence(
            logits, teacher_logits.detach(), beta=beta, mask=mask, temperature=0.8, return_entropy=True
        )
        grads = torch.autograd.grad(want.divergence, [leaves[x] for x in NAMES], upstream(want.divergence))
    torch.testing.assert_close(got["divergence"], want.divergence, rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(got["entropy"], want.entropy, rtol=1e-5, atol=2e-6)
    for name, grad in zip(NAMES, grads, strict=True):
        torch.testing.assert_close(got[f"grad of {name}"], grad, rtol=1e-4, atol=1e-5)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("beta", BETAS)
def test_equal_models_are_no_divergence_apart(backend, device, beta, dtype, small_tiles):
    """To the bit: what is left of two equal rows is 0, and so is every gradient."""
    inputs = inputs_of(19, 16, 133, dtype=dtype, device=device)
    inputs |= {f"teacher_{name}": inputs[name].clone() for name in NAMES}
    same = {name: EVERY_OPTION[name] for name in ("temperature", "logit_scale", "softcap")}
    same |= {f"teacher_{name}": same[name] for name in ("logit_scale", "softcap")}
    for options in ({}, same):
        for name, x in run(backend, inputs, beta=beta, **options).items():
            assert (x == 0).all(), name


@ON_EVERY_BACKEND
def test_shapes_and_strides_of_users(backend, device, small_tiles):
    """As of models' outputs less their last position; heads that are columns, parts or expanded."""
    inputs = inputs_of(3 * 7, 16, 133, device=device)
    mask = torch.arange(21, device=device).view(3, 7) % 5 > 0
    views = {name: inputs[name].view(3, 7, -1)[:, :-1] for name in ("hidden", "teacher_hidden")}
    rows = {name: x.reshape(18, -1).contiguous() for name, x in views.items()}
    options = {"beta": 0.3, "return_entropy": True, **EVERY_OPTION}
    want = run(backend, inputs | rows, mask=mask[:, :-1].reshape(-1), **options)
    got = run(backend, inputs | views, mask=mask[:, :-1], **options)
    assert got["divergence"].shape == got["entropy"].shape == (3, 6)
    assert got["grad of hidden"].shape == (3, 6, 16)
    for name, x in got.items():
        torch.testing.assert_close(x.reshape(want[name].shape), want[name], rtol=1e-5, atol=1e-5)
    for change in (
        lambda x: x.mT.contiguous().mT,  # by columns
        lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],  # every other element
        lambda x: torch.cat([x, torch.full_like(x, torch.nan)], -1)[
            ..., : x.shape[-1]
        ],  # a part of wider rows
    ):
        strided = {name: change(x) for name, x in (inputs | rows).items() if x.dim() == 2}
        got = run(backend, inputs | rows | strided, mask=mask[:, :-1].reshape(-1), **options)
        for name, x in got.items():
            torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-5)
    one = {name: x[:1].expand(4, -1) for name, x in rows.items()}
    expanded = run(backend, inputs | one, beta=0.3)["divergence"]
    torch.testing.assert_close(expanded, expanded[:1].expand(4), rtol=1e-6, atol=1e-7)
    flat = {name: x[0] for name, x in rows.items()}
    assert run(backend, inputs | flat, beta=0.3)["divergence"].shape == ()
    row_of_weight = inputs | {"teacher_weight": inputs["teacher_weight"][:1].expand(133, -1)}
    check_against_fp64(backend, row_of_weight, beta=0.3)


@ON_EVERY_BACKEND
def test_no_rows(backend, device):
    inputs = inputs_of(3, 16, 133, device=device)
    inputs |= {name: inputs[name][:0] for name in ("hidden", "teacher_hidden")}
    got = run(backend, inputs, beta=0.5, return_entropy=True)
    assert got["divergence"].shape == got["entropy"].shape == (0,)
    assert [tuple(got[f"grad of {x}"].shape) for x in NAMES] == [(0, 16), (133, 16), (133,)]
    assert all((got[f"grad of {x}"] == 0).all() for x in NAMES)


def trls(inputs, grad, beta, options):
    function = pytest.importorskip("trl.kernels.chunked_divergence").ChunkedDivergenceFunction
    leaves = {name: x.clone().requires_grad_(name in NAMES) for name, x in inputs.items()}
    names = ("hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias")
    more = ("temperature", "logit_scale", "softcap", "teacher_logit_scale", "teacher_softcap")
    defaults = dict(temperature=1.0, logit_scale=1.0, teacher_logit_scale=1.0)
    values = [(defaults | options).get(name) for name in more]
    divergence, entropy = function.apply(*(leaves.get(x) for x in names), beta, *values)
    wanted = [name for name in NAMES if name in inputs]
    grads = torch.autograd.grad(divergence, [leaves[name] for name in wanted], grad)
    found = {"divergence": divergence.detach(), "entropy": entropy}
    return found | {f"grad of {name}": x for name, x in zip(wanted, grads, strict=True)}


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("option", ["plain", "negative scale", "softcap of the teacher", "all"])
@pytest.mark.parametrize("backend", ["native", "reference"])
def test_trls_function_says_the_same(backend, option, beta, small_tiles):
    for biases in (False, True):
        inputs = inputs_of(19, 16, 133, biases=biases)
        grad = upstream(torch.empty(19))
        got = run(backend, inputs, grad, beta=beta, return_entropy=True, **OPTIONS[option])
        for name, want in trls(inputs, grad, beta, OPTIONS[option]).items():
            torch.testing.assert_close(
                got[name], want, rtol=1e-4, atol=2e-5, msg=lambda m, n=name: f"{n} {m}"
            )


@pytest.mark.parametrize("beta", BETAS)
def test_ligers_loss_says_the_same(beta, small_tiles):
    """Of rows that its labels keep: it sums, and divides by their number."""
    module = pytest.importorskip("liger_kernel.chunked_loss.jsd_loss").LigerFusedLinearJSDLoss
    inputs, labels = inputs_of(24, 16, 133), torch.arange(24) % 5
    labels[::5] = -100
    order = ("hidden", "weight", "teacher_hidden", "teacher_weight")
    sums = []
    for liger in (False, True):
        leaves = {name: x.clone().requires_grad_(name in NAMES) for name, x in inputs.items()}
        if liger:
            loss = module(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, temperature=0.7,
                          compiled=False, chunk_size=9)(
                *(leaves[x] for x in order), labels, leaves["bias"], leaves["teacher_bias"]
            )  # fmt: skip
        else:
            mask = labels != -100
            out = rlkernel.linear_divergence(**leaves, beta=beta, temperature=0.7, mask=mask)
            loss = out.divergence.sum() / mask.sum()
        sums.append((loss.detach(), *torch.autograd.grad(loss, [leaves[x] for x in NAMES])))
    for got, want in zip(*sums, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_the_inputs_of_benchmarks_are_as_they_are_told():
    near, far = make_inputs(50, 16, 200), make_inputs(50, 16, 200, teacher_size=24)
    kl = [rlkernel.linear_divergence(**x, beta=0.0).divergence.mean() for x in (near, far)]
    assert 0 < kl[0] < 0.5 < kl[1]
    assert_equal("weight", near["weight"], near["teacher_weight"])
