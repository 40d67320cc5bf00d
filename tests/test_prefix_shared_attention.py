"""prefix_shared_attention: one body of tests for every backend, against every sample run alone and dense."""

import math
import re

import pytest
import torch
from backends import EMULATED, is_slow, of, running, skip_unless_able
from bitwise import assert_equal
from prefix_cases import FORESTS, LARGE, Result, check_against_dense, forest, groups, inputs_of, run

import rlkernel
from rlkernel import PrefixBatch, PrefixLayout
from rlkernel.reference import prefix_shared_attention as reference
from rlkernel.types import AttentionRule

OP = "prefix_shared_attention"
ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of(OP))
pytestmark = pytest.mark.usefixtures("poison")

OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 2.0},
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window 8": {"window": 8},
    "window 1000": {"window": 1000},
    "sinks": {"sinks": True},
    "all": {"scale": 0.5, "softcap": 3.0, "window": 5, "sinks": True},
}


# LARGE for those to whom a row costs milliseconds
PAST_A_TILE = {
    "a long prompt": groups((150, [3, 5])),
    "many short completions": groups((20, [2] * 40)),
    "long stems": forest([(66, -1, False), (35, 0, False), (70, 1, True), (3, 2, True), (9, 2, True)]),
}


def rule_of(inputs, *, scale=None, softcap=None, window=None, parity="fast"):
    d = inputs["q"].shape[2]
    return AttentionRule(scale or d**-0.5, softcap or 0.0, window or 0, parity == "bitwise")


def reasons(backend, layout, inputs, **options):
    name = "native" if backend in EMULATED else backend
    rule = rule_of(inputs, **options)
    named = {"layout": layout, "rule": rule, "sinks": inputs["sinks"], "needs_grad": True}
    return rlkernel.explain(OP, *(inputs[x] for x in "qkv"), **named)[name]


def skip_unless_it_can(backend, layout, inputs, **options):
    named = {"layout": layout, "sinks": inputs["sinks"], "needs_grad": True}
    rule = rule_of(inputs, **options)
    skip_unless_able(backend, OP, *(inputs[x] for x in "qkv"), rule=rule, **named)


def widest(backend, device, shape, *sizes, sinks=False, **options):
    """Inputs in the dtype that shows the smallest errors: fp64 where the backend has it, else fp32."""
    for dtype in (torch.float64, torch.float32):
        inputs = inputs_of(shape, *sizes, dtype=dtype, device=device, sinks=sinks)
        if not reasons(backend, shape.layout(), inputs, **options):
            return inputs
    half = {k: None if x is None else x.bfloat16() for k, x in inputs.items()}  # libraries of the GPU
    skip_unless_it_can(backend, shape.layout(), half, **options)
    return half


def check(backend, device, shape, *sizes, sinks=False, **options):
    inputs = widest(backend, device, shape, *sizes, sinks=sinks, **options)
    return check_against_dense(backend, shape, inputs, **options)


# What it computes


@pytest.mark.parametrize("name", FORESTS)
@ON_EVERY_BACKEND
def test_each_sample_is_as_if_alone(backend, device, name):
    slow = is_slow(backend, device)
    for options in ("plain", "all") if slow else OPTIONS:
        check(backend, device, FORESTS[name], *((2, 1) if slow else (4, 2)), **OPTIONS[options])


@pytest.mark.parametrize("options", OPTIONS)
@ON_EVERY_BACKEND
def test_options(backend, device, options):
    for name in ("a depth of three",) if is_slow(backend, device) else LARGE:
        check(backend, device, (FORESTS | LARGE)[name], 2, 1, **OPTIONS[options])


@pytest.mark.parametrize("name", LARGE)
@ON_EVERY_BACKEND
def test_large_prompts_and_many_completions(backend, device, name):
    slow = is_slow(backend, device)
    check(backend, device, (PAST_A_TILE if slow else LARGE)[name], 1, 1)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 1), (6, 2), (8, 1)], ids=str)
@ON_EVERY_BACKEND
def test_heads(backend, device, heads):
    for name in ("ragged",) if is_slow(backend, device) else ("ragged", "past tiles", "a depth of five"):
        check(backend, device, FORESTS[name], *heads)


@pytest.mark.parametrize("head_dim", [16, 40, 64, 80, 128, 256])
@ON_EVERY_BACKEND
def test_head_dims(backend, device, head_dim):
    if is_slow(backend, device) and head_dim in (64, 80):
        head_dim = 24
    check(backend, device, FORESTS["ragged"], 2, 1, head_dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@ON_EVERY_BACKEND
def test_errors_are_at_most_twice_torchs(backend, device, dtype):
    slow = is_slow(backend, device)
    names = ("ragged", "a depth of three") if slow else ("ragged", "past tiles", "a depth of five", *LARGE)
    for name in names:
        few = slow or name in LARGE  # torch's eager attention is slow in half precision on a CPU
        for options in ("plain", "all") if few else ("plain", "softcap", "window 8", "sinks", "all"):
            asked = dict(OPTIONS[options])
            shape = (FORESTS | LARGE)[name]
            inputs = inputs_of(shape, 4, 2, 32, dtype=dtype, device=device, sinks=asked.pop("sinks", False))
            skip_unless_it_can(backend, shape.layout(), inputs, **asked)
            got = check_against_dense(backend, shape, inputs, **asked)
            assert got.out.dtype == got.dk.dtype == dtype and got.lse.dtype == torch.float32


@ON_EVERY_BACKEND
def test_large_scores(backend, device):
    """Rows whose weight lies on one key, or whose scores overflow when nobody subtracts their maximum."""
    shape = FORESTS["ragged"]
    inputs = widest(backend, device, shape, 2, 1)
    inputs["q"][::2] *= 200
    inputs["k"][1::3] *= 5
    got = check_against_dense(backend, shape, inputs)
    inputs["sinks"] = torch.full((2,), -1e4, dtype=inputs["q"].dtype, device=device)
    low = run(backend, shape.layout(), inputs)
    torch.testing.assert_close((low.out, low.lse), (got.out, got.lse))
    assert not bool(low.dsinks.any())
    high = run(backend, shape.layout(), inputs | {"sinks": -inputs["sinks"]})
    assert not bool(high.out.any() or high.dq.any() or high.dk.any() or high.dv.any())
    assert bool((high.lse == 1e4).all())


@ON_EVERY_BACKEND
def test_a_batch_without_rows_and_with_one(backend, device):
    empty = PrefixLayout((), (), ())
    inputs = {name: torch.zeros(0, 2, 16, device=device) for name in ("q", "k", "v", "grad_out")}
    for sinks in (None, torch.ones(2, device=device)):
        got = run(backend, empty, inputs | {"sinks": sinks})
        assert got.out.shape == got.dq.shape == got.dk.shape == (0, 2, 16) and got.lse.shape == (2, 0)
        assert sinks is None or got.dsinks.tolist() == [0, 0]
    one = inputs_of(FORESTS["one row"], 2, 1, device=device)
    got = run(backend, FORESTS["one row"].layout(), one)
    assert_equal("out", got.out, one["v"].expand(-1, 2, -1))
    assert got.dq.abs().max() < 1e-6 and got.dk.abs().max() < 1e-6


@ON_EVERY_BACKEND
def test_a_batch_may_stand_for_its_layout(backend, device):
    batch = PrefixBatch.pack([[5, 6, 7, 8]], [[[1, 2, 3], [4]]], device=device)
    inputs = {n: torch.randn(batch.total, h, 16, device=device) for n, h in (("q", 2), ("k", 1), ("v", 1))}
    with running(backend):
        a = rlkernel.prefix_shared_attention(**inputs, batch=batch)
        b = rlkernel.prefix_shared_attention(**inputs, batch=batch.layout)
    assert_equal("out", a, b)


# Memory


def like_hugging_face(x):
    """[T, H, D] as a view of [1, H, T, D]."""
    return x.transpose(0, 1).contiguous()[None].transpose(1, 2)[0]


def one_of_three(x):
    """[T, H, D] as columns of a wider product, at an odd address."""
    wide = x.new_full((x.shape[0], 3 * x.shape[1], x.shape[2] + 1), torch.nan)
    wide[:, 1 : 1 + x.shape[1], 1:] = x
    return wide[:, 1 : 1 + x.shape[1], 1:]


def last_dimension_strided(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("view", [like_hugging_face, one_of_three, last_dimension_strided])
@ON_EVERY_BACKEND
def test_strides(backend, device, view):
    for name in ("ragged",) if is_slow(backend, device) else ("ragged", "past tiles", "a depth of five"):
        inputs = widest(backend, device, FORESTS[name])
        inputs |= {name: view(inputs[name]) for name in ("q", "k", "v", "grad_out")}
        for options in ({}, {"window": 6}):
            check_against_dense(backend, FORESTS[name], inputs, **options)


@ON_EVERY_BACKEND
def test_expanded_gradients(backend, device):
    for name in ("ragged",) if is_slow(backend, device) else ("ragged", "past tiles"):
        inputs = widest(backend, device, FORESTS[name])
        one = torch.ones((), dtype=inputs["q"].dtype, device=device)
        inputs["grad_out"] = one.expand(inputs["q"].shape)  # what out.sum() sends back
        check_against_dense(backend, FORESTS[name], inputs)
        inputs["grad_out"] = inputs["q"][:1].expand(inputs["q"].shape)
        check_against_dense(backend, FORESTS[name], inputs)


@ON_EVERY_BACKEND
def test_the_inputs_stay_as_they_are(backend, device):
    shape = FORESTS["ragged"]
    inputs = inputs_of(shape, device=device, sinks=True)
    before = {name: x.clone() for name, x in inputs.items()}
    run(backend, shape.layout(), inputs, window=6)
    for name, x in inputs.items():
        assert_equal(name, x, before[name])


# Bits


def assert_same(got: Result, want: Result):
    for name, a, b in zip(Result._fields, got, want, strict=True):
        if a is not None:
            assert_equal(name, a, b)


BITS = [FORESTS["past tiles"], FORESTS["a depth of five"], *LARGE.values()]
FEW_BITS = [groups((37, [3, 20]), (16, [1, 7]))]


@pytest.mark.parametrize("parity", ["fast", "bitwise"])
@ON_EVERY_BACKEND
def test_the_same_call_gives_the_same_bits(backend, device, parity):
    for shape in FEW_BITS if is_slow(backend, device) else BITS:
        inputs = inputs_of(shape, 2, 1, device=device, sinks=True)
        skip_unless_it_can(backend, shape.layout(), inputs, parity=parity)
        first = run(backend, shape.layout(), inputs, parity=parity)
        assert_same(run(backend, shape.layout(), inputs, parity=parity), first)


@pytest.mark.parametrize("options", ["plain", "softcap", "window 8", "sinks", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@ON_EVERY_BACKEND
def test_parity_with_repeated_prompts(backend, device, dtype, options):
    asked = dict(OPTIONS[options])
    sinks = asked.pop("sinks", False)
    slow = is_slow(backend, device)
    if slow and (dtype == torch.bfloat16) != (options == "all"):
        return
    for shape in [*FEW_BITS, FORESTS["a depth of five"]] if slow else [*FEW_BITS, *BITS]:
        layout = shape.layout()
        inputs = inputs_of(shape, 2, 1, 32, dtype=dtype, device=device, sinks=sinks)
        inputs |= {name: like_hugging_face(inputs[name]) for name in "qkv"}
        skip_unless_it_can(backend, layout, inputs, parity="bitwise", **asked)
        repeated, index = layout.repeated()
        index = index.to(device)
        dense = inputs | {name: inputs[name][index] for name in ("q", "k", "v", "grad_out")}
        got = run(backend, layout, inputs, parity="bitwise", **asked)
        want = run(backend, repeated, dense, parity="bitwise", **asked)
        assert_equal("out", got.out[index], want.out)
        assert_equal("lse", got.lse[:, index], want.lse)
        # and bits are not all: it is still the same attention
        fast = run(backend, layout, inputs, **asked)
        torch.testing.assert_close(got.out, fast.out, rtol=0, atol=0.03 if dtype == torch.bfloat16 else 1e-5)


@ON_EVERY_BACKEND
def test_a_row_does_not_depend_on_other_groups(backend, device):
    """Bitwise parity makes a row batch-invariant too: its tiles are cut at its own positions."""
    sizes = [(37, [20, 5]), (70, [9, 66, 9]), (0, [4]), (16, [16])]
    if is_slow(backend, device):
        sizes = [(20, [6, 5]), (35, [9, 2]), (0, [4]), (3, [16])]
    shape = groups(*sizes)
    inputs = inputs_of(shape, 2, 1, 32, device=device)
    skip_unless_it_can(backend, shape.layout(), inputs, parity="bitwise")
    whole = run(backend, shape.layout(), inputs, parity="bitwise")
    for order in ([3, 1, 0, 2], [1], [0, 3]):
        rows = torch.cat([rows_of(sizes, b)[0] for b in order] + [rows_of(sizes, b)[1] for b in order])
        part = {k: None if x is None else x[rows.to(device)] for k, x in inputs.items()}
        got = run(backend, groups(*(sizes[b] for b in order)).layout(), part, parity="bitwise")
        assert_equal(f"out of {order}", got.out, whole.out[rows.to(device)])
        assert_equal(f"lse of {order}", got.lse, whole.lse[:, rows.to(device)])


def rows_of(sizes, b):
    """The rows of group b: of its prompt, of its completions."""
    prompts = sum(p for p, _ in sizes)
    p, c = sum(p for p, _ in sizes[:b]), prompts + sum(sum(c) for _, c in sizes[:b])
    return torch.arange(p, p + sizes[b][0]), torch.arange(c, c + sum(sizes[b][1]))


@ON_EVERY_BACKEND
def test_siblings_may_stand_in_any_order(backend, device):
    lengths = [9, 12, 9, 1, 30] if is_slow(backend, device) else [9, 66, 9, 1, 30]
    shape = groups((45, lengths))
    inputs = inputs_of(shape, 2, 1, 32, device=device)
    skip_unless_it_can(backend, shape.layout(), inputs, parity="bitwise")
    whole = run(backend, shape.layout(), inputs, parity="bitwise")
    order, starts = [4, 0, 3, 2, 1], [45 + sum(lengths[:i]) for i in range(5)]
    runs = [torch.arange(starts[i], starts[i] + lengths[i]) for i in order]
    rows = torch.cat([torch.arange(45), *runs]).to(device)
    part = {k: None if x is None else x[rows] for k, x in inputs.items()}
    other = groups((45, [lengths[i] for i in order])).layout()
    got = run(backend, other, part, parity="bitwise")
    assert_equal("out", got.out, whole.out[rows])
    assert_equal("lse", got.lse, whole.lse[:, rows])


@ON_EVERY_BACKEND
def test_nan_stays_in_its_group(backend, device):
    sizes = [(7, [5, 3]), (20, [4, 9]), (6, [6])]
    inputs = inputs_of(groups(*sizes), 2, 1, device=device)
    layout = groups(*sizes).layout()
    clean = run(backend, layout, inputs)
    prompt, completions = (rows.to(device) for rows in rows_of(sizes, 1))
    rest = torch.ones(layout.total, dtype=torch.bool, device=device)
    rest[prompt] = rest[completions] = False
    for name in ("q", "k", "v", "grad_out"):
        bad = inputs | {name: inputs[name].clone()}
        bad[name][prompt[3]] = torch.nan
        bad[name][completions[2]] = torch.inf
        got = run(backend, layout, bad)
        for field, a, b in zip(Result._fields, got, clean, strict=True):
            if a is not None:
                a, b = (x[:, rest] if field == "lse" else x[rest] for x in (a, b))
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
    # nor from one completion to its siblings' rows and to the prompt's
    bad = inputs | {"k": inputs["k"].clone(), "v": inputs["v"].clone()}
    bad["k"][completions[4:]] = bad["v"][completions[4:]] = torch.nan
    got = run(backend, layout, bad)
    rest[prompt] = rest[completions[:4]] = True
    torch.testing.assert_close(got.out[rest], clean.out[rest], rtol=0, atol=1e-6)


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


@ON_EVERY_BACKEND
def test_some_gradients_only(backend, device):
    shape = FORESTS["ragged"]
    inputs = inputs_of(shape, device=device, sinks=True)
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


@pytest.mark.parametrize("options", ["plain", "all"])
def test_compile_without_graph_breaks(options):
    asked = dict(OPTIONS[options])
    shape = FORESTS["a depth of three"]
    inputs = inputs_of(shape, sinks=asked.pop("sinks", False))
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


@pytest.mark.parametrize("sinks", [False, True])
def test_opcheck(sinks):
    shape = FORESTS["ragged"]
    inputs = inputs_of(shape, sinks=sinks)
    leaves = leaves_of(inputs)
    arguments = (*leaves, shape.layout().segments, 0.25, 0.0, 0, False)
    torch.library.opcheck(torch.ops.rlkernel.prefix_shared_attention, arguments)


def test_tables_are_made_once_under_compile():
    layout = FORESTS["ragged"].layout()
    assert PrefixLayout.of_segments(layout.segments) is PrefixLayout.of_segments(layout.segments.clone())


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
    "v must have k's shape (9, 2, 8), got (9, 4, 8)": {"v": torch.zeros(9, 4, 8)},
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
    "window must be an integer >= 1, or None, got 2.0": {"window": 2.0},
    "window must be an integer >= 1, or None, got True": {"window": True},
    "parity must be one of 'fast', 'bitwise', got 'exact'": {"parity": "exact"},
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call(**WRONG[message])


def test_a_backend_that_cannot_says_why():
    with rlkernel.use_backend("flashinfer"), pytest.raises(NotImplementedError, match="flashinfer: "):
        call()


# The comparison can fail: each of these is a bug that this op could have


def with_layout(change):
    """The reference on another forest than the batch's."""

    def plant(monkeypatch):
        for name in ("forward", "backward"):
            original = getattr(reference, name)

            def wrong(*arguments, original=original):
                changed = [change(x) if isinstance(x, PrefixLayout) else x for x in arguments]
                return original(*changed)

            monkeypatch.setattr(reference, name, wrong)

    return plant


def leak(layout):
    """The second of two siblings sees the first."""
    parents = list(layout.parents)
    for s in range(1, len(parents)):
        if parents[s] >= 0 and parents[s] == parents[s - 1]:
            parents[s] = s - 1
            break
    return PrefixLayout(layout.lengths, tuple(parents), layout.completion)


def no_cross_pass(layout):
    return PrefixLayout(layout.lengths, (-1,) * len(layout.lengths), layout.completion)


def only_the_nearest(layout):
    """A completion sees its parent and nothing above that."""
    parents = [p if p >= 0 and layout.parents[p] < 0 else -1 for p in layout.parents]
    return PrefixLayout(layout.lengths, tuple(parents), layout.completion)


def wrong_positions(monkeypatch):
    """Positions of completions start again at 0, as a window sees them."""
    scores = reference._scores

    def wrong(q, k, at, rule):
        return scores(q, k, at, rule._replace(window=rule.window + 1) if at else rule)

    monkeypatch.setattr(reference, "_scores", wrong)


def backward_with(change):
    def plant(monkeypatch):
        original = reference.backward

        def wrong(grad_out, q, k, v, out, lse, layout, rule):
            return change(original, grad_out, q, k, v, out, lse, layout, rule)

        monkeypatch.setattr(reference, "backward", wrong)

    return plant


def own_lse(original, grad_out, q, k, v, out, lse, layout, rule):
    """The lse of a row's own segment instead of the whole row's."""
    own = reference.forward(q, k, v, no_cross_pass(layout), rule, None)[1]
    return original(grad_out, q, k, v, out, own, layout, rule)


def first_sibling_only(original, grad_out, q, k, v, out, lse, layout, rule):
    """A prompt's gradient from one of its completions."""
    dq, dk, dv = original(grad_out, q, k, v, out, lse, layout, rule)
    alone = grad_out.clone()
    seen = set()
    for s, parent in enumerate(layout.parents):
        if parent >= 0 and parent in seen:
            alone[slice(*layout.rows(s))] = 0
        seen.add(parent)
    _, wrong_k, wrong_v = original(alone, q, k, v, out, lse, layout, rule)
    n = layout.n_prefix
    return dq, torch.cat([wrong_k[:n], dk[n:]]), torch.cat([wrong_v[:n], dv[n:]])


def no_sinks(monkeypatch):
    original = reference.forward
    monkeypatch.setattr(reference, "forward", lambda *a: original(*a[:-1], None))


MUTANTS = {
    "a sibling leaks": (with_layout(leak), {}, "ragged"),
    "no cross pass": (with_layout(no_cross_pass), {}, "ragged"),
    "the grandparent is lost": (with_layout(only_the_nearest), {}, "a depth of three"),
    "wrong positions": (wrong_positions, {"window": 4}, "ragged"),
    "backward with the lse of a part": (backward_with(own_lse), {}, "ragged"),
    "a prompt's gradient from one completion": (backward_with(first_sibling_only), {}, "ragged"),
    "no sinks": (no_sinks, {"sinks": True}, "ragged"),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant, dtype, monkeypatch):
    plant, options, name = MUTANTS[mutant]
    asked = dict(options)
    inputs = inputs_of(FORESTS[name], dtype=dtype, sinks=asked.pop("sinks", False))
    check_against_dense("reference", FORESTS[name], inputs, **asked)
    plant(monkeypatch)
    with pytest.raises(AssertionError, match=r"from (dense|fp64)"):
        check_against_dense("reference", FORESTS[name], inputs, **asked)
