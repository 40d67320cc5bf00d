"""rms_norm: fp64 is the truth, the functions of transformers and torch are the peers; for every backend."""

import pytest
import torch
import torch.nn.functional as F
from backends import is_slow, of, running
from bitwise import assert_equal
from norm_cases import check_against_fp64, run, upstream

import rlkernel
from rlkernel.calls.rms_norm import ROUNDINGS, RmsNormCall
from rlkernel.ops.rms_norm import op, op_of_sum
from rlkernel.reference.rms_norm import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("rms_norm"))
pytestmark = pytest.mark.usefixtures("poison")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_matches_fp64(backend, device, dtype, residual):
    """Rows that fill no vector, one, several threads of a GPU, and more than a block of them holds."""
    whole = ((3, 1), (2, 7), (70, 40), (2, 1000), (2, 3, 2, 64), (1, 2, 8193))
    few = ((1, 1), (1 if residual else 34, 7), (1, 1000), (1, 2, 1, 64), (1, 1, 4097))
    for shape in few if is_slow(backend, device) else whole:
        inputs = make_inputs(*shape, dtype=dtype, device=device, residual=residual)
        for rounding in ROUNDINGS[:1] if shape[-1] > 999 else ROUNDINGS:
            check_against_fp64("rms_norm", backend, inputs, rounding=rounding)
    inputs = make_inputs(3, 70, dtype=dtype, device=device, residual=residual)
    check_against_fp64("rms_norm", backend, inputs, weight_offset=1.0, eps=1e-2, rounding="after_weight")
    check_against_fp64("rms_norm", backend, inputs | {"weight": inputs["weight"].float()})
    del inputs["weight"]
    check_against_fp64("rms_norm", backend, inputs)


def same(a, b):
    """The fraction of elements that have the same bits."""
    return (a == b).double().mean().item()


@ON_EVERY_BACKEND
@pytest.mark.parametrize(
    "name", ["llama.Llama", "qwen2.Qwen2", "qwen3.Qwen3", "gemma.Gemma", "gemma3.Gemma3"]
)
def test_transformers_say_the_same(backend, device, name):
    """The real modules in bf16: the other rounding is seen. Their sums run in another order, which shows in
    the last bit of a row's scale, and so of few of its elements."""
    path, kind = name.split(".")
    models = pytest.importorskip("transformers.models", reason="transformers is not installed")
    module = getattr(models, path)
    norm = getattr(getattr(module, f"modeling_{path}"), f"{kind}RMSNorm")(256, eps=1e-6).to(device)
    inputs = make_inputs(12, 256, dtype=torch.bfloat16, device=device)
    gemma = kind.startswith("Gemma")
    with torch.no_grad():
        norm.to(torch.bfloat16).weight.copy_(inputs["weight"] - (1 if gemma else 0))
        inputs["weight"] = norm.weight.clone()
        expected = norm(inputs["x"])
    offset = {"weight_offset": 1.0} if gemma else {}
    right = ROUNDINGS[1] if gemma else ROUNDINGS[0]
    got = {rounding: run("rms_norm", backend, inputs, rounding=rounding, **offset) for rounding in ROUNDINGS}
    agree = {rounding: same(got[rounding]["normed"], expected) for rounding in ROUNDINGS}
    assert agree.pop(right) > 0.999 and max(agree.values()) < 0.95
    x = inputs["x"].clone().requires_grad_()
    normed = norm(x)
    grads = torch.autograd.grad(normed, (x, norm.weight), upstream(normed))
    for name, theirs in zip(("grad_x", "grad_weight"), grads, strict=True):
        torch.testing.assert_close(got[right][name], theirs, rtol=2e-2, atol=2e-2 * theirs.abs().max().item())


@ON_EVERY_BACKEND
def test_torch_says_the_same(backend, device):
    inputs = make_inputs(12, 256, dtype=torch.bfloat16, device=device)
    expected = F.rms_norm(inputs["x"], (256,), inputs["weight"], 1e-6)
    agree = [same(run("rms_norm", backend, inputs, rounding=r)["normed"], expected) for r in ROUNDINGS]
    assert agree[0] < 0.95 and agree[1] > 0.999
    inputs = make_inputs(7, 300, device=device)
    expected = F.rms_norm(inputs["x"], (300,), inputs["weight"], 1e-6)
    torch.testing.assert_close(run("rms_norm", backend, inputs)["normed"], expected, rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_the_sum_is_rounded_before_it_is_normed(backend, device):
    """As a decoder layer does it: ``h = h + x`` in the model's dtype, then the norm of h."""
    inputs = make_inputs(9, 200, dtype=torch.bfloat16, device=device, residual=True)
    got = run("rms_norm", backend, inputs)
    summed = inputs["x"] + inputs["residual"]
    assert_equal("summed", got["summed"], summed)
    alone = run("rms_norm", backend, {"x": summed, "weight": inputs["weight"]})
    assert_equal("normed", got["normed"], alone["normed"])
    assert_equal("grad_weight", got["grad_weight"], alone["grad_weight"])
    assert_equal("grad_residual", got["grad_residual"], got["grad_x"])


@ON_EVERY_BACKEND
def test_any_strides(backend, device):
    """Queries and keys of a fused projection, heads in front of tokens, columns, one row for all."""
    inputs = make_inputs(2, 3, 6, 10, device=device)
    x, weight = inputs["x"], inputs["weight"]
    views = {
        "slice of heads": x[:, :, 2:4],
        "heads first": x.transpose(1, 2),
        "columns": x[..., ::2],
        "every other token": x[:, ::2],
        "one row for all": x[:1, :1, :1].expand(2, 2, 2, 10),
    }
    for name, view in views.items():
        plain = {"x": view.contiguous(), "weight": weight[: view.shape[-1]]}
        want = run("rms_norm", backend, plain)
        for residual in (False,) if is_slow(backend, device) else (False, True):
            strided = plain | {"x": view} | ({"residual": torch.zeros_like(view)} if residual else {})
            got = run("rms_norm", backend, strided, lambda g: upstream(g.transpose(0, 1)).transpose(0, 1))
            again = run(
                "rms_norm", backend, plain, lambda g: upstream(g.transpose(0, 1)).transpose(0, 1).contiguous()
            )
            assert_equal(name, got["normed"], want["normed"])
            if residual and backend != "reference":
                continue  # the sum has a gradient of its own
            assert_equal(f"gradient, {name}", got["grad_weight"], again["grad_weight"])
            if not residual:
                assert_equal(f"gradient, {name}", got["grad_x"], again["grad_x"])
    vector = {"x": x[0, 0, 0], "weight": weight}
    assert_equal(
        "one row",
        run("rms_norm", backend, vector)["normed"],
        run("rms_norm", backend, inputs)["normed"][0, 0, 0],
    )


@ON_EVERY_BACKEND
def test_no_rows(backend, device):
    for shape in ((0, 5), (3, 0, 5)):
        for residual in (False, True):
            got = run("rms_norm", backend, make_inputs(*shape, device=device, residual=residual))
            assert got["normed"].shape == got["grad_x"].shape == shape
            assert_equal("grad_weight", got["grad_weight"], torch.zeros(5, device=device))


@ON_EVERY_BACKEND
def test_extremes_are_those_of_torch(backend, device):
    """Squares overflow beyond 1.8e19 in fp32, and the row becomes 0; infinity and NaN make NaN of a row."""
    x = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)).to(device)
    x[0] *= 1e30
    x[1] *= 1e-30
    x[2, 3], x[3, 4], x[4] = torch.inf, torch.nan, 0
    expected = F.rms_norm(x, (40,), None, 1e-6)
    got = run("rms_norm", backend, {"x": x})
    assert (got["normed"][0] == 0).all() and (got["normed"][4] == 0).all()
    assert got["normed"][2].isnan().sum() == 1 and got["normed"][3].isnan().all()
    torch.testing.assert_close(got["normed"], expected, rtol=1e-6, atol=0, equal_nan=True)
    assert got["grad_x"][[0, 1, 4, 5]].isfinite().all()
    zero = run("rms_norm", backend, {"x": torch.zeros(1, 3, device=device)}, eps=0.0)["normed"]
    assert zero.isnan().all()  # 0 * infinity, as torch


@ON_EVERY_BACKEND
def test_gradients_that_are_not_wanted(backend, device):
    inputs = make_inputs(34, 8, device=device, residual=True)
    whole = run("rms_norm", backend, inputs)
    for wanted in (("x",), ("residual",), ("weight",), ("x", "weight")):
        leaves = {name: x.clone().requires_grad_(name in wanted) for name, x in inputs.items()}
        with running(backend):
            out = rlkernel.rms_norm(**leaves)
            found = torch.autograd.grad(out, [leaves[n] for n in wanted], [upstream(x) for x in out])
        for name, grad in zip(wanted, found, strict=True):
            assert_equal(name, grad, whole[f"grad_{name}"])
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    with running(backend):
        summed = rlkernel.rms_norm(**leaves).summed
        found = torch.autograd.grad(summed, list(leaves.values()), upstream(summed))
    for grad, want in zip(
        found, (upstream(summed), torch.zeros(8, device=device), upstream(summed)), strict=True
    ):
        assert_equal("of the sum alone", grad, want)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_what_is_kept_for_backward(residual):
    """With a residual neither x nor the residual is kept, only the sum that the caller has anyway."""
    inputs = {k: v.requires_grad_() for k, v in make_inputs(4, 50, residual=residual).items()}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        rlkernel.rms_norm(**inputs)
    assert kept.count((4, 50)) == 1


X, WEIGHT = torch.zeros(2, 3), torch.ones(3)
BAD = [
    (dict(x=torch.zeros(2, 3).long()), "x must be float16, .* got int64"),
    (dict(x=torch.zeros(())), r"x must be \[..., H\] with H >= 1, got \(\)"),
    (dict(x=torch.zeros(2, 0)), r"x must be \[..., H\] with H >= 1, got \(2, 0\)"),
    (dict(weight=torch.ones(2)), r"weight must have the shape \(3,\) of x's last dimension, got \(2,\)"),
    (dict(weight=WEIGHT.int()), "weight must be float16, .* got int32"),
    (dict(residual=torch.zeros(3)), r"residual must have x's shape \(2, 3\), got \(3,\)"),
    (dict(residual=X.half()), "residual must have x's dtype float32, got float16"),
    (dict(eps=-1e-6), "eps must be >= 0 and finite, got -1e-06"),
    (dict(weight_offset=torch.inf), "weight_offset must be finite, got inf"),
    (dict(rounding="never"), "rounding must be one of 'before_weight', 'after_weight', got 'never'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.rms_norm(**{"x": X, "weight": WEIGHT} | change)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_compiles_as_one_graph(backend, residual):
    inputs = make_inputs(4, 40, residual=residual)

    def step(**inputs):
        out = rlkernel.rms_norm(**{name: x * 2 for name, x in inputs.items()})
        return out * 3 if not residual else out.normed * out.summed

    results = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
        with rlkernel.use_backend(backend):
            out = fn(**leaves)
            results.append((out.detach(), *torch.autograd.grad(out.sum(), list(leaves.values()))))
    for a, b in zip(*results, strict=True):
        assert_equal("compiled", b, a)


@pytest.mark.parametrize("residual", [False, True], ids=["alone", "residual"])
def test_opcheck(residual):
    inputs = {k: v.requires_grad_() for k, v in make_inputs(3, 20, residual=residual).items()}
    call = RmsNormCall(
        inputs["x"], inputs.get("residual"), inputs["weight"], 1e-6, 0.0, "before_weight", True
    )
    chosen = op_of_sum if residual else op
    torch.library.opcheck(chosen.node, chosen.flat(call))
