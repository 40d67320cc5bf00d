"""The CPU path: which calls it makes, that every one is needed, its bits and its memory."""

import contextlib
import itertools
import os
import random

import bitwise
import pytest
import torch
from accuracy import error
from prefix_cases import FORESTS, LARGE, groups
from torch.profiler import ProfilerActivity, profile

import rlkernel
from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule, OutGrads
from rlkernel.native import prefix_shared_attention as native
from rlkernel.native.prefix_shared_attention import cpu, products
from rlkernel.native.prefix_shared_attention import plan as planning
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.reference import prefix_shared_attention as reference

NAMES = ("out", "lse", "dq", "dk", "dv")
RULES = {
    "plain": AttentionRule(0.3, 0.0, 0, False),
    "softcap": AttentionRule(0.3, 2.0, 0, False),
    "window": AttentionRule(0.3, 0.0, 9, False),
    "window of one": AttentionRule(0.3, 0.0, 1, False),
    "softcap and window": AttentionRule(0.3, 2.0, 70, False),
}


@pytest.fixture
def small(monkeypatch):
    """Tiles so small that small forests have several of every kind."""
    for name, value in {"ROWS": 7, "SHORT": 3, "BATCH_ROWS": 10, "TILE": 4}.items():
        monkeypatch.setattr(planning, name, value)
    monkeypatch.setattr(cpu, "TILE", 4)
    monkeypatch.setattr(products, "SCORES", 1)


def a_forest(seed: int) -> PrefixLayout:
    """Some roots, and below any node others, of 0 to 40 tokens."""
    draw = random.Random(seed)
    lengths, parents, completion = [], [], []
    for node in range(draw.randint(1, 14)):
        parent = draw.randint(-1, node - 1)
        is_below = parent >= 0 and completion[parent]
        lengths.append(draw.choice([0, 1, 2, 3, draw.randint(4, 40)]))
        parents.append(parent)
        completion.append(is_below or draw.random() < 0.6)
    return PrefixLayout.of(lengths, parents, completion)[0]


def tensors(layout, heads=4, kv_heads=2, head_dim=8, dtype=torch.float64, seed=0, v_dim=None):
    g = torch.Generator().manual_seed(seed)
    v_dim = v_dim or head_dim
    shapes = ((heads, head_dim), (kv_heads, head_dim), (kv_heads, v_dim), (heads, v_dim))
    return [torch.randn(layout.total, *s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def run(backend, layout, inputs, rule, sinks=None):
    q, k, v, grad = inputs
    call = AttentionCall(q, k, v, layout, rule, sinks)
    results = backend.forward(call)
    return *results, *backend.backward(call, results, OutGrads(grad))


def assert_exact(layout, inputs, rule, sinks=None):
    got, want = (run(b, layout, inputs, rule, sinks) for b in (native, reference))
    for name, a, b in zip(NAMES, got, want, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
        assert (wrong := error(a, b)) <= 1e-11 * size, f"{name}: {wrong:.3e} from the reference"


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forest", FORESTS)
def test_exact_with_small_tiles(forest, rule, small, poison):
    layout = FORESTS[forest].layout()
    assert_exact(layout, tensors(layout), RULES[rule])
    assert_exact(layout, tensors(layout, 3, 1), RULES[rule], torch.randn(3, dtype=torch.float64))
    for v_dim in (5, 12):
        assert_exact(layout, tensors(layout, v_dim=v_dim), RULES[rule])


@pytest.mark.parametrize("seed", range(12))
def test_exact_on_random_forests(seed, small, poison):
    layout = a_forest(seed)
    for rule in RULES.values():
        assert_exact(layout, tensors(layout, seed=seed), rule)


@pytest.mark.parametrize("heads", [(8, 1), (2, 2)], ids=str)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("forest", LARGE)
def test_exact_with_real_tiles(forest, rule, heads):
    layout = LARGE[forest].layout()
    for v_dim in (8, 5, 12):
        inputs = tensors(layout, *heads, v_dim=v_dim)
        assert_exact(layout, inputs, RULES[rule], torch.randn(heads[0], dtype=torch.float64))


def test_exact_past_a_call_of_rows():
    layout = groups((40, [700, 500, 33])).layout()
    assert layout.total > planning.ROWS
    for rule in RULES.values():
        assert_exact(layout, tensors(layout, 2, 1), rule)
        assert_exact(layout, tensors(layout, 2, 1, v_dim=6), rule)


@pytest.mark.parametrize("rule", RULES)
def test_nothing_to_do(rule):
    layout = PrefixLayout((), (), ())
    shapes = [tuple(x.shape) for x in run(native, layout, tensors(layout), RULES[rule], torch.zeros(4))]
    assert shapes == [(0, 4, 8), (4, 0), (0, 4, 8), (0, 2, 8), (0, 2, 8)]


@pytest.mark.parametrize("rule", RULES)
def test_any_strides(rule):
    layout = groups((70, [33, 66, 2, 5])).layout()
    q, k, v, grad = tensors(layout)
    want = run(native, layout, (q, k, v, grad), RULES[rule])
    turned = [torch.cat([x, x], 2).transpose(0, 1).contiguous().transpose(0, 1)[..., :8] for x in (q, k, v)]
    got = run(native, layout, (*turned, grad.permute(2, 1, 0).contiguous().permute(2, 1, 0)), RULES[rule])
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)
    one = grad[:1, :1, :1].expand(grad.shape)
    got, want = (run(native, layout, (q, k, v, g), RULES[rule]) for g in (one, one.contiguous()))
    for name, a, b in zip(NAMES, got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_expanded_rows_have_the_bits_of_dense_ones(rule, dtype):
    layout = groups((70, [33, 66, 2, 5]), (150, [40, 3])).layout()
    dense = [x[:1].expand(x.shape).contiguous() for x in tensors(layout, 4, 2, 64, dtype)]
    expanded = [x[:1].expand(x.shape) for x in dense]
    want = run(native, layout, dense, RULES[rule])
    for name, a, b in zip(NAMES, run(native, layout, expanded, RULES[rule]), want, strict=True):
        bitwise.assert_equal(name, a, b)


# calls


def calls(layout, rule) -> tuple[int, int]:
    """How often forward and backward call torch's kernels."""
    counts = [0, 0]
    attend, attend_backward = cpu._attend, cpu._attend_backward

    def counted(i, function, *arguments):
        counts[i] += 1
        return function(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_attend", lambda *a: counted(0, attend, *a))
        patch.setattr(cpu, "_attend_backward", lambda *a: counted(1, attend_backward, *a))
        run(native, layout, tensors(layout, 2, 1, dtype=torch.float32), rule)
    return counts[0], counts[1]


@pytest.mark.parametrize(
    ("forest", "rule", "number"),
    [
        (groups((500, [2] * 64)), "plain", 3),  # the prompt, all completions, all of them on the prompt
        (groups((500, [2, 3, 5, 7, 9, 12, 17, 31])), "plain", 1 + 4 + 1),  # up to twice the length together
        (groups((500, [64] * 32)), "plain", 1 + 32 + 2),  # 2048 rows are two calls
        (groups((10, [2] * 8), (12, [3] * 8)), "plain", 2 + 2),  # short ones of all groups
        (groups((500, [2] * 40)), "window", 3),  # the prompt's first tile, its others, all completions
    ],
)
def test_number_of_calls(forest, rule, number):
    assert calls(forest.layout(), RULES[rule]) == (number, number)


def test_a_window_reads_what_it_sees():
    """Keys of all calls: T * (window + tile), not T * T."""
    layout = groups((3000, [2000])).layout()
    plan = planning.plan(layout, 100, False)
    keys = sum(batch.n * (batch.above + batch.size) for batch in plan.batches)
    assert keys <= (layout.total / planning.TILE + 2) * (100 + planning.TILE)
    assert not plan.blocks


def test_a_plan_is_made_once():
    layout = groups((50, [40, 3])).layout()
    assert planning.plan(layout, 0, False) is planning.plan(layout, 0, False)
    assert planning.plan(layout, 0, False) is not planning.plan(layout, 9, False)


# each of these must break the result


def without_the_segments_above(patch):
    made = planning.plan
    patch.setattr(cpu, "plan", lambda *a: made(*a)._replace(blocks=[b for b in made(*a).blocks if b.causal]))


def without_a_batch(patch):
    made = planning.plan
    patch.setattr(cpu, "plan", lambda *a: made(*a)._replace(batches=made(*a).batches[:-1]))


def lse_is_not_merged(patch):
    merge = cpu._merge
    patch.setattr(cpu, "_merge", lambda out, lse, part, norm: merge(out, lse.clone(), part, norm))


def parts_weigh_the_same(patch):
    merge = cpu._merge
    patch.setattr(cpu, "_merge", lambda out, lse, part, norm: merge(out, lse, part, lse.clone()))


def backward_on_its_own_lse(patch):
    backward = cpu._attend_backward

    def partial(dense, out, lse, grad, dtype):
        return backward(dense, *cpu._attend(dense), grad, dtype)

    patch.setattr(cpu, "_attend_backward", partial)


def heads_are_not_summed(patch):
    backward = cpu._attend_backward

    def first(dense, *rest):
        dq, dk, dv = backward(dense, *rest)
        return dq, dk, dv / dense.q.shape[1]

    patch.setattr(cpu, "_attend_backward", first)


def padding_has_a_gradient(patch):
    made = planning.plan

    def unmarked(*a):
        every = [torch.arange(b.n * b.size) for b in made(*a).batches]
        batches = [
            b if isinstance(b.take, slice) else b._replace(take=e, to=b.rows)
            for b, e in zip(made(*a).batches, every, strict=True)
        ]
        return made(*a)._replace(batches=batches)

    patch.setattr(cpu, "plan", unmarked)


MUTANTS = (
    without_the_segments_above,
    without_a_batch,
    lse_is_not_merged,
    parts_weigh_the_same,
    backward_on_its_own_lse,
    heads_are_not_summed,
    padding_has_a_gradient,
)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_fail(mutant, monkeypatch):
    layout = groups((70, [33, 66, 2, 3]), (5, [40])).layout()
    assert_exact(layout, tensors(layout), RULES["plain"])
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match="from the reference|non-finite"):
        assert_exact(layout, tensors(layout), RULES["plain"])


# numerics


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_gradients_are_summed_in_fp32(dtype, monkeypatch):
    """A prompt's dk and dv are rounded once, after all completions; torch's kernel rounds at every tile."""
    layout = groups((8, [40] * 64)).layout()
    inputs = tensors(layout, 4, 1, 64, dtype)
    rule = AttentionRule(64**-0.5, 0.0, 0, False)
    wide = run(native, layout, [x.double() for x in inputs], rule)

    def wrong() -> float:
        got = run(native, layout, inputs, rule)
        return error(got[4][:8], wide[4][:8]) / wide[4][:8].abs().max().item()

    assert (ours := wrong()) <= 2 * torch.finfo(dtype).eps
    backward = cpu._attend_backward
    monkeypatch.setattr(cpu, "_attend_backward", lambda *a: backward(*a[:-1], dtype))
    assert wrong() > 1.5 * ours


def test_a_nan_stays_with_its_sample():
    """In a short and in a long completion, of which others are in the same calls."""
    layout = groups((40, [3, 2, 3, 50, 60])).layout()
    for rule, bad in itertools.product(RULES.values(), (1, 4)):
        q, k, v, grad = tensors(layout)
        rows = slice(*layout.rows(bad))
        q[rows], k[rows], v[rows] = torch.nan, torch.nan, torch.nan
        out, lse, dq, _, _ = run(native, layout, (q, k, v, grad), rule)
        whole = out.isfinite().flatten(1).all(1) & lse.isfinite().all(0) & dq.isfinite().flatten(1).all(1)
        assert not whole[rows].any() and int(whole.sum()) == layout.total - layout.lengths[bad]


@pytest.mark.parametrize("prompt", [1, 15, 16, 17, 40])
def test_keys_above_are_whole_vectors_for_the_kernel(monkeypatch, prompt):
    """And nobody sees those that were added."""
    layout = groups((prompt, [50, 60])).layout()
    flash, keys = cpu._flash, []

    def spy(q, k, v, dropout, causal, **options):
        keys.append((k.shape[2], causal, "attn_mask" in options))
        return flash(q, k, v, dropout, causal, **options)

    monkeypatch.setattr(cpu, "_flash", spy)
    for dtype in DTYPES:
        inputs = tensors(layout, dtype=dtype)
        keys.clear()
        out, lse, *_ = run(native, layout, inputs, RULES["plain"])
        above = [(size, masked) for size, causal, masked in keys if not causal]
        whole = -(-layout.n_prefix // 16) * 16
        assert above == [(whole, whole > layout.n_prefix)]
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "_in_vectors", lambda k, v: (k, v, False))
            plain_out, plain_lse, *_ = run(native, layout, inputs, RULES["plain"])
        few_bits = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out, plain_out, rtol=0, atol=few_bits)
        # a sum near 1 has a logarithm near 0, whose error is that of the scores
        torch.testing.assert_close(lse, plain_lse, rtol=few_bits, atol=few_bits)


# bits


@contextlib.contextmanager
def threads(number: int):
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize(
    ("number", "rule"),
    [*((1, rule) for rule in RULES), *((n, rule) for n in (2, 4) for rule in ("plain", "window"))],
)
def test_the_same_bits_again(number, rule):
    layout = groups((130, [33, 66, 2, 3, 3]), (5, [40])).layout()
    for dtype, v_dim in ((torch.float32, 40), (torch.bfloat16, 40), (torch.float32, 24)):
        inputs = tensors(layout, 4, 2, 40, dtype, v_dim=v_dim)
        with threads(number):
            first, again = (run(native, layout, inputs, RULES[rule]) for _ in range(2))
        for name, a, b in zip(NAMES, first, again, strict=True):
            bitwise.assert_equal(name, a, b)


def parity(layout, rule, dtype, heads, head_dim=40, sinks=None, v_dim=None):
    q, k, v, _ = tensors(layout, *heads, head_dim, dtype, v_dim=v_dim)
    alone, index = layout.repeated()
    out, lse = native.forward(AttentionCall(q, k, v, layout, rule, sinks))
    want_out, want_lse = native.forward(AttentionCall(q[index], k[index], v[index], alone, rule, sinks))
    bitwise.assert_equal("out", out[index], want_out)
    bitwise.assert_equal("lse", lse[:, index], want_lse)
    return out, lse


@pytest.mark.parametrize("v_dim", [40, 24, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_bits_of_the_repeated_prompts(rule, dtype, v_dim):
    rule = RULES[rule]._replace(bitwise=True)
    for forest, heads, sinks in (
        (LARGE["long stems"], (4, 2), None),
        (groups((77, [60, 1, 130]), (3, [64])), (3, 1), torch.tensor([0.3, -1.0, 2.0])),
    ):
        layout = forest.layout()
        out, lse = parity(layout, rule, dtype, heads, sinks=sinks, v_dim=v_dim)
        wide = [x.double() for x in tensors(layout, *heads, 40, dtype, v_dim=v_dim)[:3]]
        sinks = None if sinks is None else sinks.double()
        want = reference.forward(AttentionCall(*wide, layout, rule, sinks))
        allowed = {torch.float64: 1e-11, torch.float32: 1e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
        assert error(out, want[0]) <= allowed and error(lse, want[1]) <= max(allowed, 1e-5)


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("dims", [(40, 40), (64, 64), (40, 24), (24, 40), (192, 128)], ids=str)
def test_bits_of_the_repeated_prompts_on_threads(number, dims):
    """Of parity bitwise: in fast a call of one row may have other bits in the memory of another thread."""
    layout = LARGE["long stems"].layout()
    for heads, name, dtype in (
        ((1, 1), "plain", torch.float32),
        ((6, 2), "plain", torch.float32),
        ((4, 2), "window", torch.float32),
        ((4, 2), "plain", torch.bfloat16),
    ):
        rule = RULES[name]._replace(bitwise=True)
        alone = parity(layout, rule, dtype, heads, dims[0], v_dim=dims[1])
        with threads(number):
            together = parity(layout, rule, dtype, heads, dims[0], v_dim=dims[1])
        # plain products may be cut otherwise for another number of threads; so are those of torch's kernel
        # where MKL is held to AVX2 on an Intel processor that has more
        if dims[0] != dims[1] or "MKL_ENABLE_INSTRUCTIONS" in os.environ:
            torch.testing.assert_close(together[0], alone[0])
        else:
            bitwise.assert_equal("out", together[0], alone[0])
            bitwise.assert_equal("lse", together[1], alone[1])


def test_the_fast_path_has_other_bits():
    """So the tests of parity look at something."""
    with pytest.raises(AssertionError, match="differ"):
        parity(LARGE["long stems"].layout(), RULES["plain"], torch.float32, (4, 2))


def test_sinks_after_all_tiles_would_have_other_bits(monkeypatch):
    """exp's bits depend on whether a row falls into a whole vector: so they come in while a tile is one."""
    layout = groups((20, [7, 2])).layout()
    rule = RULES["plain"]._replace(bitwise=True)
    add = cpu._add_sinks
    monkeypatch.setattr(cpu, "_add_sinks", lambda *a: None)

    def late(call):
        out, lse = cpu.forward(call)
        add(out.transpose(0, 1)[None], lse[None], call.sinks)
        return out, lse

    monkeypatch.setattr(native, "forward", late)
    with pytest.raises(AssertionError, match="differ"):
        for head_dim in range(1, 40):
            parity(layout, rule, torch.float32, (3, 1), head_dim, sinks=torch.tensor([0.3, -1.0, 2.0]))


# memory


def extra_memory(function) -> int:
    """Bytes at the peak besides those of the results."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        results = function()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = [*itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))]
    assert now[-1] >= sum(x.nbytes for x in results)
    return max(now) - now[-1]


def extra_of_a_group(members: int, rule: AttentionRule) -> tuple[int, int]:
    layout = groups((300, [64] * members)).layout()
    *qkv, grad = tensors(layout, 4, 2, 32, torch.float32)
    return extra_of_a_call(AttentionCall(*qkv, layout, rule), grad)


def extra_of_a_call(call: AttentionCall, grad: torch.Tensor) -> tuple[int, int]:
    results = native.forward(call)
    return (
        extra_memory(lambda: native.forward(call)),
        extra_memory(lambda: native.backward(call, results, OutGrads(grad))),
    )


@pytest.mark.parametrize("rule", ["plain", "window", "softcap"])
def test_extra_memory_does_not_grow_with_the_group(rule):
    """From the size on where every kind of call has as many rows as it ever has."""
    assert extra_of_a_group(40, RULES[rule]) == extra_of_a_group(90, RULES[rule])


@pytest.mark.parametrize("dims", [(192, 128), (128, 192)], ids=str)
def test_extra_memory_is_that_of_one_calls_results(dims):
    """In the head dims that they have: nothing is as wide as the wider of both."""

    def extra(rows):
        layout = groups((rows, [40])).layout()
        *qkv, grad = tensors(layout, 2, 2, dims[0], torch.float32, v_dim=dims[1])
        return extra_of_a_call(AttentionCall(*qkv, layout, RULES["plain"]), grad)

    (forward, backward), (more_forward, more_backward) = extra(1000), extra(2000)
    row = 4 * 2  # bytes of a number, heads
    results = 1000 * row * (dims[1] + 1), 1000 * row * (2 * dims[0] + dims[1])
    assert abs(more_forward - forward - results[0]) <= 0.15 * results[0]
    assert abs(more_backward - backward - results[1]) <= 0.15 * results[1]


# ability


def test_reasons():
    q = torch.empty(3, 4, 8, device="meta")
    assert native.unsupported(q, q, q) == ["rlkernel._C has kernels for cpu and cuda tensors, got meta"]
    q = torch.empty(3, 4, 8)
    assert native.unsupported(q, q, q) == []
    assert rlkernel.explain("prefix_shared_attention", q, q, q)["native"] == []
