"""logprob: how autograd and torch.compile use it, and what it says of bad input."""

import pytest
import torch
from backends import of, running, skip_unless_able
from bitwise import assert_equal
from logprob_cases import eager_and_compiled, in_place, run, upstream_like

import rlkernel
from rlkernel.calls.logprob import LogprobCall
from rlkernel.reference.logprob import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("logprob"))
pytestmark = pytest.mark.usefixtures("poison")


@ON_EVERY_BACKEND
def test_backward_in_place(backend, device):
    inputs = make_inputs(4, 600, dtype=torch.bfloat16, device=device)
    skip_unless_able(backend, "logprob", *inputs.values())
    upstream = upstream_like(inputs["target_ids"])
    _, want = run(backend, **inputs, upstream=upstream, return_entropy=True)
    grad, there, loss = in_place(backend, **inputs, upstream=upstream)
    assert there, "the gradient must lie where the logits were"
    assert_equal("grad", grad, want)
    with pytest.raises(RuntimeError, match="inplace_backward must be False for a second backward"):
        loss.backward()


def test_backward_in_place_is_seen_by_other_users_of_the_logits():
    logits = torch.randn(2, 5, requires_grad=True) * 1
    other = (logits**2).sum()
    rlkernel.logprob(logits, torch.tensor([1, 2]), inplace_backward=True).logprobs.sum().backward(
        retain_graph=True
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@ON_EVERY_BACKEND
def test_double_use_and_retained_graph(backend, device):
    inputs = make_inputs(3, 50, device=device)
    skip_unless_able(backend, "logprob", *inputs.values())
    leaf = inputs["logits"].clone().requires_grad_()
    with running(backend):
        out = rlkernel.logprob(leaf, inputs["target_ids"], return_entropy=True)
        (out.logprobs.sum() + out.logprobs.pow(2).sum()).backward(retain_graph=True)
        first = leaf.grad.clone()
        (out.logprobs.sum() + out.logprobs.pow(2).sum()).backward()
    assert_equal("twice the gradient", leaf.grad, 2 * first)


BAD = [
    (dict(logits=torch.zeros(2, 3, dtype=torch.int32)), "logits must be float16, .* got int32"),
    (dict(logits=torch.zeros(2, 0)), r"logits must be \[..., V\] with V >= 1, got \(2, 0\)"),
    (
        dict(target_ids=torch.zeros(3, dtype=torch.int64)),
        r"target_ids must have the shape \(2,\) .* got \(3,\)",
    ),
    (dict(target_ids=torch.zeros(2)), "target_ids must be integers, got float32"),
    (dict(target_ids=torch.tensor([0, 3])), r"target_ids\[1\] = 3 is outside \[0, 3\)"),
    (dict(target_ids=torch.tensor([-1, 0])), r"target_ids\[0\] = -1 is outside \[0, 3\)"),
    (dict(target_ids=[0, 1]), "target_ids must be a tensor, got list"),
    (dict(temperature=-0.5), "temperature must be > 0 and finite, got -0.5"),
    (dict(temperature=0), "temperature must be > 0 and finite, got 0"),
    (dict(temperature=float("nan")), "temperature must be > 0 and finite, got nan"),
    (dict(temperature=torch.ones(3)), r"temperature must be one value or have shape \(2,\), got \(3,\)"),
    (dict(temperature=torch.tensor([1.0, 0.0])), r"temperature\[1\] must be > 0 and finite, got 0.0"),
    (dict(temperature=torch.ones(2, requires_grad=True)), "temperature must not require a gradient"),
    (dict(temperature="hot"), "temperature must be a number or a tensor, got str"),
    (dict(logits=torch.zeros(1, 3).expand(2, 3), inplace_backward=True), "logits must not be expanded"),
    (
        dict(logits=torch.zeros(5).unfold(0, 3, 2), inplace_backward=True),
        r"logits must hold elements that share no memory with inplace_backward=True, got strides \(2, 1\)",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(logits=torch.zeros(2, 3), target_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=message):
        rlkernel.logprob(**good | change)


def test_debug_mode_reports_rows_without_a_distribution():
    logits = torch.zeros(2, 2, 3)
    ids = torch.zeros(2, 2, dtype=torch.int64)
    logits[1, 0, 2] = torch.nan
    with rlkernel.debug.checks(), pytest.raises(ValueError, match=r"logits\[1, 0\] .* holds NaN or \+inf"):
        rlkernel.logprob(logits, ids)
    logits[1, 0] = -torch.inf
    with rlkernel.debug.checks(), pytest.raises(ValueError, match=r"logits\[1, 0\] .* -inf everywhere"):
        rlkernel.logprob(logits, ids)
    ids[1, 0] = -100
    with rlkernel.debug.checks():
        rlkernel.logprob(logits, ids)


@pytest.mark.parametrize("backend", ["native", "emulated-warp32", "emulated-warp64", "triton", "reference"])
def test_target_outside_the_vocabulary_is_nan_without_the_check(backend, monkeypatch):
    """What a GPU does outside debug mode: no fault, and nothing that looks like a result."""
    from rlkernel.ops import _validate

    monkeypatch.setattr(_validate, "values", lambda *args: None)
    logits, ids = torch.randn(4, 65), torch.tensor([3, 65, -7, 2**40])
    skip_unless_able(backend, "logprob", logits, ids)
    out, grad = run(backend, logits, ids, [torch.ones(4), None, None])
    assert out.logprobs.isnan().tolist() == [False, True, True, True]
    assert grad.isnan().all(1).tolist() == [False, True, True, True]
    assert out.lse.isfinite().all()


@pytest.mark.parametrize("backend", ["native", "reference"])
def test_compiles_as_one_graph(backend):
    inputs = make_inputs(4, 40)
    skip_unless_able(backend, "logprob", *inputs.values())
    for t in (0.7, torch.full(inputs["target_ids"].shape, 0.7)):
        eager, compiled = eager_and_compiled(backend, **inputs, temperature=t)
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize("temperature", [0.7, torch.rand(4) + 0.5], ids=["scalar", "rows"])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_opcheck(temperature, return_entropy):
    from rlkernel.ops.logprob import op

    inputs = make_inputs(4, 40)
    call = LogprobCall(
        inputs["logits"].requires_grad_(), inputs["target_ids"], temperature, -100, return_entropy
    )
    torch.library.opcheck(op.node, op.flat(call))


def test_gradient_checkpointing_and_autocast():
    inputs = make_inputs(4, 40)
    leaf = inputs["logits"].clone().requires_grad_()
    want = torch.autograd.grad(rlkernel.logprob(leaf * 2, inputs["target_ids"]).logprobs.sum(), leaf)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = torch.utils.checkpoint.checkpoint(
            lambda x: rlkernel.logprob(x * 2, inputs["target_ids"]).logprobs, leaf, use_reentrant=False
        )
    assert out.dtype == torch.float32
    assert_equal("grad", torch.autograd.grad(out.sum(), leaf)[0], want)


def test_forced_backend_never_falls_back():
    logits, ids = make_inputs(2, 5, dtype=torch.float64).values()
    with rlkernel.use_backend("native"), pytest.raises(NotImplementedError, match="native: .*float64"):
        rlkernel.logprob(logits, ids)
