"""What only the Triton kernels of prefix-shared attention promise: their plans, chunks, strides and bits."""

import itertools
import math

import pytest
import torch
from accuracy import check, error
from backends import NO_INTERPRETER, TRITON_DEVICES
from bitwise import assert_equal
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="Triton is not installed")
if not TRITON_DEVICES:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)

from prefix_forests import (  # noqa: E402
    NAMES,
    PLAIN,
    check_accuracy,
    check_not_finite,
    forest,
    forests,
    make,
    run,
    run_dense,
    times_visited,
    visible,
)

from rlkernel.calls.prefix_shared_attention import AttentionCall, AttentionRule  # noqa: E402
from rlkernel.prefix.layout import RowTables  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention as triton_op  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_backward as backward  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_blocks as launch  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_plan as plans  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)
# (length, parent, is completion)
FORESTS = {
    "ragged": forest((37, -1, 0), (5, 0, 1), (23, 0, 1), (1, 0, 1), (50, -1, 0), (1, 4, 1), (33, 4, 1)),
    "tree": forest(
        (20, -1, 0), (18, 0, 0), (7, 1, 1), (19, 2, 1), (9, 2, 1), (21, 1, 1), (22, 0, 0), (12, 6, 1),
        (3, 6, 1), (5, 7, 1), (3, -1, 1),
    ),
    "many short": forest((16, -1, 0), *[(3, 0, 1)] * 13, (1, -1, 0), *[(1, 14, 1)] * 5),
    "alone": forest((41, -1, 1), (2, -1, 1), (9, -1, 0)),
}  # fmt: skip


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 rows, so that small inputs have many of them, and prompts whose sums are in chunks."""
    monkeypatch.setattr(launch, "blocks_of", lambda *_: launch.Blocks(16, 16, 4, 1))
    monkeypatch.setattr(plans, "CHUNK", 32)
    for layout in FORESTS.values():
        layout._tables.clear()
    yield
    for layout in FORESTS.values():
        layout._tables.clear()


# plans


@settings(max_examples=120, deadline=None)
@given(forests(), st.sampled_from([0, 1, 5, 17]), st.sampled_from([(4, 4), (8, 4), (4, 16)]))
def test_plans_visit_every_visible_pair_once(layout, window, blocks):
    once = visible(layout, window).long()
    plan = plans.query_plan(layout, window, *blocks)
    assert torch.equal(times_visited(layout, *plan[:2], window, blocks[1], False), once)
    plan = plans.logical_plan(layout, window, *blocks)
    keys = layout.gathered().keys
    assert torch.equal(times_visited(layout, *plan[:2], window, blocks[1], False, keys), once)
    for slot_bytes in (1, plans.PARTIAL_BYTES // 6):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(plans, "CHUNK", 8)
            plan = plans.key_plan(layout, window, *blocks, slot_bytes)
        assert torch.equal(times_visited(layout, plan.items[:, :5], plan.runs, window, blocks[0], True), once)
        check_slots(layout, plan, blocks[1])
        assert plan.slots * slot_bytes <= plans.PARTIAL_BYTES


def check_slots(layout, plan, block):
    """Each row is written by one item, or by the sum of all slots of its tile; slots are filled once."""
    writers = torch.zeros(layout.total, dtype=torch.int64)
    slots = {}
    for first, end, _, _, _, slot, goes_on in plan.items.tolist():
        assert goes_on == 0
        assert 0 < end - first <= block
        if slot < 0:
            writers[first:end] += 1
        else:
            assert slots.setdefault(slot, (first, end)) == (first, end)
    assert sorted(slots) == list(range(plan.slots))
    for first, end, begin, stop in plan.sums.tolist():
        writers[first:end] += 1
        assert stop - begin > 1 and all(slots[s] == (first, end) for s in range(begin, stop))
    assert bool((writers == 1).all())


def test_short_completions_share_a_tile():
    layout = forest((64, -1, 0), *[(4, 0, 1)] * 32)
    tiles, runs, _ = plans.query_plan(layout, 0, 64, 32)
    assert sorted(tiles[:, :2].tolist()) == [[0, 64], [64, 128], [128, 192]]
    first, end, begin, masked, stop = next(t for t in tiles.tolist() if t[0] == 64)
    assert runs[begin:stop, :2].tolist() == [[0, 64], [64, 128]] and masked == begin + 1
    # other prompts' completions do not
    two = forest((64, -1, 0), *[(4, 0, 1)] * 3, (64, -1, 0), *[(4, 4, 1)] * 3)
    assert sorted(plans.query_plan(two, 0, 64, 32).tiles[:, :2].tolist())[2:] == [[128, 140], [140, 152]]


def test_long_tiles_come_first_and_their_sums_are_cut():
    layout = forest((512, -1, 0), *[(300, 0, 1)] * 16)
    _, runs, _ = plan = plans.query_plan(layout, 0, 128, 64)
    sizes = [sum(-(-(b - a) // 64) for a, b, *_ in runs[t[2] : t[4]].tolist()) for t in plan.tiles.tolist()]
    assert sizes == sorted(sizes, reverse=True)
    plan = plans.key_plan(layout, 0, 64, 64, 1 << 19)
    rows = [sum(b - a for a, b, *_ in plan.runs[t[2] : t[4]].tolist()) for t in plan.items.tolist()]
    assert max(rows) <= plans.CHUNK and rows[0] == plans.CHUNK
    assert plan.slots == 8 * 3  # 4800 rows of completions and at most 512 of the prompt for each of 8 tiles


def test_partial_sums_stay_within_their_bound():
    """However many completions there are, and however long the prompt."""
    slot = 8 * 64 * 128 * 8  # of 8 heads
    for prompt, group, length in ((512, 16, 2048), (512, 256, 512), (8192, 64, 256), (8192, 2, 64)):
        plan = plans.key_plan(forest((prompt, -1, 0), *[(length, 0, 1)] * group), 0, 64, 64, slot)
        assert plan.slots * slot <= plans.PARTIAL_BYTES
        assert len(plan.items) <= -(-prompt // 64) + -(-group * length // 64) + plan.slots


# values


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", FORESTS)
def test_fp64_dense_attention_agrees(small_tiles, poison, device, name):
    layout = FORESTS[name]
    sinks = torch.tensor([0.5, -1.0], device=device)
    for dtype, options, extra, heads in (
        (torch.float32, {"window": 9, "softcap": 3.0}, sinks, 2),
        (torch.bfloat16, {}, sinks, 1),
        (torch.float16, {"window": 21}, None, 2),
    ):
        check_accuracy(make(layout, 2, heads, 24, dtype, device), layout, PLAIN._replace(**options), extra)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("head_dim", [1, 16, 80, 96, 192, 256])
def test_every_head_dim(poison, device, head_dim):
    """With the tiles that run on a GPU."""
    layout = FORESTS["tree"]
    check_accuracy(make(layout, 2, 1, head_dim, torch.bfloat16, device), layout, PLAIN)
    rule = PLAIN._replace(scale=head_dim**-0.5, window=30, softcap=2.0)
    check_accuracy(make(layout, 2, 1, head_dim, torch.float32, device), layout, rule)


@pytest.mark.skipif("cpu" not in TRITON_DEVICES, reason=NO_INTERPRETER)
@pytest.mark.parametrize(("number", "head_dim", "v_dim"), [(9, 96, 96), (9, 192, 128), (10, 192, 128)])
def test_the_tiles_of_a_generation(poison, monkeypatch, number, head_dim, v_dim):
    """Those that no other interpreted test takes, over runs that are seen in whole and runs that are not."""
    monkeypatch.setattr(launch, "generation", lambda: number)
    layout = forest((70, -1, 0), (80, 0, 1), (65, 0, 1))
    q, k, _, _ = make(layout, 2, 1, head_dim, torch.bfloat16)
    _, v, _, grad_out = make(layout, 2, 1, v_dim, torch.bfloat16)
    check_accuracy((q, k, v, grad_out), layout, PLAIN._replace(scale=head_dim**-0.5))


@ON_EVERY_DEVICE
def test_strides_change_no_bit(small_tiles, poison, device):
    layout = FORESTS["many short"]
    inputs = make(layout, 4, 2, 24, device=device)
    want = run(inputs, layout, PLAIN)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    inside = [torch.full((len(x) + 2, 7, 40), math.nan, device=device) for x in inputs]
    inside = [y[1:-1, 2 : 2 + x.shape[1], 5:29].copy_(x) for x, y in zip(inputs, inside, strict=True)]
    for variant in (heads_first, inside):
        assert not variant[0].is_contiguous()
        for name, a, b in zip(NAMES, run(variant, layout, PLAIN), want, strict=True):
            assert_equal(name, a, b)
            assert name == "lse" or a.is_contiguous()
    one = torch.full((), 0.7, device=device)
    expanded, whole = one.expand(inputs[3].shape), one.repeat(*inputs[3].shape)
    for grads in zip(*(run([*inputs[:3], g], layout, PLAIN)[2:] for g in (expanded, whole)), strict=True):
        assert_equal("gradient", *grads)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(small_tiles, device, bad):
    layout = FORESTS["many short"]
    check_not_finite(layout, bad, (3, layout.n_prefix + 4), device)


# bits


@ON_EVERY_DEVICE
def test_the_same_call_gives_the_same_bits(small_tiles, device):
    layout = FORESTS["many short"]
    inputs = make(layout, 4, 2, 24, torch.bfloat16, device)
    before, want = torch.get_default_dtype(), run(inputs, layout, PLAIN)
    try:
        for default in (before, torch.bfloat16):
            torch.set_default_dtype(default)
            for name, a, b in zip(NAMES, run(inputs, layout, PLAIN), want, strict=True):
                assert_equal(name, a, b)
    finally:
        torch.set_default_dtype(before)


@ON_EVERY_DEVICE
def test_chunks_change_rounding_only(small_tiles, device, monkeypatch):
    layout = FORESTS["many short"]
    inputs = make(layout, 4, 2, 24, device=device)
    got = {}
    for chunk, limit in ((16, 1 << 26), (48, 1 << 26), (1 << 20, 1 << 26), (16, 0)):
        monkeypatch.setattr(plans, "CHUNK", chunk)
        monkeypatch.setattr(plans, "PARTIAL_BYTES", limit)
        layout._tables.clear()
        got[chunk, limit] = run(inputs, layout, PLAIN)
        slots = next(x for (name, _), x in layout._tables.items() if name.startswith("triton keys")).slots
        assert (slots > 0) == (chunk < 1 << 20 and limit > 0)
    for a, b in itertools.combinations(got.values(), 2):
        for name, x, y in zip(NAMES, a, b, strict=True):
            assert error(x, y) <= 1e-6 * max(1.0, y.abs().max().item()), name
    for name, x, y in zip(NAMES, got[1 << 20, 1 << 26], got[16, 0], strict=True):
        assert_equal(name, x, y)


BITWISE = {
    "P = 37": forest((37, -1, 0), (5, 0, 1), (23, 0, 1), (40, 0, 1)),
    "P = 50": forest((50, -1, 0), (1, 0, 1), (1, 0, 1), (33, 0, 1)),
    "P = 16": forest((16, -1, 0), (16, 0, 1), (7, 0, 1)),
    "tree": FORESTS["tree"],
}


def bitwise_pair(layout, rule, dtype, device, sinks):
    q, k, v, _ = make(layout, 2, 1, 24, dtype, device)
    repeated, index = layout.repeated()
    index = index.to(device)
    shared = triton_op.one_pass(AttentionCall(q, k, v, layout, rule, sinks))
    alone = triton_op.one_pass(AttentionCall(q[index], k[index], v[index], repeated, rule, sinks))
    return (shared[0][index], alone[0]), (shared[1][:, index], alone[1])


@ON_EVERY_DEVICE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BITWISE)
def test_bitwise_parity_with_repeated_prompts(monkeypatch, poison, device, name, dtype):
    monkeypatch.setattr(launch, "blocks_of", lambda *_: launch.Blocks(16, 16, 4, 1))
    sinks = torch.tensor([0.5, -1.0], device=device)
    for window, softcap, extra in ((0, 0.0, None), (9, 3.0, sinks)):
        rule = AttentionRule(0.3, softcap, window, True)
        BITWISE[name]._tables.clear()
        out, lse = bitwise_pair(BITWISE[name], rule, dtype, device, extra)
        assert_equal("out", *out)
        assert_equal("lse", *lse)


@ON_EVERY_DEVICE
def test_without_bitwise_parity_the_bits_differ(monkeypatch, device):
    """Or the test before this one shows nothing."""
    monkeypatch.setattr(launch, "blocks_of", lambda *_: launch.Blocks(16, 16, 4, 1))
    BITWISE["P = 37"]._tables.clear()
    _, (shared, alone) = bitwise_pair(BITWISE["P = 37"], PLAIN, torch.float32, device, None)
    assert not torch.equal(shared, alone) and error(shared, alone) < 1e-5


# mutants


def siblings_seen(monkeypatch, layout):
    first, last, pos = layout.row_tables()
    rows = layout._tables["rows", "cpu"] = RowTables(torch.zeros_like(first), torch.ones_like(last), pos)
    for device in TRITON_DEVICES:
        layout._tables["rows", device] = RowTables(*(t.to(device) for t in rows))


def without_prompt(monkeypatch, layout):
    keys_of = plans.keys_of

    def own_rows(layout, parts, window, block):
        visit = keys_of(layout, parts, window, block)
        return visit._replace(plain=[], masked=[r for r in visit.masked if r[0] >= layout.n_prefix])

    monkeypatch.setattr(plans, "keys_of", own_rows)


def without_completions(monkeypatch, layout):
    queries_of = plans.queries_of

    def own_rows(layout, parts, window, block):
        visit = queries_of(layout, parts, window, block)
        if parts[0].end <= layout.n_prefix:
            visit = visit._replace(plain=[], masked=[r for r in visit.masked if r[1] <= layout.n_prefix])
        return visit

    monkeypatch.setattr(plans, "queries_of", own_rows)


def one_chunk_dropped(monkeypatch, layout):
    key_plan = plans.key_plan

    def dropping(*arguments):
        plan = key_plan(*arguments)
        assert len(plan.sums)
        plan.sums[:, 3] -= 1
        return plan

    monkeypatch.setattr(backward, "key_plan", dropping)


def window_off_by_one(monkeypatch, layout):
    numbers = launch.numbers
    monkeypatch.setattr(launch, "numbers", lambda rule: (*numbers(rule)[:2], numbers(rule)[2] + 1))


MUTANTS = {
    siblings_seen: {"out", "lse", "dq", "dk", "dv"},
    without_prompt: {"out", "lse", "dq"},
    without_completions: {"dk", "dv"},
    one_chunk_dropped: {"dk", "dv"},
    window_off_by_one: {"out", "lse", "dq", "dk", "dv"},
}


@ON_EVERY_DEVICE
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_mutants_fail(small_tiles, monkeypatch, device, mutant):
    layout = forest((33, -1, 0), (5, 0, 1), (23, 0, 1), (14, 0, 1))
    rule = PLAIN._replace(window=20 if mutant is window_off_by_one else 0)
    inputs = make(layout, 2, 1, 24, device=device)
    truth = run_dense(inputs, layout, rule, torch.float64)
    theirs = run_dense(inputs, layout, rule, torch.float32)
    mutant(monkeypatch, layout)
    got = run(inputs, layout, rule)
    failed = set()
    for name, a, b, c in zip(NAMES, got, theirs, truth, strict=True):
        try:
            check(name, a, b, c)
        except AssertionError:
            failed.add(name)
    assert failed >= MUTANTS[mutant]


# ability


def test_nothing_to_do():
    layout = forest()
    inputs = make(layout, 4, 2, 24)
    for x, shape in zip(
        run(inputs, layout, PLAIN), ((0, 4, 24), (4, 0), *(y.shape for y in inputs)), strict=False
    ):
        assert x.shape == shape


def test_reasons():
    q = torch.zeros(3, 2, 64, device=TRITON_DEVICES[-1])
    assert triton_op.unsupported(q, q, q) == []
    for bad, reason in (
        (q.double(), "q must be float32, float16 or bfloat16"),
        (torch.zeros(3, 2, 257, device=q.device), "the head dim of q must be at most 256, got 257"),
        (q.transpose(1, 2), "q must be dense in the last dimension"),
    ):
        assert [r for r in triton_op.unsupported(bad, bad, bad) if reason in r]
