"""prefix_shared_attention: how autograd and torch.compile use it, and what it says of bad input."""

import math
import re

import pytest
import torch
from backends import of, running
from bitwise import assert_equal
from prefix_cases import FORESTS, OPTIONS, forest, groups, inputs_of, reasons, run, skip_unless_it_can

import rlkernel
from rlkernel import PrefixLayout, dispatch
from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule
from rlkernel.ops import prefix_shared_attention as public
from rlkernel.reference import prefix_shared_attention as reference

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("prefix_shared_attention"))
pytestmark = pytest.mark.usefixtures("poison")


# Autograd and torch.compile


def leaves_of(inputs):
    tensors = [inputs[name] for name in ("q", "k", "v", "sinks")]
    return [x if x is None else x.requires_grad_() for x in tensors]


@ON_EVERY_BACKEND
def test_gradcheck(backend, device):
    shape = forest([(3, -1, False), (2, 0, False), (2, 1, True), (1, 1, True), (2, 0, True)])
    inputs = inputs_of(shape, 2, 1, 4, dtype=torch.float64, device=device, sinks=True)
    layout = shape.layout()
    if reasons(backend, layout, inputs):
        return  # without fp64 there are no differences to take; the other tests compare with dense
    leaves = [inputs[name].requires_grad_() for name in ("q", "k", "v", "sinks")]

    def op(q, k, v, sinks):
        return rlkernel.prefix_shared_attention(q, k, v, layout, sinks=sinks, softcap=2.0, window=4)

    with running(backend):
        assert torch.autograd.gradcheck(op, leaves)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["fp32", "fp16"])
@ON_EVERY_BACKEND
def test_autocast_changes_no_bit(backend, device, dtype):
    inputs = inputs_of(FORESTS["ragged"], dtype=dtype, device=device, sinks=True)
    layout = FORESTS["ragged"].layout()
    for options in ({}, {"softcap": 2.0}):
        skip_unless_it_can(backend, layout, inputs, **options)
        want = run(backend, layout, inputs, **options)
        with torch.autocast(device, torch.bfloat16):  # forward and backward, as a checkpoint runs them
            got = run(backend, layout, inputs, **options)
        for name in ("out", "lse", "dq", "dk", "dv", "dsinks"):
            assert_equal(name, getattr(got, name), getattr(want, name))


@ON_EVERY_BACKEND
def test_some_gradients_only(backend, device):
    shape = FORESTS["ragged"]
    inputs = inputs_of(shape, device=device, sinks=True)
    skip_unless_it_can(backend, shape.layout(), inputs)
    everything = run(backend, shape.layout(), inputs)
    for wanted in ("q", "v", "sinks"):
        x = {n: inputs[n].clone().requires_grad_(n == wanted) for n in ("q", "k", "v", "sinks")}
        with running(backend):
            out = rlkernel.prefix_shared_attention(**x, batch=shape.layout())
        (grad,) = torch.autograd.grad(out, x[wanted], inputs["grad_out"])
        assert_equal(f"d{wanted}", grad, getattr(everything, f"d{wanted}"))
    with running(backend), torch.no_grad():
        out, lse = rlkernel.prefix_shared_attention(**x, batch=shape.layout(), return_lse=True)
    assert not out.requires_grad and not lse.requires_grad
    torch.testing.assert_close(out, everything.out, rtol=0, atol=1e-6)  # a pass without gradients may differ
    with running(backend):
        _, lse = rlkernel.prefix_shared_attention(**x, batch=shape.layout(), return_lse=True)
    assert not lse.requires_grad  # nobody may differentiate a merge through it


def test_backends_are_told_whether_a_gradient_is_wanted(monkeypatch):
    """Some have no backward: a rollout's or a reference model's pass may run on them."""
    shape = FORESTS["ragged"]
    inputs = inputs_of(shape, sinks=True)
    asked = []

    def unsupported(*_, needs_grad, **__):
        asked.append(needs_grad)
        return []

    monkeypatch.setattr(reference, "unsupported", unsupported)
    for name in ("q", "k", "v", "sinks", None):
        x = {n: inputs[n].detach().requires_grad_(n == name) for n in ("q", "k", "v", "sinks")}
        with running("reference"):
            rlkernel.prefix_shared_attention(**x, batch=shape.layout())
            with torch.no_grad():
                rlkernel.prefix_shared_attention(**x, batch=shape.layout())
    assert asked == [True, False] * 4 + [False, False]


def test_a_pass_without_gradients_runs_where_one_with_them_does(monkeypatch):
    """Whatever a backend that has no backward says: on-policy logprobs are then the same bits."""
    assert "flashinfer" not in public.ORDER and set(public.ORDER) < set(dispatch.BACKENDS)
    load = dispatch._load

    def without_backward(name, op, tensors, options):
        if name == "flashinfer":  # as if it were installed
            return reference, ["no backward"] if options["needs_grad"] else []
        return load(name, op, tensors, options)

    monkeypatch.setattr(dispatch, "_load", without_backward)
    shape = FORESTS["ragged"]
    x = {name: value for name, value in inputs_of(shape).items() if name in ("q", "k", "v")}
    ran, lse = [], []
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            leaves = {name: value.detach().requires_grad_(grad) for name, value in x.items()}
            _, norm = rlkernel.prefix_shared_attention(**leaves, batch=shape.layout(), return_lse=True)
            ran.append(rlkernel.last_backend("prefix_shared_attention"))
            lse.append(norm.detach())
    assert ran[0] == ran[1]
    assert_equal("lse", *lse)
    monkeypatch.setattr(public, "ORDER", ("flashinfer", *public.ORDER))  # what the order is there for
    rlkernel.prefix_shared_attention(**x, batch=shape.layout())
    assert rlkernel.last_backend("prefix_shared_attention") == "flashinfer"


@pytest.mark.parametrize("v_dim", [16, 12])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_compile_without_graph_breaks(options, v_dim):
    asked = dict(OPTIONS[options])
    shape = FORESTS["a depth of three"]
    inputs = inputs_of(shape, sinks=asked.pop("sinks", False), v_dim=v_dim)
    layout = shape.layout()

    def loss(q, k, v, sinks):
        out, lse = rlkernel.prefix_shared_attention(q, k, v, layout, sinks=sinks, return_lse=True, **asked)
        return (out * inputs["grad_out"]).sum(), out, lse

    leaves = leaves_of(inputs)
    wanted = [x for x in leaves if x is not None]
    found = []
    for f in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        total, out, lse = f(*leaves)
        found.append([out, lse, *torch.autograd.grad(total, wanted)])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_a_batch_of_other_lengths_may_follow_under_compile():
    compiled = torch.compile(rlkernel.prefix_shared_attention, fullgraph=True, backend="aot_eager")
    for shape in (FORESTS["ragged"], FORESTS["one sample"], FORESTS["a depth of five"]):
        inputs = inputs_of(shape)
        q, k, v = (inputs[name] for name in "qkv")
        want = rlkernel.prefix_shared_attention(q, k, v, shape.layout())
        torch.testing.assert_close(compiled(q, k, v, shape.layout()), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("v_dim", [16, 24])
@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(sinks, v_dim):
    shape = FORESTS["ragged"]
    inputs = inputs_of(shape, sinks=sinks, v_dim=v_dim)
    leaves = leaves_of(inputs)
    q, k, v, s = leaves
    needs = (True, True, True, sinks)
    call = AttentionCall(q, k, v, shape.layout(), AttentionRule(0.25, 0.0, 0, False), s, needs)
    torch.library.opcheck(public.op.node, public.op.flat(call))


def test_tables_are_made_once_under_compile():
    layout = FORESTS["ragged"].layout()
    assert PrefixLayout.of_tensor(layout.segments) is PrefixLayout.of_tensor(layout.segments.clone())


# Errors


def call(**changes):
    layout = groups((4, [3, 2])).layout()
    tensors = {n: torch.zeros(9, h, 8) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    return rlkernel.prefix_shared_attention(**{**tensors, "batch": layout, **changes})


WRONG = {
    "batch must be a PrefixBatch or a PrefixLayout, got list": {"batch": [4, 3, 2]},
    "q must be [T, Hq, D] with the batch's T = 9, got (8, 4, 8)": {"q": torch.zeros(8, 4, 8)},
    "q must be [T, Hq, D] with the batch's T = 9, got (1, 9, 4, 8)": {"q": torch.zeros(1, 9, 4, 8)},
    "k must be [T, Hkv, D] with the batch's T = 9, got (9, 16)": {"k": torch.zeros(9, 16)},
    "k must have q's dtype float32, got float64": {"k": torch.zeros(9, 2, 8).double()},
    "q must be float16, bfloat16, float32 or float64, got int64": {"q": torch.zeros(9, 4, 8).long()},
    "v must be [T, 2, Dv], with k's heads and Dv of 1 at least, got (9, 4, 8)": {"v": torch.zeros(9, 4, 8)},
    "v must be [T, 2, Dv], with k's heads and Dv of 1 at least, got (9, 2, 0)": {"v": torch.zeros(9, 2, 0)},
    "k must have q's head dim 8, at least 1, got 4": {"k": torch.zeros(9, 2, 4), "v": torch.zeros(9, 2, 4)},
    "q must have a multiple of the 3 heads of k, got 4": {
        "k": torch.zeros(9, 3, 8),
        "v": torch.zeros(9, 3, 8),
    },
    "k must be on q's device cpu, got meta": {"k": torch.zeros(9, 2, 8, device="meta")},
    "sinks must have shape (4,), one a head, got (2,)": {"sinks": torch.zeros(2)},
    "sinks must be float16, bfloat16, float32 or float64, got int64": {"sinks": torch.zeros(4).long()},
    "scale must be > 0 and finite, or None, got 0": {"scale": 0},
    "scale must be > 0 and finite, or None, got inf": {"scale": math.inf},
    "softcap must be > 0 and finite, or None, got -1.0": {"softcap": -1.0},
    "softcap must be > 0 and finite, or None, got nan": {"softcap": math.nan},
    "window must be an integer >= 1, or None, got 0": {"window": 0},
    "window must be an integer of 64 bits or None, got 2.0": {"window": 2.0},
    "window must be an integer of 64 bits or None, got bool": {"window": True},
    "parity must be one of 'fast', 'bitwise', got 'exact'": {"parity": "exact"},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(**WRONG[message])


def test_a_backend_that_cannot_says_why():
    with rlkernel.use_backend("flashinfer"), pytest.raises(NotImplementedError, match="flashinfer: "):
        call()
