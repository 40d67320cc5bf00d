"""rlkernel.opaque: what autograd and torch.compile get of an op follows from its records."""

import itertools
import weakref
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from differentiable import OPS, leaves
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import rlkernel
from rlkernel.opaque import Op
from rlkernel.runtime.schema import negative, part_of, resolved

NUMBER = itertools.count()


class Rule(NamedTuple):
    factors: tuple[float, ...]
    terms: tuple[int, ...]
    name: str
    dtype: torch.dtype
    limit: float | None


class ScaleCall(NamedTuple):
    """y = sum of factors * scale * x, and its double where that is asked for."""

    x: Tensor
    scale: float | Tensor
    shift: Tensor | None
    divisor: float | Tensor | None
    rule: Rule
    twice: bool = False
    needs: tuple[bool, ...] = (True, True)


class ScaleResults(NamedTuple):
    y: Tensor
    double: Tensor | None
    count: Tensor
    total: Tensor
    kept: Tensor | None = None


RULE = Rule((0.5, 1.5), (3, 1), "sum", torch.float32, None)
seen: list = []


def forward(impl, call):
    y = call.x * call.scale * sum(call.rule.factors)
    y = y if call.shift is None else y + call.shift
    y = y if call.divisor is None else y / call.divisor
    count = torch.tensor(float(call.x.numel()))
    double = 2 * y if call.twice else None
    kept = None if call.shift is None else y.sum()
    return ScaleResults(y, double, count, call.x.view(-1), kept)  # a view of the input, as libraries give


def backward(impl, call, results, grads):
    seen.append((call, results, grads))
    g = torch.zeros_like(results.total.view(call.x.shape if call.x is not None else -1))
    for grad, factor in zip(grads, (1, 2), strict=False):
        g = g if grad is None else g + factor * grad
    whole = g if call.divisor is None else g / call.divisor
    of_shift = whole if call.needs[1] else None
    return whole * call.scale * sum(call.rule.factors), of_shift


def like(call):
    y = torch.empty_like(call.x)
    kept = call.x.new_empty(()) if call.shift is not None else None
    return ScaleResults(y, y.clone() if call.twice else None, call.x.new_empty(()), y.view(-1), kept)


def made(**options):
    usual = {
        "outputs": 3,
        "pick": lambda call: SimpleNamespace(),
        "like": like,
        "forward": forward,
        "backward": backward,
        "gradients": ("x", "shift"),
        "differentiable": ("y", "double"),
        "saves": ("x", "scale", "divisor", "total"),
        "saves_if": {"kept": "shift"},
    }
    return Op(f"test_scale_{next(NUMBER)}", ScaleCall, ScaleResults, **usual | options)


OP = made()


def call_of(x, scale=3.0, shift=None, divisor=None, **options):
    return ScaleCall(x, scale, shift, divisor, RULE, **options)


def leaf(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


CALLS = {
    "numbers": lambda: call_of(leaf(2, 3)),
    "tensors": lambda: call_of(leaf(2, 3), torch.tensor(2.0), leaf(2, 3), torch.tensor(4.0), twice=True),
    "mixed": lambda: call_of(leaf(2, 3), torch.tensor(2.0), None, 4.0),
}


def same(a, b):
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else a == b


@pytest.mark.parametrize("name", CALLS)
def test_a_record_crosses_there_and_back(name):
    call = CALLS[name]()
    back = OP.part.made(iter(OP.flat(call)), True)
    assert type(back) is ScaleCall and type(back.rule) is Rule
    assert all(map(same, call, back))
    assert len(OP.flat(call)) == len(OP.part.slots) and "float[] rule_factors" in OP.part.slots


def test_what_no_schema_has_is_refused():
    with pytest.raises(TypeError, match="x must be a tensor, a number, a string or a record of these"):
        part_of("x", dict)
    with pytest.raises(TypeError, match="has no nothing"):
        made(saves=("nothing",))


@pytest.mark.parametrize("name", CALLS)
def test_what_is_saved_comes_back(name):
    call = CALLS[name]()
    results = forward(None, call)
    plain, saved = OP.store.taken(call, results)
    assert not any(isinstance(x, Tensor) for x in plain)
    assert all(x is None or isinstance(x, Tensor) for x in saved)
    again, stats = OP.store.back(plain, saved)
    for field in ("x", "scale", "divisor", "rule", "twice"):
        assert getattr(again, field) is getattr(call, field)
    assert again.shift is None and stats.y is None and stats.count is None
    assert stats.total is results.total and (stats.kept is None) == (call.shift is None)


def gradients(function, call):
    sources = [x for x in (call.x, call.shift) if x is not None]
    y, double, count = function(call)
    loss = y.square().sum() + (0 if double is None else double.sum())
    return y.detach(), count, double is None, *torch.autograd.grad(loss, sources)


def plain(call):
    return forward(None, call)[:3]


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_those_of_torch(name):
    assert all(map(same, gradients(OP, CALLS[name]()), gradients(plain, CALLS[name]())))


@pytest.mark.parametrize("name", CALLS)
def test_one_graph_gives_the_same(name):
    torch._dynamo.reset()
    compiled = torch.compile(OP, fullgraph=True, backend="aot_eager")
    assert all(map(same, gradients(compiled, CALLS[name]()), gradients(OP, CALLS[name]())))


@pytest.mark.parametrize("name", CALLS)
def test_opcheck(name):
    torch.library.opcheck(OP.node, OP.flat(CALLS[name]()))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant):
    call = CALLS["tensors"]()
    want = gradients(OP, call)
    y, double, _ = checkpoint(
        lambda x, shift: OP(call._replace(x=x, shift=shift)), call.x, call.shift, use_reentrant=reentrant
    )
    (y.square().sum() + double.sum()).backward()
    assert torch.equal(call.x.grad, want[3]) and torch.equal(call.shift.grad, want[4])


def test_needs_says_whose_gradient_is_wanted():
    call = CALLS["tensors"]()._replace(shift=torch.ones(2, 3))
    seen.clear()
    torch.autograd.grad(OP(call)[0].sum(), call.x)
    (asked, _, (of_y, of_double, of_count)) = seen.pop()
    assert asked.needs == (True, False) and of_y is not None and of_double is None and of_count is None


@pytest.mark.parametrize("saves", [("x", "scale", "divisor", "total"), ("scale", "divisor", "total")])
def test_a_second_derivative_is_refused(saves):
    """Whether the gradient is connected by an input that is saved, or by what stands for it."""
    op = made(saves=saves, backward=lambda impl, call, results, grads: (grads[0] * 6, None))
    x = leaf(2, 3)
    (g,) = torch.autograd.grad(op(call_of(x))[0].sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=f"{op.name} has no second derivative"):
        g.sum().backward()


def negated(x):
    """Equal to ``x``, as the imaginary part of what is conjugated: memory holds the values times -1."""
    return torch.complex(torch.zeros_like(x), -x).conj().imag.detach().requires_grad_(x.requires_grad)


@pytest.mark.parametrize("compiled", [False, True])
def test_values_that_torch_negates_reach_a_backend_as_they_are(compiled):
    torch._dynamo.reset()
    run = torch.compile(OP, fullgraph=True, backend="aot_eager") if compiled else OP
    call = CALLS["tensors"]()
    want = gradients(OP, call)
    names = ("x", "scale", "shift", "divisor")
    given = call._replace(**{name: negated(getattr(call, name)) for name in names})
    assert all(getattr(given, name).is_neg() for name in names)
    seen.clear()
    assert all(map(same, gradients(run, given), want))
    y = run(given)[0]
    y.backward(negated(torch.ones_like(y)))
    for asked, results, grads in seen:
        tensors = [x for x in (*asked, *results, *grads) if isinstance(x, Tensor)]
        assert tensors and not any(x.is_neg() for x in tensors)


def test_values_of_a_record_in_a_record_reach_a_backend_as_they_are():
    x = torch.ones(3)
    call = Outside(Inner(negated(x), RULE), (1, 2))
    assert eval(f"lambda call: {negative('call', Outside)}", {"Tensor": Tensor})(call)
    assert not resolved(call).inner.y.is_neg() and torch.equal(resolved(call).inner.y, x)
    assert resolved(call).other == (1, 2) and type(resolved(call)) is Outside


@pytest.mark.parametrize("before", [False, True], ids=["dispatched", "before dispatch"])
@pytest.mark.parametrize("op", OPS)
def test_an_op_is_one_node_of_a_record(op, before):
    """Of other values too: a record of a kernel's memory alone would give what is in there by chance."""
    function, _ = OPS[op]
    arguments = [x.detach() for x in leaves(op)]
    others = [x / 2 for x in arguments]
    want = function(*others)
    record = make_fx(lambda xs: function(*xs), pre_dispatch=before)(arguments)
    assert any("rlkernel" in str(node.target) for node in record.graph.nodes)
    assert torch.equal(record(others), want)


def test_arguments_of_a_node_have_different_names():
    """Inductor makes a signature of Python's of them, in a backward pass that it compiles."""
    packets = {name: getattr(torch.ops.rlkernel, name) for name in dir(torch.ops.rlkernel)}
    nodes = {k: x.default for k, x in packets.items() if isinstance(x, torch._ops.OpOverloadPacket)}
    assert {"logprob", "rms_norm_backward", "prefix_shared_attention_backward"} <= {*nodes}
    for name, node in nodes.items():
        arguments = [x.name for x in node._schema.arguments]
        assert len({*arguments}) == len(arguments), (name, arguments)


ANGLES = torch.ones(2, 3, 4).unbind()
ALONE = {
    "layer_norm": rlkernel.layer_norm,
    "matmul": rlkernel.matmul,
    "rms_norm": rlkernel.rms_norm,
    "rotary": lambda q, _: rlkernel.rotary(q, None, *ANGLES).q,
    "swiglu": rlkernel.swiglu,
}


@pytest.mark.parametrize("op", ALONE)
def test_inductor_compiles_both_passes(op):
    """The default of torch.compile; of a node alone, for which it needs no compiler of C++."""
    found = []
    for function in (ALONE[op], torch.compile(ALONE[op], dynamic=False)):
        given = leaves(op)
        out = function(*given)
        out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
        found.append([out.detach(), *(x.grad for x in given if x.grad is not None)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)


def test_the_name_in_a_graph_is_the_op_s():
    assert OP(CALLS["numbers"]())[0].grad_fn.name() == f"_{OP.name.title().replace('_', '')}Backward"


def test_a_tangent_is_refused_and_not_lost():
    x = leaf(2, 3)
    for given in (x, x.detach()):
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward mode AD"):
            OP(call_of(forward_ad.make_dual(given, torch.ones(2, 3))))


def test_a_saved_tensor_that_is_changed_in_place():
    call = CALLS["tensors"]()
    y = OP(call)[0]
    call.divisor.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_nothing_is_saved_where_nothing_is_differentiated():
    def refuse(x):
        raise AssertionError("saved")

    call = CALLS["tensors"]()
    with torch.autograd.graph.saved_tensors_hooks(refuse, refuse):
        OP(call._replace(x=call.x.detach(), shift=call.shift.detach()))
        with torch.no_grad():
            y, *_ = OP(call)
        assert not y.requires_grad
        with pytest.raises(AssertionError, match="saved"):
            OP(call)


def test_constants_have_no_gradient():
    y, _, count = OP(CALLS["numbers"]())
    assert y.requires_grad and not count.requires_grad


class Inner(NamedTuple):
    """A record with a tensor, as the policy loss within a call of ``linear_policy_loss``."""

    y: Tensor
    rule: Rule


class Outside(NamedTuple):
    inner: Inner
    other: tuple[int, ...]


class OuterCall(NamedTuple):
    x: Tensor
    inner: Inner


class OuterResults(NamedTuple):
    z: Tensor


def test_a_record_in_a_record_crosses_and_its_tensors_are_not_kept_for_backward():
    rests = []

    def backward(impl, call, results, grads):
        rests.append(call.inner)
        return (grads[0] * 2,)

    op = Op(
        f"test_outer_{next(NUMBER)}", OuterCall, OuterResults, pick=lambda call: None,
        like=lambda call: OuterResults(torch.empty_like(call.x)),
        forward=lambda impl, call: OuterResults(2 * call.x + call.inner.y), backward=backward,
        gradients=("x",), differentiable=("z",), saves=("x",),
    )  # fmt: skip
    x, y = leaf(3), torch.ones(3)
    call = OuterCall(x, Inner(y, RULE))
    assert op.made(op.flat(call)) == call
    there = weakref.ref(y)
    (z,) = op(call)
    del call, y
    assert there() is None
    z.sum().backward()
    assert rests == [None] and torch.equal(x.grad, torch.full((3,), 2.0))
