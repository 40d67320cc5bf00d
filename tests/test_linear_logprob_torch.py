"""linear_logprob: how autograd and torch.compile use it, and what it says of bad input."""

import linear_logprob_cases
import pytest
import torch
from backends import running
from bitwise import assert_equal
from linear_logprob_cases import NAMES, able, run, with_bias
from logprob_cases import upstream_like

import rlkernel
from rlkernel.calls.linear_logprob import LinearLogprobCall
from rlkernel.ops.linear_logprob import op
from rlkernel.reference.linear_logprob import make_inputs

pytestmark = pytest.mark.usefixtures("poison")
small_tiles = linear_logprob_cases.small_tiles


@pytest.mark.parametrize("backend", ["native", "triton", "reference"])
def test_retained_graph_and_double_use(backend, small_tiles):
    inputs = make_inputs(9, 16, 133)
    able(backend, inputs)
    hidden, weight = inputs["hidden"].clone().requires_grad_(), inputs["weight"].clone().requires_grad_()
    with running(backend):
        out = rlkernel.linear_logprob(hidden, weight, inputs["target_ids"], return_entropy=True)
        loss = out.logprobs.sum() + out.logprobs.pow(2).sum() + out.entropy.sum()
        loss.backward(retain_graph=True)
        first = hidden.grad.clone(), weight.grad.clone()
        loss.backward()
    assert_equal("hidden", hidden.grad, 2 * first[0])
    assert_equal("weight", weight.grad, 2 * first[1])


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("frozen", [False, True])
def test_compiles_as_one_graph(backend, frozen, small_tiles):
    inputs = make_inputs(9, 16, 133)
    able(backend, inputs)
    upstream = upstream_like(inputs["target_ids"])

    def loss(h, w, t):
        out = rlkernel.linear_logprob(h * 2, w, inputs["target_ids"], temperature=t, return_entropy=True)
        if frozen:
            return (out.logprobs * upstream[0]).sum()
        return sum((o * g).sum() for o, g in zip(out, upstream, strict=True))

    for t in (0.7, torch.full((9,), 0.7)):
        grads = []
        for fn in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            hidden = inputs["hidden"].clone().requires_grad_()
            weight = inputs["weight"].clone().requires_grad_(not frozen)
            with rlkernel.use_backend(backend):
                fn(hidden, weight, t).backward()
            grads.append((hidden.grad, weight.grad))
        assert_equal("hidden", grads[1][0], grads[0][0])
        if not frozen:
            assert_equal("weight", grads[1][1], grads[0][1])


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("return_entropy", [False, True])
def test_opcheck(frozen, return_entropy, small_tiles):
    inputs = with_bias(make_inputs(9, 16, 133))
    call = LinearLogprobCall(
        inputs["hidden"].requires_grad_(), inputs["weight"].requires_grad_(not frozen),
        inputs["bias"].requires_grad_(not frozen), inputs["target_ids"], 0.7, 1.0, None, -100, torch.float32,
        torch.float32, return_entropy, need_direction=frozen,
    )  # fmt: skip
    torch.library.opcheck(op.node, op.flat(call))


def test_autocast_uses_its_dtype_and_accumulates_fp32(small_tiles):
    inputs = make_inputs(19, 32, 133)
    low = {k: v.bfloat16() if v.is_floating_point() else v for k, v in inputs.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, grads = run(
            "native", inputs, upstream_like(inputs["target_ids"]), (True, True, False), return_entropy=True
        )
    want, _ = run("native", low, return_entropy=True)
    assert_equal("logprobs", got.logprobs, want.logprobs)
    assert [g.dtype for g in grads] == [torch.float32] * 2


def test_gradient_checkpointing(small_tiles):
    inputs = make_inputs(9, 16, 133)
    hidden, weight = (inputs[k].clone().requires_grad_() for k in ("hidden", "weight"))
    op = lambda h: rlkernel.linear_logprob(h * 2, weight, inputs["target_ids"]).logprobs  # noqa: E731
    want = torch.autograd.grad(op(hidden).sum(), (hidden, weight))
    out = torch.utils.checkpoint.checkpoint(op, hidden, use_reentrant=False)
    for name, a, b in zip(NAMES, torch.autograd.grad(out.sum(), (hidden, weight)), want, strict=False):
        assert_equal(name, a, b)


BAD = [
    (dict(hidden=torch.zeros(2, 4).int()), "hidden must be float16"),
    (dict(weight=torch.zeros(5, 3)), r"weight must be \[V, 4\] with V >= 1, got \(5, 3\)"),
    (dict(weight=torch.zeros(0, 4)), r"weight must be \[V, 4\] with V >= 1, got \(0, 4\)"),
    (dict(bias=torch.zeros(4)), r"bias must be \[5\], got \(4,\)"),
    (
        dict(target_ids=torch.zeros(3, dtype=torch.int64)),
        r"target_ids must have the shape \(2,\) .* got \(3,\)",
    ),
    (dict(target_ids=torch.tensor([0, 5])), r"target_ids\[1\] = 5 is outside \[0, 5\)"),
    (dict(temperature=-1), "temperature must be > 0 and finite, got -1"),
    (dict(softcap=0.0), "softcap must be > 0 and finite, or None, got 0.0"),
    (dict(logit_scale=float("inf")), "logit_scale must be finite, got inf"),
    (dict(logits_dtype=torch.int8), "logits_dtype must be float16, bfloat16 or float32, got torch.int8"),
    (
        dict(hidden=torch.zeros(2, 4).half(), weight=torch.zeros(5, 4).half(), logits_dtype=torch.bfloat16),
        "logits_dtype must be float32 or the float16 of the inputs, got bfloat16",
    ),
    (dict(algorithm="magic"), "algorithm must be one of 'auto', 'tiled', 'fused', got 'magic'"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m[:30] for _, m in BAD])
def test_bad_input_is_named(change, message):
    good = dict(hidden=torch.zeros(2, 4), weight=torch.zeros(5, 4), target_ids=torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=message):
        rlkernel.linear_logprob(**good | change)


def test_a_named_algorithm_never_falls_back():
    inputs = make_inputs(2, 4, 5)
    with (
        rlkernel.use_backend("native"),
        pytest.raises(NotImplementedError, match="native: algorithm 'fused' is a Triton"),
    ):
        rlkernel.linear_logprob(**inputs, algorithm="fused")
