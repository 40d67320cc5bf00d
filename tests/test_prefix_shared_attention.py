"""prefix_shared_attention: one body of tests for every backend, against every sample run alone and dense."""

import pytest
import torch
from backends import is_slow, of, running
from bitwise import assert_equal
from prefix_cases import (
    FORESTS,
    LARGE,
    OP,
    OPTIONS,
    check_against_dense,
    forest,
    groups,
    inputs_of,
    like_hugging_face,
    reasons,
    rule_of,
    run,
    skip_unless_it_can,
)
from torch.utils._python_dispatch import TorchDispatchMode

import rlkernel
from rlkernel import PrefixBatch, PrefixLayout, dispatch
from rlkernel.calls.prefix_shared_attention import AttentionGrads
from rlkernel.reference import prefix_shared_attention as reference

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("prefix_shared_attention"))
pytestmark = pytest.mark.usefixtures("poison")


# LARGE for those to whom a row costs milliseconds
PAST_A_TILE = {
    "a long prompt": groups((150, [3, 5])),
    "many short completions": groups((20, [2] * 40)),
    "long stems": forest([(66, -1, False), (35, 0, False), (70, 1, True), (3, 2, True), (9, 2, True)]),
}


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


# (D, Dv): multi-head latent attention's, some that fill no tile of a power of two, one number, wider values
OTHER_DIMS = [(192, 128), (64, 32), (40, 24), (40, 1), (32, 64)]


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dims", OTHER_DIMS, ids=str)
@ON_EVERY_BACKEND
def test_values_of_another_head_dim(backend, device, dims, options):
    """Multi-head latent attention; the scale is that of the keys."""
    slow = is_slow(backend, device)
    asked = dict(OPTIONS[options])
    sinks = asked.pop("sinks", False)
    for name in ("ragged",) if slow else ("ragged", "past tiles", "a depth of five"):
        dtype = widest(backend, device, FORESTS[name], 2, 1, max(dims), sinks=sinks, **asked)["q"].dtype
        sizes = (2, 1, dims[0]) if slow else (4, 2, dims[0])
        inputs = inputs_of(FORESTS[name], *sizes, v_dim=dims[1], dtype=dtype, device=device, sinks=sinks)
        check_against_dense(backend, FORESTS[name], inputs, **asked)


@pytest.mark.parametrize(
    ("dims", "dtype"),
    [
        ((192, 128), torch.bfloat16),
        ((192, 128), torch.float16),
        ((32, 64), torch.bfloat16),
        ((40, 24), torch.float32),
        ((32, 64), torch.float32),
    ],
    ids=str,
)
@ON_EVERY_BACKEND
def test_errors_with_values_of_another_head_dim(backend, device, dims, dtype):
    slow = is_slow(backend, device)
    if slow and dtype == torch.float16:
        return
    for name in ("ragged",) if slow else ("past tiles", "a depth of five"):
        shape = FORESTS[name]
        for options in ("plain",) if slow else ("plain", "softcap", "window 8", "all"):
            asked = dict(OPTIONS[options])
            sinks = asked.pop("sinks", False)
            inputs = inputs_of(shape, 4, 2, dims[0], v_dim=dims[1], dtype=dtype, device=device, sinks=sinks)
            skip_unless_it_can(backend, shape.layout(), inputs, **asked)
            got = check_against_dense(backend, shape, inputs, **asked)
            assert got.out.dtype == got.dv.dtype == dtype and got.dv.shape == inputs["v"].shape


class HeadsPadded(TorchDispatchMode):
    """Raises where a tensor's last dimension is padded."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.constant_pad_nd.default:
            assert not any(args[1][:2]), (
                f"{tuple(args[0].shape)} gets {args[1][:2]} more in its last dimension"
            )
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("parity", ["fast", "bitwise"])
@pytest.mark.parametrize("dims", [(40, 24), (24, 40)], ids=str)
@ON_EVERY_BACKEND
def test_nothing_is_padded_to_another_head_dim(backend, device, dims, parity, monkeypatch):
    """A backend gets the values as they are, and neither it nor backward makes them as wide as the keys."""
    shape, (d, v_dim) = FORESTS["ragged"], dims
    inputs = inputs_of(shape, 2, 1, d, v_dim=v_dim, device=device)
    if (backend, device) == ("native", "cuda"):
        return  # the vendors' kernels have one head dim
    rule = rule_of(inputs, parity=parity)
    with running(backend):
        impl = dispatch.pick(
            OP, *(inputs[x] for x in "qkv"), layout=shape.layout(), rule=rule, sinks=None, needs_grad=True
        )
    seen = []
    for function in ("forward", "backward"):
        real = getattr(impl, function)

        def spy(*records, original=real):
            tensors = [x for record in records for x in record if isinstance(x, torch.Tensor)]
            shapes = [x.shape[2] for x in tensors if x.dim() == 3]
            with HeadsPadded():
                results = original(*records)
            seen.append((shapes, [x.shape[2] for x in results if x.dim() == 3]))
            return results

        monkeypatch.setattr(impl, function, spy)
    run(backend, shape.layout(), inputs, parity=parity)
    assert seen == [([d, d, v_dim], [v_dim]), ([d, d, v_dim, v_dim, v_dim], [d, d, v_dim])]


def test_padding_would_be_seen():
    with HeadsPadded(), pytest.raises(AssertionError, match="last dimension"):
        torch.nn.functional.pad(torch.zeros(3, 2, 4), (0, 1))


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
    assert bool((high.lse == -inputs["sinks"].to(high.lse)[:, None]).all())  # 9984 in bf16


@ON_EVERY_BACKEND
def test_a_batch_without_rows_and_with_one(backend, device):
    empty = PrefixLayout((), (), ())
    half = (backend, device) == ("native", "cuda")  # the vendors' kernels know no fp32
    options = {"device": device, "dtype": torch.bfloat16 if half else torch.float32}
    inputs = {name: torch.zeros(0, 2, 16, **options) for name in ("q", "k", "v", "grad_out")}
    skip_unless_it_can(backend, empty, inputs | {"sinks": torch.ones(2, **options)})
    for sinks in (None, torch.ones(2, **options)):
        got = run(backend, empty, inputs | {"sinks": sinks})
        assert got.out.shape == got.dq.shape == got.dk.shape == (0, 2, 16) and got.lse.shape == (2, 0)
        assert sinks is None or got.dsinks.tolist() == [0, 0]
    one = inputs_of(FORESTS["one row"], 2, 1, **options)
    got = run(backend, FORESTS["one row"].layout(), one)
    assert_equal("out", got.out, one["v"].expand(-1, 2, -1))
    # of one key they are a sum less the same sum in another order
    assert got.dq.abs().max() < 1e-5 and got.dk.abs().max() < 1e-5


@ON_EVERY_BACKEND
def test_a_batch_may_stand_for_its_layout(backend, device):
    batch = PrefixBatch.pack([[5, 6, 7, 8]], [[[1, 2, 3], [4]]], device=device)
    half = (backend, device) == ("native", "cuda")  # the vendors' kernels know no fp32
    options = {"device": device, "dtype": torch.bfloat16 if half else torch.float32}
    inputs = {n: torch.randn(batch.total, h, 16, **options) for n, h in (("q", 2), ("k", 1), ("v", 1))}
    skip_unless_it_can(backend, batch.layout, inputs | {"sinks": None})
    with running(backend):
        a = rlkernel.prefix_shared_attention(**inputs, batch=batch)
        b = rlkernel.prefix_shared_attention(**inputs, batch=batch.layout)
    assert_equal("out", a, b)


# Memory


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
    inputs = widest(backend, device, shape, sinks=True, window=6)
    before = {name: x.clone() for name, x in inputs.items()}
    run(backend, shape.layout(), inputs, window=6)
    for name, x in inputs.items():
        assert_equal(name, x, before[name])


# The comparison can fail: each of these is a bug that this op could have


def with_layout(change):
    """The reference on another forest than the batch's."""

    def plant(monkeypatch):
        for name in ("forward", "backward"):
            original = getattr(reference, name)

            def wrong(call, *rest, original=original):
                return original(call._replace(layout=change(call.layout)), *rest)

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

        def wrong(call, results, grads):
            return change(original, call, results, grads)

        monkeypatch.setattr(reference, "backward", wrong)

    return plant


def own_lse(original, call, results, grads):
    """The lse of a row's own segment instead of the whole row's."""
    own = reference.forward(call._replace(layout=no_cross_pass(call.layout), sinks=None)).lse
    return original(call, results._replace(lse=own), grads)


def first_sibling_only(original, call, results, grads):
    """A prompt's gradient from one of its completions."""
    layout, (dq, dk, dv) = call.layout, original(call, results, grads)
    alone = grads.out.clone()
    seen = set()
    for s, parent in enumerate(layout.parents):
        if parent >= 0 and parent in seen:
            alone[slice(*layout.rows(s))] = 0
        seen.add(parent)
    _, wrong_k, wrong_v = original(call, results, grads._replace(out=alone))
    n = layout.n_prefix
    return AttentionGrads(dq, torch.cat([wrong_k[:n], dk[n:]]), torch.cat([wrong_v[:n], dv[n:]]))


def no_sinks(monkeypatch):
    original = reference.forward
    monkeypatch.setattr(reference, "forward", lambda call: original(call._replace(sinks=None)))


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
