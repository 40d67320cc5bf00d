"""linear_divergence: how autograd, torch.compile and DTensors use it, and what it says of bad input."""

import contextlib

import linear_divergence_cases
import pytest
import ranks
import torch
from backends import running
from bitwise import assert_equal
from linear_divergence_cases import NAMES, ON_EVERY_BACKEND, double, inputs_of, run, upstream
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import rlkernel
from rlkernel import dispatch
from rlkernel.calls.linear_divergence import LinearDivergenceCall
from rlkernel.ops.linear_divergence import op

pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_divergence_cases.small_tiles


def leaves_of(inputs, needs=NAMES):
    return {name: x.clone().requires_grad_(name in needs) for name, x in inputs.items()}


@ON_EVERY_BACKEND
def test_retained_graph_and_double_use(backend, device, small_tiles):
    leaves = leaves_of(inputs_of(9, 16, 133, device=device))
    with running(backend):
        out = rlkernel.linear_divergence(**leaves, beta=0.3, softcap=5.0).divergence
        loss = out.sum() + out.pow(2).sum()
        loss.backward(retain_graph=True)
        first = {name: leaves[name].grad.clone() for name in NAMES}
        loss.backward()
    for name, grad in first.items():
        assert_equal(name, leaves[name].grad, 2 * grad)


@pytest.mark.parametrize("beta", [0.0, 0.4, 1.0])
def test_gradcheck(beta):
    leaves = leaves_of(double(inputs_of(5, 4, 11)))
    options = dict(temperature=0.7, logit_scale=1.3, softcap=3.0, teacher_softcap=4.0)
    with rlkernel.use_backend("reference"):
        assert torch.autograd.gradcheck(
            lambda *student: (
                rlkernel.linear_divergence(
                    **leaves | dict(zip(NAMES, student, strict=True)), beta=beta, **options
                ).divergence
            ),
            [leaves[name] for name in NAMES],
        )


@ON_EVERY_BACKEND
def test_autocast_uses_its_dtype_and_sums_in_fp32(backend, device, small_tiles):
    """The bits are those of operands in that dtype; gradients have the parameters'."""
    inputs = inputs_of(19, 32, 133, device=device)
    low = {name: x.bfloat16() if "bias" not in name else x for name, x in inputs.items()}
    want = run(backend, low, beta=0.3, return_entropy=True)
    with torch.autocast(device, dtype=torch.bfloat16):
        got = run(backend, inputs, beta=0.3, return_entropy=True)
    for name in ("divergence", "entropy"):
        assert_equal(name, got[name], want[name])
    for name in NAMES:
        assert got[f"grad of {name}"].dtype == torch.float32
        torch.testing.assert_close(
            got[f"grad of {name}"], want[f"grad of {name}"].float(), rtol=2**-7, atol=1e-5
        )


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("needs", [NAMES, ("hidden",)], ids=str)
def test_compiles_as_one_graph(backend, needs, small_tiles):
    inputs, mask = inputs_of(9, 16, 133), torch.arange(9) % 4 > 0

    def step(leaves):
        leaves = leaves | {"hidden": leaves["hidden"] * 2}
        out = rlkernel.linear_divergence(**leaves, beta=0.3, mask=mask, softcap=5.0, return_entropy=True)
        return out.divergence * 3 + out.entropy.detach()

    found = []
    for fn in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = leaves_of(inputs, needs)
        with rlkernel.use_backend(backend):
            out = fn(leaves)
            found.append((out.detach(), *torch.autograd.grad(out.sum(), [leaves[x] for x in needs])))
    for a, b in zip(*found, strict=True):
        assert_equal("compiled", b, a)


@pytest.mark.parametrize("needs", [NAMES, ("hidden",), ("weight",)], ids=str)
@pytest.mark.parametrize("beta", [0.0, 0.3])
def test_opcheck(needs, beta, small_tiles):
    leaves = leaves_of(inputs_of(9, 16, 133), needs)
    call = LinearDivergenceCall(
        *(leaves[x] for x in (*NAMES, *(f"teacher_{x}" for x in NAMES))), torch.arange(9) > 1, beta, 0.7,
        1.1, None, torch.float32, 1.0, 4.0, torch.float32, True,
    )  # fmt: skip
    torch.library.opcheck(op.node, op.flat(call))


def test_gradient_checkpointing(small_tiles):
    leaves = leaves_of(inputs_of(9, 16, 133))

    def of(hidden):
        return rlkernel.linear_divergence(**leaves | {"hidden": hidden * 2}, beta=0.3).divergence

    wanted = [leaves[x] for x in NAMES]
    want = torch.autograd.grad(of(leaves["hidden"]).sum(), wanted)
    out = torch.utils.checkpoint.checkpoint(of, leaves["hidden"], use_reentrant=False)
    for name, a, b in zip(NAMES, torch.autograd.grad(out.sum(), wanted), want, strict=True):
        assert_equal(name, a, b)


def test_derivatives_that_it_has_not_are_refused():
    inputs = inputs_of(5, 8, 20)
    leaves = leaves_of(inputs)
    out = rlkernel.linear_divergence(**leaves).divergence
    (grad,) = torch.autograd.grad(out.sum(), leaves["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="linear_divergence has no second derivative"):
        grad.sum().backward()
    for name in NAMES:
        with forward_ad.dual_level(), pytest.raises((RuntimeError, NotImplementedError)):
            dual = forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))
            rlkernel.linear_divergence(**inputs | {name: dual})
    entropy = rlkernel.linear_divergence(**leaves, return_entropy=True).entropy
    assert not entropy.requires_grad


def test_teachers_get_no_gradient():
    """Its head may be a parameter; the hidden states are detached, or it is an error."""
    leaves = leaves_of(inputs_of(5, 8, 20), (*NAMES, "teacher_weight", "teacher_bias"))
    rlkernel.linear_divergence(**leaves).divergence.sum().backward()
    assert leaves["teacher_weight"].grad is None and leaves["teacher_bias"].grad is None
    alone = leaves_of({name: x.detach() for name, x in leaves.items()}, ("teacher_weight",))
    assert not rlkernel.linear_divergence(**alone).divergence.requires_grad


@pytest.mark.parametrize("mode", ["meta", "fake"])
def test_tensors_without_values(mode):
    inputs = inputs_of(6, 8, 20, dtype=torch.bfloat16)
    inputs |= {name: inputs[name].view(2, 3, -1) for name in ("hidden", "teacher_hidden")}
    fake = FakeTensorMode() if mode == "fake" else None
    empty = {name: fake.from_tensor(x) if fake else x.to("meta") for name, x in inputs.items()}
    leaves = {name: x.requires_grad_(name in NAMES) for name, x in empty.items()}
    with fake or contextlib.nullcontext():
        out = rlkernel.linear_divergence(**leaves, return_entropy=True)
        grads = torch.autograd.grad(out.divergence.sum(), [leaves[x] for x in NAMES])
    assert out.divergence.shape == out.entropy.shape == (2, 3) and out.divergence.dtype == torch.float32
    assert [(g.shape, g.dtype) for g in grads] == [(inputs[x].shape, torch.bfloat16) for x in NAMES]


def test_who_runs_it():
    call = inputs_of(3, 4, 7)
    rlkernel.linear_divergence(**call)
    assert rlkernel.last_backend("linear_divergence") in dispatch.BACKENDS
    for wide, backends in ((call, ("native", "reference")), (double(call), ("reference",))):
        able = {
            name for name, reasons in rlkernel.explain("linear_divergence", **wide).items() if not reasons
        }
        assert able >= {*backends} and ("native" in able) == ("native" in backends)
        assert wide is call or "triton" not in able
    out = rlkernel.linear_divergence(**double(call), return_entropy=True)
    assert out.divergence.dtype == out.entropy.dtype == torch.float64


GOOD = {
    "hidden": torch.zeros(2, 4), "weight": torch.zeros(5, 4),
    "teacher_hidden": torch.zeros(2, 3), "teacher_weight": torch.zeros(5, 3),
}  # fmt: skip
BAD = [
    (dict(hidden=torch.zeros(2, 4).int()), "hidden must be float16, .* got int32"),
    (dict(hidden=torch.zeros(2, 0)), r"hidden must be \[..., H\] with H >= 1, got \(2, 0\)"),
    (dict(hidden=torch.tensor(1.0)), r"hidden must be \[..., H\] with H >= 1, got \(\)"),
    (dict(weight=torch.zeros(5, 3)), r"^weight must be \[V, 4\] with V >= 1, got \(5, 3\)"),
    (dict(weight=torch.zeros(0, 4)), r"^weight must be \[V, 4\] with V >= 1, got \(0, 4\)"),
    (dict(bias=torch.zeros(4)), r"^bias must be \[5\], got \(4,\)"),
    (dict(bias=torch.zeros(5).long()), "^bias must be float16, .* got int64"),
    (dict(teacher_hidden=torch.zeros(3, 3)), r"^teacher_hidden must be \[2, K\], the rows .* got \(3, 3\)"),
    (dict(teacher_hidden=torch.zeros(1, 2, 3)), r"^teacher_hidden must be \[2, K\], .* got \(1, 2, 3\)"),
    (dict(teacher_hidden=torch.zeros(2, 3).int()), "^teacher_hidden must be float16, .* got int32"),
    (dict(teacher_hidden=torch.zeros(2, 3, requires_grad=True)), "^teacher_hidden must not require a"),
    (dict(teacher_hidden=torch.zeros(2, 3).double()), "^teacher_hidden must be float64 beside float64 a"),
    (dict(teacher_hidden=torch.zeros(2, 3, device="meta"), teacher_weight=torch.zeros(5, 3, device="meta")),
     "^teacher_hidden must be on hidden's device cpu, got meta"),
    (dict(teacher_weight=torch.zeros(5, 4)), r"^teacher_weight must be \[V, 3\] with V >= 1, got \(5, 4\)"),
    (dict(teacher_weight=torch.zeros(6, 3)), r"^teacher_weight must be \[5, K\], .* got \(6, 3\)"),
    (dict(teacher_weight=torch.zeros(5, 3, device="meta")), "^teacher_weight must be on"),
    (dict(teacher_bias=torch.zeros(6)), r"^teacher_bias must be \[5\], got \(6,\)"),
    (dict(beta=1.5), r"beta must be in \[0, 1\], got 1.5"),
    (dict(beta=float("nan")), r"beta must be in \[0, 1\], got nan"),
    (dict(mask=torch.ones(3)), r"mask must have the rows of hidden's shape \(2,\), got \(3,\)"),
    (dict(temperature=0.0), "temperature must be > 0 and finite, got 0.0"),
    (dict(temperature=torch.ones(2)), "temperature must be a number, got Tensor"),
    (dict(logit_scale=float("inf")), "^logit_scale must be finite, got inf"),
    (dict(teacher_logit_scale=float("nan")), "^teacher_logit_scale must be finite, got nan"),
    (dict(softcap=0.0), "^softcap must be > 0 and finite, or None, got 0.0"),
    (dict(teacher_softcap=-1), "^teacher_softcap must be > 0 and finite, or None, got -1"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:60] for _, m in BAD])
def test_bad_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_divergence(**GOOD | change)


def _dtensors(rank, kind):
    """How far results are from those of whole heads where ranks hold parts of them, and the errors."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tp" if kind == "tp" else "dp",))
    batches = [inputs_of(7, 16, 133, seed=i) for i in range(2)]
    heads = {name: x for name, x in batches[0].items() if "hidden" not in name}
    place = [Replicate() if kind == "replicated" else Shard(0)]

    def spread(*names):
        return {x: distribute_tensor(heads[x], mesh, place).requires_grad_(x in NAMES) for x in names}

    own = spread("weight", "bias")
    messages = []
    for wrong in (
        spread("teacher_weight"),
        spread("teacher_bias"),
    ):
        try:
            rlkernel.linear_divergence(**batches[0] | wrong)
        except ValueError as error:
            messages.append(str(error))
    if kind == "tp":
        for wrong in (own, spread("teacher_weight", "teacher_bias")):
            try:
                rlkernel.linear_divergence(**batches[0] | wrong)
            except ValueError as error:
                messages.append(str(error))
        return messages
    shared = spread("teacher_weight", "teacher_bias")
    data = 0 if kind == "replicated" else rank
    rows = {name: batches[data][name] for name in ("hidden", "teacher_hidden")}
    hidden = rows["hidden"].clone().requires_grad_()
    out = rlkernel.linear_divergence(**rows | own | shared | {"hidden": hidden}, beta=0.3).divergence
    (out * upstream(out)).sum().backward()
    got = out.detach(), hidden.grad, own["weight"].grad.full_tensor(), own["bias"].grad.full_tensor()
    whole = [run("native", batch | heads, beta=0.3) for batch in batches]
    of_heads = [
        sum(x[f"grad of {name}"] for x in (whole if data == rank else whole[:1] * 2)) / 2
        for name in ("weight", "bias")
    ] if kind == "dp" else [whole[0][f"grad of {name}"] for name in ("weight", "bias")]  # fmt: skip
    want = whole[data]["divergence"], whole[data]["grad of hidden"], *of_heads
    return messages, [float((a - b).abs().max()) for a, b in zip(got, want, strict=True)]


@pytest.mark.slow
@ranks.pytestmark
def test_heads_that_are_dtensors(tmp_path):
    """Over data parallelism gathered, with the mean of the gradients; over tensor parallelism refused."""
    found = ranks.run(_dtensors, ["dp", "replicated", "tp"], tmp_path)
    for kind in ("dp", "replicated"):
        for messages, apart in found[kind]:
            assert max(apart) <= 1e-5, f"{kind}: {apart}"
            check_messages(messages)
    for messages in found["tp"]:
        check_messages(messages[:2])
        for name, message in zip(("weight", "teacher_weight"), messages[2:], strict=True):
            assert message.startswith(f"{name} must not be split over the vocabulary by tensor parallelism")


def check_messages(messages):
    assert messages == [
        "teacher_bias must be a DTensor as teacher_weight is one, got a plain tensor",
        "teacher_bias must be a plain tensor as teacher_weight is one, got a DTensor",
    ]
