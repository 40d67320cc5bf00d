"""layer_norm: fp64 is the truth, torch's own function the peer; one body for every backend."""

import pytest
import torch
import torch.nn.functional as F
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal
from norm_cases import check_against_fp64, run, upstream

import rlkernel
from rlkernel.calls.layer_norm import LayerNormCall
from rlkernel.ops.layer_norm import op
from rlkernel.reference.layer_norm import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("layer_norm"))
pytestmark = pytest.mark.usefixtures("poison")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_fp64(backend, device, dtype):
    whole = ((3, 2), (2, 7), (70, 40), (2, 1000), (2, 3, 2, 64), (1, 2, 8193))
    few = ((1, 2), (34, 7), (1, 1000), (1, 2, 1, 64), (1, 1, 4097))
    for shape in few if is_slow(backend, device) else whole:
        check_against_fp64("layer_norm", backend, make_inputs(*shape, dtype=dtype, device=device))
    inputs = make_inputs(3, 70, dtype=dtype, device=device)
    check_against_fp64(
        "layer_norm", backend, {name: x.float() if name != "x" else x for name, x in inputs.items()}
    )
    for without in (("bias",), ("weight",), ("weight", "bias")):
        some = {name: x for name, x in inputs.items() if name not in without}
        check_against_fp64("layer_norm", backend, some, eps=1e-2)


@ON_EVERY_BACKEND
def test_torch_says_the_same(backend, device):
    for dtype, tolerance in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        inputs = make_inputs(9, 200, dtype=dtype, device=device)
        got = run("layer_norm", backend, inputs)
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        expected = F.layer_norm(leaves["x"], (200,), leaves["weight"], leaves["bias"])
        grads = torch.autograd.grad(expected, list(leaves.values()), upstream(expected))
        torch.testing.assert_close(got["normed"], expected, rtol=tolerance, atol=tolerance)
        for name, theirs in zip(leaves, grads, strict=True):
            largest = theirs.abs().max().item()
            torch.testing.assert_close(got[f"grad_{name}"], theirs, rtol=tolerance, atol=tolerance * largest)


@ON_EVERY_BACKEND
def test_an_offset_costs_no_digits(backend, device):
    """What is left of a variance as a difference of squares, or of a mean that was rounded to fp32."""
    g = torch.Generator().manual_seed(3)
    x = (1000 + 0.1 * torch.randn(4, 300, generator=g)).to(device)
    truth = F.layer_norm(x.double(), (300,))
    got = run("layer_norm", backend, {"x": x})["normed"]
    assert (got - truth).abs().max() < 1e-5
    check("normed", got, F.layer_norm(x, (300,)), truth)
    variance = x.square().mean(-1, keepdim=True) - x.mean(-1, keepdim=True).square()
    mutant = (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance.clamp(min=0) + 1e-5)
    assert (mutant - truth).abs().max() > 0.1


@ON_EVERY_BACKEND
def test_any_strides_and_no_rows(backend, device):
    inputs = make_inputs(2, 3, 4, 10, device=device)
    for view in (inputs["x"][:, :, 1:3], inputs["x"].transpose(1, 2), inputs["x"][..., ::2]):
        rest = {name: x[: view.shape[-1]] for name, x in inputs.items() if name != "x"}
        want = run("layer_norm", backend, rest | {"x": view.contiguous()})
        for name, x in run("layer_norm", backend, rest | {"x": view}).items():
            assert_equal(name, x, want[name])
    empty = run("layer_norm", backend, make_inputs(0, 5, device=device))
    assert empty["normed"].shape == empty["grad_x"].shape == (0, 5)
    for name in ("grad_weight", "grad_bias"):
        assert_equal(name, empty[name], torch.zeros(5, device=device))


@ON_EVERY_BACKEND
def test_extremes(backend, device):
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).to(device)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2, 3], x[3, 4], x[4] = torch.inf, torch.nan, 7
    got = run("layer_norm", backend, {"x": x})["normed"]
    assert (got[[0, 4]] == 0).all() and got[2:4].isnan().all()
    assert got[5].isfinite().all() and got[1].abs().max() < 1e-20
    expected = F.layer_norm(x[1:].double(), (40,)).float()  # in fp32 torch's on a GPU has 1.5e-4 for sevens
    torch.testing.assert_close(got[1:], expected, rtol=1e-5, atol=2e-6, equal_nan=True)


@ON_EVERY_BACKEND
def test_gradients_that_are_not_wanted(backend, device):
    inputs = make_inputs(34, 8, device=device)
    whole = run("layer_norm", backend, inputs)
    for wanted in (("x",), ("weight",), ("bias",), ("x", "bias")):
        leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in inputs.items()}
        with running(backend):
            out = rlkernel.layer_norm(**leaves)
            found = torch.autograd.grad(out, [leaves[n] for n in wanted], upstream(out))
        for name, grad in zip(wanted, found, strict=True):
            assert_equal(name, grad, whole[f"grad_{name}"])


X = torch.zeros(2, 3)
BAD = [
    (dict(x=torch.zeros(2, 0)), r"x must be \[..., H\] with H >= 1, got \(2, 0\)"),
    (dict(weight=torch.ones(2)), r"weight must have the shape \(3,\) of x's last dimension, got \(2,\)"),
    (dict(bias=torch.ones(3).int()), "bias must be float16, .* got int32"),
    (dict(eps=-1.0), "eps must be >= 0 and finite, got -1.0"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.layer_norm(**{"x": X} | change)


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_compiles_as_one_graph(backend):
    inputs = make_inputs(4, 40)

    def step(**inputs):
        return rlkernel.layer_norm(**{name: x * 2 for name, x in inputs.items()}) * 3

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        with rlkernel.use_backend(backend):
            out = fn(**leaves)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), list(leaves.values()))))
    for a, b in zip(*results, strict=True):
        assert_equal("compiled", b, a)


def test_opcheck():
    inputs = {name: x.requires_grad_() for name, x in make_inputs(3, 20).items()}
    torch.library.opcheck(op.node, op.flat(LayerNormCall(**inputs, eps=1e-5)))
