"""swiglu: fp64 is the truth, torch, transformers and Liger the peers; one body for every backend."""

import sys

import instruction_sets
import pytest
import torch
import torch.nn.functional as F
from accuracy import check
from backends import is_slow, of, running
from bitwise import assert_equal

import rlkernel
from rlkernel.calls.swiglu import ACTIVATIONS, ROUNDINGS, SwigluCall
from rlkernel.ops.swiglu import op
from rlkernel.reference.swiglu import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("swiglu"))
OURS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("swiglu") if pair.values[0] != "reference"]
)
pytestmark = pytest.mark.usefixtures("poison")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TORCHS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda x: F.gelu(x, approximate="tanh")}


def upstream(x):
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(x.shape[-1])).to(x)


def run(backend, inputs, function=rlkernel.swiglu, grads=upstream, **options):
    """The product and the gradients of what it is made of, by name."""
    leaves = {name: x.detach().requires_grad_() for name, x in inputs.items()}
    with running(backend):
        product = function(**leaves, **options)
        found = torch.autograd.grad(product, list(leaves.values()), grads(product))
    return {"product": product.detach()} | {f"grad_{name}": x for name, x in zip(leaves, found, strict=True)}


def halves_more(x):
    return torch.full_like(x, 1.5)


def composed(gate, up, activation="silu"):
    """As transformers' ``LlamaMLP`` and ``GemmaMLP`` have it."""
    return TORCHS[activation](gate) * up


@ON_EVERY_BACKEND
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matches_fp64(backend, device, dtype):
    shapes = (
        ((3, 37), (2, 5), (1,))
        if is_slow(backend, device)
        else ((3, 1000), (2, 3, 7), (2, 2, 2, 33), (1,), (70, 64))
    )
    for shape in shapes:
        for packed in (False, True):
            inputs = make_inputs(*shape, dtype=dtype, device=device, packed=packed)
            double = {name: x.double() for name, x in inputs.items()}
            for activation in ACTIVATIONS:
                for rounding in ROUNDINGS:
                    options = {"activation": activation, "rounding": rounding}
                    ours, torchs = (run(b, inputs, **options) for b in (backend, "reference"))
                    truth = run(
                        "reference", double, grads=lambda x: upstream(x.to(dtype)).double(), **options
                    )
                    for name, exact in truth.items():
                        assert ours[name].dtype == dtype, name
                        check(f"{activation} {rounding} {name}", ours[name], torchs[name], exact)


@ON_EVERY_BACKEND
def test_no_more_is_lost_than_by_torch(backend, device):
    """Where the sigmoid and the error function are 0 or 1, and around 0."""
    x = torch.linspace(-30, 30, 501 if is_slow(backend, device) else 20001, device=device)
    for scale in (1.0, 0.1):
        inputs = {"gate": x * scale, "up": upstream(x)}
        for activation in ACTIVATIONS:
            ours = run(backend, inputs, activation=activation)
            torchs = run("reference", inputs, composed, activation=activation)
            double = {name: x.double() for name, x in inputs.items()}
            truth = run(
                "reference", double, composed, lambda x: upstream(x.float()).double(), activation=activation
            )
            for name, exact in truth.items():
                check(f"{activation} {name}", ours[name], torchs[name], exact)


@OURS
def test_rounded_where_transformers_rounds(backend, device):
    """With the activation in fp32 of our own, the rest is the composition's to the bit, gradients too."""
    gate, up = make_inputs(4, 33, dtype=torch.bfloat16, device=device).values()
    for activation in ACTIVATIONS:
        got = run(backend, {"gate": gate, "up": up}, activation=activation)
        one = {"gate": gate.float(), "up": torch.ones_like(gate).float()}
        wide = run(backend, one, grads=torch.ones_like, activation=activation)
        activated, g = wide["product"].bfloat16(), upstream(gate)
        assert_equal("product", got["product"], activated * up)
        assert_equal("grad_up", got["grad_up"], g * activated)
        slope = wide["grad_gate"]
        assert_equal("grad_gate", got["grad_gate"], ((g * up).float() * slope).bfloat16())
        once = run(backend, {"gate": gate, "up": up}, activation=activation, rounding="after_product")
        assert_equal("once", once["product"], (wide["product"] * up.float()).bfloat16())
        assert not torch.equal(once["product"], got["product"])
        assert_equal("once, grad_gate", once["grad_gate"], (g.float() * up.float() * slope).bfloat16())


@ON_EVERY_BACKEND
def test_packed_is_the_two_side_by_side(backend, device):
    gate, up = make_inputs(2, 3, 5, 12, dtype=torch.float16, device=device).values()
    apart = run(backend, {"gate": gate, "up": up})
    packed = run(backend, {"gate": torch.cat([gate, up], -1)})
    assert_equal("product", packed["product"], apart["product"])
    assert_equal("grad", packed["grad_gate"], torch.cat([apart["grad_gate"], apart["grad_up"]], -1))


@OURS
def test_any_strides_and_no_elements(backend, device):
    inputs = make_inputs(2, 3, 4, 10, device=device)
    changes = (
        lambda x: x[:, :, 1:3],
        lambda x: x.transpose(1, 2),
        lambda x: x[..., ::2],
        lambda x: x[..., 3:8],
    )
    for change in changes:
        views = {name: change(x) for name, x in inputs.items()}
        want = run(backend, {name: x.contiguous() for name, x in views.items()})
        for name, x in run(backend, views).items():
            assert_equal(name, x, want[name])
    row = {name: x[:1, :1].expand(2, 3, 4, 10) for name, x in inputs.items()}
    want = run(backend, {name: x.contiguous() for name, x in row.items()})
    assert_equal("expanded", run(backend, row)["product"], want["product"])
    for shape in ((0, 5), (3, 0), (0,)):
        for packed in (False, True):
            empty = run(backend, make_inputs(*shape, device=device, packed=packed))
            assert empty["product"].shape == shape


def check_places(run, inputs):
    """``run(inputs)`` of parts, of another order and beside NaN gives each element its bits."""
    count = len(inputs["gate"])
    whole = run(inputs)
    for part in (slice(0, 1), slice(1, 2), slice(3, 20), slice(count - 17, count), slice(1, count)):
        for name, x in run({n: x[part] for n, x in inputs.items()}).items():
            assert_equal(f"{name} of {part}", x, whole[name][part])
    order = torch.randperm(count, generator=torch.Generator().manual_seed(1)).to(inputs["gate"].device)
    moved = {name: x[order] for name, x in inputs.items()}
    moved["gate"][::2] = torch.nan
    for name, x in run(moved).items():
        assert_equal(f"{name}, moved", x[1::2], whole[name][order][1::2])


@OURS
def test_an_element_does_not_feel_its_place(backend, device):
    """The tail of a vector, a row's length, what stands beside: the trap of torch's own activations."""
    count = 67 if is_slow(backend, device) else 4099
    for dtype in (torch.float32, torch.bfloat16):
        for activation in ACTIVATIONS:
            check_places(
                lambda x, a=activation: run(backend, x, grads=halves_more, activation=a),
                make_inputs(count, dtype=dtype, device=device),
            )


def test_a_tail_of_its_own_is_found():
    """The mutant: what torch's CPU kernels do, the last elements by another function than whole vectors."""

    def mutant(inputs):
        gate, up = inputs["gate"], inputs["up"]
        vectors = len(gate) // 16 * 16
        rest = F.silu(gate[vectors:].double()).float()
        return {"product": torch.cat([gate[:vectors] / (1 + torch.exp(-gate[:vectors])), rest]) * up}

    with pytest.raises(AssertionError, match="product of"):
        check_places(mutant, make_inputs(4099))


@OURS
def test_every_backend_gives_the_same_bits(backend, device):
    for dtype in DTYPES:
        inputs = make_inputs(3, 37, dtype=dtype)
        there = {name: x.to(device) for name, x in inputs.items()}
        for activation in ACTIVATIONS:
            want = run("native", inputs, activation=activation)
            for name, x in run(backend, there, activation=activation).items():
                assert_equal(f"{activation} {name}", x.cpu(), want[name])


def results():
    found = []
    for dtype in DTYPES:
        for activation in ACTIVATIONS:
            found += run("native", make_inputs(3, 1027, dtype=dtype), activation=activation).values()
    return found


@pytest.mark.parametrize("isa", instruction_sets.NARROWER)
def test_instruction_sets_do_not_show(isa, tmp_path):
    instruction_sets.assert_not_seen(sys.modules[__name__], isa, tmp_path)


def test_threads_do_not_show():
    inputs, before, results = make_inputs(100, 1300, packed=True), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(run("native", inputs))
    finally:
        torch.set_num_threads(before)
    for got in results[1:]:
        for name, want in results[0].items():
            assert_equal(name, got[name], want)


@OURS
def test_extremes(backend, device):
    x = torch.tensor(
        [-torch.inf, -1e30, -100.0, -88.5, -0.0, 0.0, 88.5, 1e30, torch.inf, torch.nan], device=device
    )
    one = torch.ones_like(x)
    for activation in ACTIVATIONS:
        got = run(backend, {"gate": x, "up": one}, grads=torch.ones_like, activation=activation)
        value, slope = got["product"], got["grad_gate"]
        assert (value[1:4].abs() < 1e-30).all() and (value[4:6] == 0).all(), activation
        assert_equal("value", value[6:9], x[6:9])
        assert value[9].isnan() and slope[9].isnan()
        assert (slope[1:4].abs() < 1e-30).all() and (slope[4:6] == 0.5).all(), activation
        assert (slope[6:8] == 1).all(), activation


def test_gradients_that_are_not_wanted():
    inputs = make_inputs(3, 8)
    whole = run("native", inputs)
    for wanted in ("gate", "up"):
        leaves = {name: x.clone().requires_grad_(name == wanted) for name, x in inputs.items()}
        out = rlkernel.swiglu(**leaves)
        (found,) = torch.autograd.grad(out, [leaves[wanted]], upstream(out))
        assert_equal(wanted, found, whole[f"grad_{wanted}"])


X = torch.zeros(2, 4)
BAD = [
    (dict(gate=torch.zeros(2, 4).int()), "gate must be float16, .* got int32"),
    (dict(gate=torch.tensor(1.0)), r"gate must be \[..., I\], got \(\)"),
    (dict(gate=torch.zeros(2, 3), up=None), r"gate must be \[..., 2 I\] without up, got \(2, 3\)"),
    (dict(up=torch.zeros(2, 3)), r"up must have gate's shape \(2, 4\), got \(2, 3\)"),
    (dict(up=X.half()), "up must have gate's dtype float32, got float16"),
    (dict(activation="relu"), "activation must be one of 'silu', 'gelu', 'gelu_tanh', got 'relu'"),
    (dict(rounding="never"), "rounding must be one of 'before_product', 'after_product', got 'never'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:40] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.swiglu(**{"gate": X, "up": X} | change)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("packed", [False, True])
def test_compiles_as_one_graph(backend, packed):
    inputs = make_inputs(4, 40, packed=packed)

    def step(**inputs):
        return rlkernel.swiglu(**{name: x * 2 for name, x in inputs.items()}) * 3

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
    torch.library.opcheck(op.node, op.flat(SwigluCall(**inputs, activation="silu", rounding=ROUNDINGS[0])))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_composition_under_batch_invariant_to_the_bit(dtype, activation):
    """Also its gradients: a trainer's own modules and an engine that fuses them have one number."""
    inputs = make_inputs(5, 1027, dtype=dtype)
    got = run("native", inputs, activation=activation)
    with rlkernel.batch_invariant():
        want = run("native", inputs, composed, activation=activation)
        inside = run("native", inputs, activation=activation)
    for name, x in want.items():
        assert_equal(name, got[name], x)
        assert_equal(f"{name}, inside", inside[name], x)
