"""Gradients of scores that one Triton kernel of prefix-shared attention stores and another one reads."""

import math
from itertools import pairwise

import pytest
import torch
from accuracy import check
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

from rlkernel.runtime import trials, workspace  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_backward as backward  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_blocks as launch  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_plan as plans  # noqa: E402
from rlkernel.triton_ops import prefix_shared_attention_stored_plan as stored_plans  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)
BLOCKS = {
    "forward": launch.Blocks(16, 16, 4, 1),
    "query grad": launch.Blocks(32, 16, 4, 1),
    "key grad": launch.Blocks(16, 32, 4, 1),
}
FORESTS = {
    "two prompts": [(70, -1, 0), (45, 0, 1), (23, 0, 1), (64, -1, 0), (40, 3, 1), (33, 3, 1)],
    "tree": [(40, -1, 0), (38, 0, 0), (37, 1, 1), (19, 1, 1), (42, 0, 0), (50, 4, 1), (9, 4, 1), (3, -1, 1)],
    "long completions": [(33, -1, 0), (140, 0, 1), (101, 0, 1)],
    "alone": [(165, -1, 1)],
}
NO_LIMIT = 1 << 40


def layout_of(name):
    """Anew: what a layout has planned it keeps."""
    return forest(*FORESTS[name])


@pytest.fixture
def storing(monkeypatch):
    """Small tiles of 32 rows, of which any dtype and GPU stores."""
    monkeypatch.setenv(trials.STORE_SCORES, "1")
    monkeypatch.setattr(launch, "blocks_of", lambda kernel, *_: BLOCKS[kernel])
    monkeypatch.setattr(backward, "STORING", {(launch.generation(), size, 64, 64) for size in (2, 4)})
    monkeypatch.setattr(stored_plans, "CHUNK", 64)
    monkeypatch.setattr(stored_plans, "LEAST_LIMIT", 0)
    workspace.release()
    yield
    workspace.release()


def small_plan(layout, kv_heads, row_bytes, limit):
    """Of the blocks of ``storing``."""
    of_queries, of_keys = BLOCKS["query grad"][:2], BLOCKS["key grad"][:2]
    sizes = stored_plans.Sizes(row_bytes, 1, limit)
    return stored_plans.stored_plan(layout, 0, of_queries, of_keys, kv_heads, sizes)


def plan_in(layout):
    return next(x for (name, _), x in layout._tables.items() if name.startswith("triton stored"))


# plans


@settings(max_examples=150, deadline=None)
@given(
    forests(most=60), st.sampled_from([0, 1, 5, 17, 40]),
    st.sampled_from([((4, 4), (4, 4)), ((8, 4), (4, 8)), ((16, 2), (4, 8)), ((4, 4), (2, 8))]),
    st.sampled_from([1, 2, 5]),
)  # fmt: skip
def test_what_is_read_is_what_was_stored(layout, window, blocks, parts):
    of_queries, of_keys = blocks

    def plan_of(limit):
        return stored_plans.stored_plan(layout, window, *blocks, 2, stored_plans.Sizes(64, 1, limit))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stored_plans, "CHUNK", 16)
        patch.setattr(stored_plans, "LEAST_LIMIT", 0)
        plan = plan_of(NO_LIMIT)
        if not plan.heads:
            return
        assert plan.heads == 2 and len(plan.tile_spans) == len(plan.item_spans) == 1
        if parts > 1:
            limit = 64 * plan.rows // parts
            plan = plan_of(limit)
            if not plan.heads:  # a tile of queries has no room
                return
            assert plan.heads == 1 and len(plan.tile_spans) == len(plan.item_spans) > 1
            assert 64 * plan.rows + plan.slots <= limit
    once = visible(layout, window).long()
    queries, keys = plan.queries, plan.keys
    assert torch.equal(times_visited(layout, *queries[:2], window, of_keys[1], False), once)
    assert torch.equal(times_visited(layout, keys.items[:, :5], keys.runs, window, of_keys[0], True), once)
    begun, used = set(), 0
    for of_items, of_tiles in zip(*(pairwise([0, *x]) for x in (keys.spans, queries.spans)), strict=True):
        items, tiles = keys.items[slice(*of_items)].tolist(), queries.tiles[slice(*of_tiles)].tolist()
        stored = stored_by(items, keys.runs, of_keys[1])
        assert sorted(stored) == list(range(len(stored))) and len(stored) <= plan.rows
        used = max(used, len(stored))
        check_read(tiles, queries.runs, of_keys[1], stored)
        slots = [slot for *_, slot, _ in items if slot >= 0]
        assert len(set(slots)) == len(slots)
        assert all(goes_on == (slot in begun) for *_, slot, goes_on in items)
        begun |= set(slots)
    assert used == plan.rows and begun == set(range(plan.slots))


def stored_by(items, runs, block):
    """The tile's first key and the query of each row of the storage."""
    stored = {}
    for key, end, begin, masked, *_ in items:
        for first, last, place, step, change in runs[begin:masked].tolist():
            assert end - key == block and step == change == 0
            for row in range(first, last):
                assert stored.setdefault(place + row - first, (key, row)) == (key, row)
    return stored


def check_read(tiles, runs, block, stored):
    for first, end, begin, masked, _ in tiles:
        for key, last, place, step, change in runs[begin:masked].tolist():
            assert last > key and (last - key) % block == 0
            for n, own in enumerate(range(key, last, block)):
                row = place + n * step + n * (n - 1) // 2 * change
                assert [stored[row + i] for i in range(end - first)] == [(own, i) for i in range(first, end)]


@pytest.mark.parametrize(("prompt", "length", "group"), [(4096, 512, 16), (4000, 500, 16), (512, 4096, 8)])
def test_most_pairs_are_stored(prompt, length, group):
    """With the tiles of Hopper: of the pairs that are seen 7 of 8 and more, each once in memory and read."""
    layout = forest((prompt, -1, 0), *[(length, 0, 1)] * group)
    sizes = stored_plans.Sizes(128 * 2 * 4, 4 * 128 * 256, 1 << 30)
    plan = stored_plans.stored_plan(layout, 0, (128, 64), (64, 128), 8, sizes)
    seen = prompt * (prompt + 1) // 2 + group * (prompt * length + length * (length + 1) // 2)
    tiles = plan.tiles.tolist()
    keys = [sum(end - first for first, end, *_ in plan.query_runs[t[2] : t[3]].tolist()) for t in tiles]
    read = sum((t[1] - t[0]) * n for t, n in zip(tiles, keys, strict=True))
    # a kernel looks up one run of keys for a tile, or two where its own prompt or completion is one
    assert max(t[3] - t[2] for t in tiles) <= 2
    assert seen * 0.87 <= read <= plan.rows * 128 <= seen
    assert plan.heads * plan.rows * sizes.row <= sizes.limit < 2 * plan.heads * plan.rows * sizes.row


def test_partial_sums_have_room_beside_what_is_stored():
    """With the tiles of Hopper, where two of the 8 heads would fill the limit: no program of keys takes more
    than an even share of the multiprocessors' work."""
    layout = forest((4096, -1, 0), *[(1536, 0, 1)] * 8)
    sizes = stored_plans.Sizes(128 * 2 * 4, 4 * 128 * 256, 1 << 30)
    plan = stored_plans.stored_plan(layout, 0, (128, 64), (64, 128), 8, sizes)
    assert plan.heads * (plan.rows * sizes.row + plan.slots * sizes.slot) <= sizes.limit
    rows = [sum(end - first for first, end, *_ in plan.key_runs[x[2] : x[4]].tolist()) for x in plan.items]
    assert max(rows) <= plan.heads * sum(rows) / 132


def test_as_many_heads_as_there_is_room_for(monkeypatch):
    layout = layout_of("two prompts")
    all_or_none = small_plan(layout, 6, 64, NO_LIMIT)
    need = 8 * math.ceil(6 * 64 * all_or_none.rows / 7)
    assert all_or_none.heads == small_plan(layout, 6, 64, need).heads == 6
    assert small_plan(layout, 6, 64, need - 1).heads == 0, "a limit that small is not worth more launches"
    monkeypatch.setattr(stored_plans, "LEAST_LIMIT", 0)

    of_one = 8 * math.ceil(64 * small_plan(layout, 1, 64, NO_LIMIT).rows / 7)
    assert of_one > 0
    heads = [small_plan(layout, 6, 64, n * of_one).heads for n in range(8)]
    assert heads == [0, 1, 2, 3, 3, 3, 6, 6]
    assert small_plan(layout, 7, 64, 4 * of_one).heads == 1
    of_part = small_plan(layout, 6, 64, of_one - 1)
    assert of_part.heads == 1 and len(of_part.tile_spans) == 2
    assert small_plan(layout, 6, 64, 64 * 30).heads == 0  # a tile of queries has no room
    assert small_plan(forest((20, -1, 0), (9, 0, 1)), 2, 64, NO_LIMIT).heads == 0


def test_what_has_no_room_is_not_planned(monkeypatch):
    """Of prompts as long as those whose partial sums have no room, a plan would take the host seconds."""
    layout = forest((131072, -1, 0), *[(1024, 0, 1)] * 8)
    monkeypatch.setattr(stored_plans, "_inside", None)
    sizes = stored_plans.Sizes(128 * 2 * 4, 4 * 128 * 256, 1 << 30)
    assert stored_plans.stored_plan(layout, 0, (128, 64), (64, 128), 8, sizes) == stored_plans.NOTHING


# values


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", FORESTS)
def test_fp64_dense_attention_agrees(storing, poison, device, name):
    sinks = torch.tensor([0.5, -1.0], device=device)
    for dtype, options, extra, kv_heads in (
        (torch.float32, {"window": 70, "softcap": 3.0}, sinks, 1),
        (torch.bfloat16, {}, sinks, 2),
        (torch.float16, {"window": 90}, None, 1),
    ):
        layout = layout_of(name)
        inputs = make(layout, 2, kv_heads, 24, dtype, device)
        check_accuracy(inputs, layout, PLAIN._replace(**options), extra)
        assert plan_in(layout).rows > 0 and plan_in(layout).heads == kv_heads


@ON_EVERY_DEVICE
def test_the_tiles_of_hopper(poison, monkeypatch, device):
    """A prompt of two tiles of keys, and completions that fill a tile of queries together."""
    monkeypatch.setenv(trials.STORE_SCORES, "1")
    if device == "cpu":
        monkeypatch.setattr(launch, "generation", lambda: 9)
    layout = forest((256, -1, 0), (50, 0, 1), (80, 0, 1))
    check_accuracy(make(layout, 2, 1, 96, torch.bfloat16, device), layout, PLAIN)
    workspace.release()
    if launch.generation() == 9:
        assert plan_in(layout).rows == 256 + 128


@ON_EVERY_DEVICE
def test_it_is_off_unless_it_is_asked_for(storing, monkeypatch, device):
    layout = layout_of("alone")
    inputs = make(layout, 2, 1, 24, torch.bfloat16, device)
    for off in ("0", None):
        monkeypatch.setenv(trials.STORE_SCORES, off) if off else monkeypatch.delenv(trials.STORE_SCORES)
        run(inputs, layout, PLAIN)
        assert not any(name.startswith("triton stored") for name, _ in layout._tables)
    monkeypatch.setenv(trials.STORE_SCORES, "yes")
    with pytest.raises(ValueError, match="RLKERNEL_STORE_SCORES must be 0 or 1, got 'yes'"):
        run(inputs, layout, PLAIN)


@ON_EVERY_DEVICE
def test_rounds_of_heads_change_no_bit(storing, poison, device):
    inputs = make(layout_of("alone"), 8, 4, 24, torch.bfloat16, device)
    found = {}
    for heads in (4, 2, 1):
        layout = layout_of("alone")
        size = inputs[0].element_size() * 32 * 2
        limit = 8 * math.ceil(heads * size * small_plan(layout, 4, size, NO_LIMIT).rows / 7)
        # a limit of less than 1 MiB nobody can set
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(workspace, "limit", lambda device, limit=limit: limit)
            found[heads] = run(inputs, layout, PLAIN)
        assert plan_in(layout).heads == heads
    for heads in (2, 1):
        for name, a, b in zip(NAMES, found[heads], found[4], strict=True):
            assert_equal(name, a, b)


@ON_EVERY_DEVICE
def test_more_tiles_than_a_grid_holds(storing, poison, device, monkeypatch):
    """Whose second dimension CUDA bounds, by tiles of 16 rows of little more than a million."""
    assert backward.MOST_PROGRAMS < 2**16 and backward.MOST_PROGRAMS * 4 % 16 == 0
    monkeypatch.setattr(plans, "CHUNK", 64)
    segments = (64, -1, 0), (40, 0, 1), (60, 0, 1)
    inputs = make(forest(*segments), 1, 1, 16, device=device)
    kernels = ("attention_key_grad_kernel", "attention_query_grad_kernel", "attention_sum_kernel")
    for stores in (True, False):
        if not stores:
            monkeypatch.setattr(backward, "STORING", set())
        want = run(inputs, forest(*segments), PLAIN)
        grids = {name: [] for name in kernels}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backward, "MOST_PROGRAMS", 2, raising=False)
            for name in kernels:
                patch.setattr(backward, name, Recorded(getattr(backward, name), grids[name]))
            got = run(inputs, forest(*segments), PLAIN)
        for name, a, b in zip(NAMES, got, want, strict=True):
            assert_equal(name, a, b)
        assert all(len(x) > 1 and max(y for _, y in x) <= 2 for x in grids.values())


class Recorded:
    """A kernel, and the grids that it has been launched with."""

    def __init__(self, kernel, grids):
        self.kernel, self.grids = kernel, grids

    def __getitem__(self, grid):
        self.grids.append(grid)
        return self.kernel[grid]


@ON_EVERY_DEVICE
@pytest.mark.parametrize("name", ["alone", "tree"])
def test_spans_of_queries(storing, poison, device, monkeypatch, name):
    """Where one head has no room, the sums of keys and values go on from span to span."""
    whole = layout_of(name)
    inputs = make(whole, 4, 2, 24, torch.float16, device)
    one = run(inputs, whole, PLAIN)
    limit = plan_in(whole).rows * 2 * 2 * 32 // 2
    monkeypatch.setattr(backward, "_slot", lambda call: 1)  # of such tiles partial sums are most of all
    monkeypatch.setattr(workspace, "limit", lambda device: limit)
    layout = layout_of(name)
    check_accuracy(inputs, layout, PLAIN)
    plan = plan_in(layout)
    assert plan.heads == 1 and len(plan.item_spans) > 1 and plan.items[:, 6].any()
    for grad, other in zip(run(inputs, layout, PLAIN)[2:], one[2:], strict=True):
        assert torch.allclose(grad.float(), other.float(), rtol=2e-3, atol=2e-3)


@ON_EVERY_DEVICE
def test_without_room_both_kernels_compute(storing, device, monkeypatch):
    inputs = make(layout_of("two prompts"), 2, 1, 24, device=device)
    stored = run(inputs, layout_of("two prompts"), PLAIN)
    layout = layout_of("two prompts")
    monkeypatch.setattr(workspace, "limit", lambda device: 1000)
    computed = run(inputs, layout, PLAIN)
    assert plan_in(layout).heads == 0
    monkeypatch.setattr(backward, "STORING", set())
    for name, a, b, c in zip(NAMES, computed, run(inputs, layout, PLAIN), stored, strict=True):
        assert_equal(name, a, b)
        assert torch.allclose(a, c, rtol=1e-5, atol=1e-5), name


@ON_EVERY_DEVICE
def test_strides_and_reruns_change_no_bit(storing, poison, device):
    layout = layout_of("tree")
    inputs = make(layout, 2, 1, 24, torch.bfloat16, device)
    want = run(inputs, layout, PLAIN)
    heads_first = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in inputs]
    for variant in (inputs, heads_first):
        for name, a, b in zip(NAMES, run(variant, layout, PLAIN), want, strict=True):
            assert_equal(name, a, b)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_reaches_those_who_see_it_and_nobody_else(storing, device, bad):
    layout = layout_of("two prompts")
    check_not_finite(layout, bad, (3, layout.n_prefix + 50), device)


# mutants


def one_row_further(monkeypatch):
    for_queries = stored_plans.Strips.for_queries
    monkeypatch.setattr(
        stored_plans.Strips, "for_queries", lambda self, row, tiles: for_queries(self, row + 1, tiles)
    )


def no_parabola(monkeypatch):
    for_queries = stored_plans.Strips.for_queries

    def straight(self, row, tiles):
        return [(*run[:4], 0) for run in for_queries(self, row, tiles)]

    monkeypatch.setattr(stored_plans.Strips, "for_queries", straight)


def heads_over_each_other(monkeypatch):
    key_grads = backward._key_grads

    def over(call, of_rows, found, heads, plan, span):
        key_grads(call, of_rows, found, heads._replace(rows=0), plan, span)

    monkeypatch.setattr(backward, "_key_grads", over)


def tiles_left_out(monkeypatch):
    stored_keys = stored_plans.Strips.stored_keys
    monkeypatch.setattr(stored_plans, "without", lambda runs, taken: [])
    monkeypatch.setattr(
        stored_plans.Strips, "stored_keys", lambda self, rows, plain: stored_keys(self, rows, plain)[1:]
    )


def tiles_twice(monkeypatch):
    monkeypatch.setattr(stored_plans, "without", lambda runs, taken: runs)


MUTANTS = (one_row_further, no_parabola, heads_over_each_other, tiles_left_out, tiles_twice)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda f: f.__name__)
def test_mutants_fail(storing, monkeypatch, device, mutant):
    layout = layout_of("alone")
    inputs = make(layout, 4, 2, 24, device=device)
    truth = run_dense(inputs, layout, PLAIN, torch.float64)
    theirs = run_dense(inputs, layout, PLAIN, torch.float32)
    mutant(monkeypatch)
    got = run(inputs, layout, PLAIN)
    with pytest.raises(AssertionError):
        check("dq", got[2], theirs[2], truth[2])


@ON_EVERY_DEVICE
def test_sums_that_begin_anew_fail(storing, monkeypatch, device):
    layout = layout_of("alone")
    inputs = make(layout, 2, 1, 24, device=device)
    truth = run_dense(inputs, layout, PLAIN, torch.float64)
    theirs = run_dense(inputs, layout, PLAIN, torch.float32)
    limit = small_plan(layout, 1, 1, NO_LIMIT).rows * 2 * 4 * 32 // 2
    monkeypatch.setattr(backward, "_slot", lambda call: 1)
    monkeypatch.setattr(workspace, "limit", lambda device: limit)
    items = stored_plans.items

    def fresh(*arguments):
        plan = items(*arguments)
        assert plan.items[:, 6].any()
        plan.items[:, 6] = 0
        return plan

    monkeypatch.setattr(stored_plans, "items", fresh)
    got = run(inputs, layout, PLAIN)
    for name, a, b, c in list(zip(NAMES, got, theirs, truth, strict=True))[3:]:
        with pytest.raises(AssertionError):
            check(name, a, b, c)
