"""The plan of ``paged_prefix_attention``: followed to the letter it gives each row's attention; nothing is
read twice, and the tree that it makes does not show in what a row goes through."""

import itertools
import math

import pytest
import torch
from accuracy import check
from hypothesis import given, settings
from hypothesis import strategies as st
from paged_cases import OPTIONS, STEPS, TABLES, Request, dense, group, make, options_of

import rlkernel
from rlkernel.calls.paged_prefix_attention import CHUNK, ITEM_ROWS, TILE
from rlkernel.prefix import paged


def plan_of(inputs, window=None):
    return rlkernel.paged_prefix_plan(
        *(inputs[name] for name in TABLES), inputs["key_cache"].shape[1], window=window
    )


def follow(plan, inputs, scale=None, softcap=None, window=None, sinks=None):
    """What the records say, item by item, without a thought of what it is for."""
    q, k, v = (inputs[name].double() for name in ("query", "key_cache", "value_cache"))
    heads, kv_heads, size = q.shape[1], k.shape[2], plan.block_size
    states: dict[int, tuple] = {}  # of a slot: top [Hq], total [Hq], sums [Hq, Dv]
    out = torch.full((*q.shape[:2], v.shape[3]), math.nan, dtype=torch.float64)
    rows, positions, pages, starts, slots = (x.tolist() for x in plan[:3] + plan[4:6])
    for first_item, end_item, first_row, end_row in plan.launches.tolist():
        written = set()
        for first, end, page, position, keys, slot, carry in plan.items[first_item:end_item].tolist():
            assert 0 < end - first <= ITEM_ROWS
            assert not keys or position // CHUNK == (position + keys - 1) // CHUNK
            at = torch.arange(position, position + keys)
            block = torch.tensor(
                [pages[page + j // size - position // size] for j in at.tolist()], dtype=torch.int64
            )
            key, value = (x[block, at % size].repeat_interleave(heads // kv_heads, 1) for x in (k, v))
            seen = torch.zeros(keys, dtype=torch.bool)
            for i in range(first, end):
                to = slot + i - first
                assert to not in written and to < plan.slot_count
                written.add(to)
                none = (torch.full((heads,), -math.inf), torch.zeros(heads), torch.zeros(heads, v.shape[3]))
                top, total, sums = states[to] if carry else (x.double() for x in none)
                back = positions[i] - at
                sees = (back >= 0) & (back < window) if window else back >= 0
                seen |= sees
                if sees.any():
                    score = torch.einsum("hd,jhd->hj", q[rows[i]], key[sees]) * (scale or q.shape[2] ** -0.5)
                    score = softcap * torch.tanh(score / softcap) if softcap else score
                    now = torch.maximum(top, score.amax(1))
                    shrink, weight = torch.exp(top - now), torch.exp(score - now[:, None])
                    total = total * shrink + weight.sum(1)
                    sums = sums * shrink[:, None] + torch.einsum("hj,jhd->hd", weight, value[sees])
                    top = now
                states[to] = top, total, sums
            assert seen.all(), "each key is seen by a row of its item"
        for i in range(first_row, end_row):
            parts = [states[slot] for slot in slots[starts[i] : starts[i + 1]]]
            top = torch.stack([part[0] for part in parts]).amax(0)
            top = top if sinks is None else torch.maximum(top, sinks.double())
            total = sum(torch.exp(part[0] - top) * part[1] for part in parts)
            sums = sum(torch.exp(part[0] - top)[:, None] * part[2] for part in parts)
            total = total if sinks is None else total + torch.exp(sinks.double() - top)
            assert out[rows[i]].isnan().all(), "each row is written once"
            out[rows[i]] = sums / total[:, None]
        if first_row < end_row:
            states = {}
    return out


@pytest.mark.parametrize("step", [name for name in STEPS if name != "a row without a group"])
@pytest.mark.parametrize("option", ["plain", "window", "sinks"])
def test_followed_to_the_letter_it_is_attention(step, option):
    options = options_of(option)
    inputs = make(STEPS[step], head_dim=2, window=options.get("window"))
    got = follow(plan_of(inputs, options.get("window")), inputs, **options)
    check("out", got, got, dense(inputs, torch.float64, **options)[0], 1.0)
    torch.testing.assert_close(got, dense(inputs, torch.float64, **options)[0], rtol=1e-12, atol=1e-12)
    assert option in OPTIONS


@pytest.mark.parametrize("window", [None, 75])
@pytest.mark.parametrize("step", STEPS)
def test_a_row_goes_through_the_same_keys_in_the_same_order_alone(step, window):
    """Of each chunk, those that it sees; and no tile is cut but by the ends of what is seen."""
    inputs = make(STEPS[step], head_dim=1, window=window)
    plan = plan_of(inputs, window)
    # of a row and a chunk the keys, in the order of launches; items of one launch have states of their own
    gone: dict[tuple[int, int], list[int]] = {}
    for first_item, end_item, *_ in plan.launches.tolist():
        new = set()
        for first, end, _, position, keys, _, carry in plan.items[first_item:end_item].tolist():
            for row in plan.rows[first:end].tolist():
                key = row, position // CHUNK
                assert key not in new and carry == (key in gone)
                new.add(key)
                gone.setdefault(key, [])
                gone[key] += range(position, position + keys)
    lens, starts = inputs["seq_lens"].tolist(), inputs["cu_seqlens_q"].tolist()
    for n, (first, end) in enumerate(itertools.pairwise(starts)):
        for row in range(first, end):
            position = lens[n] - (end - row)
            low = max(0, position + 1 - window) if window else 0
            keys = [j for (of, _), js in sorted(gone.items()) if of == row for j in js]
            assert keys == sorted(keys)
            assert [j for j in keys if low <= j <= position] == list(range(low, position + 1))
    ends = {lens[n] - i for n in range(len(lens)) for i in range(lens[n])}
    for _, _, _, position, keys, _, _ in plan.items.tolist():
        assert (position + keys) % TILE == 0 or position + keys in ends


def read_of(plan):
    """Keys that items read, one for each tile of rows."""
    return int(sum(item[4] for item in plan.items.tolist()))


def test_a_group_reads_its_prompt_once():
    plan = plan_of(make(group("a", 640, [4] * 8)))
    assert (plan.keys_read, plan.keys_apart) == (640 + 8 * 4, 8 * 644)
    assert read_of(plan) == plan.keys_read


def test_a_tree_is_read_once_on_each_level():
    plan = plan_of(make(STEPS["a system prompt, prompts, samples"]))
    assert plan.keys_read == read_of(plan) == 128 + 2 * 448 + 10 + 11 + 12 + 13


def test_less_than_a_tile_is_read_apart():
    assert plan_of(make(group("a", 100, [4] * 3))).keys_read == 64 + 3 * 40
    assert plan_of(make(group("a", 60, [4] * 3))).keys_read == 3 * 64


def test_rows_that_are_part_of_what_is_shared_are_not_shared():
    """The table of a request in its prefill holds the blocks that its own rows are in."""
    plan = plan_of(make(group("a", 128, [4, 4], [100, 1])))
    assert plan.keys_read == 132 + 132


def test_a_window_reads_nothing_in_front_of_it():
    plan = plan_of(make(group("a", 640, [8] * 4), window=70), 70)
    assert plan.keys_apart == 4 * 70
    assert plan.keys_read == read_of(plan) == 62 + 4 * 8


@pytest.mark.parametrize("limit", [1, 8, 20])
@pytest.mark.parametrize("step", ["both at once", "many rows of a group", "chunked prefill"])
def test_partial_results_fit_in_what_is_there(step, limit, monkeypatch):
    monkeypatch.setattr(paged, "SLOTS", limit)
    inputs = make(STEPS[step], head_dim=1)
    plan = plan_of(inputs)
    most = ITEM_ROWS * -(-int(inputs["seq_lens"].max()) // CHUNK)
    assert plan.slot_count <= max(limit, most)
    assert (plan.launches[:, 3] > plan.launches[:, 2]).sum() > 1
    torch.testing.assert_close(follow(plan, inputs), dense(inputs, torch.float64)[0], rtol=1e-12, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), max_size=3), st.integers(1, 70), st.integers(1, 5)),
        min_size=1,
        max_size=6,
    ),
    st.sampled_from([1, 32, 100]),
    st.sampled_from([None, 3, 90]),
)
def test_any_step(requests, block_size, window):
    steps = [
        Request(
            tuple((f"{depth}{name}", 64 + 10 * name) for depth, name in enumerate(path)), own, min(rows, own)
        )
        for path, own, rows in requests
    ]
    inputs = make(steps, 1, 1, 1, block_size=block_size, window=window)
    got = follow(plan_of(inputs, window), inputs, window=window)
    torch.testing.assert_close(got, dense(inputs, torch.float64, window=window)[0], rtol=1e-11, atol=1e-11)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 1200), max_size=8),
    block_size=st.sampled_from([16, 32, 64]),
    window=st.sampled_from([0, 1, 70, 600]),
    idle=st.integers(0, 8),
)
def test_steps_of_decoding_have_the_plan_that_the_trees_have(lengths, block_size, window, idle):
    """Of one row for each request, but an idle one, and pages of their own."""
    width = -(-max(lengths, default=1) // block_size)
    table = torch.arange(len(lengths) * width, dtype=torch.int32).reshape(len(lengths), width).flip(0)
    starts = [0, *itertools.accumulate(int(i != idle) for i in range(len(lengths)))]
    found = paged.plan_of(table, lengths, starts, block_size, window)
    with pytest.MonkeyPatch.context() as change:
        change.setattr(paged._Planner, "plan_of_steps", lambda self, spans: None)
        want = paged.plan_of(table, lengths, starts, block_size, window)
    for name, mine, theirs in zip(found._fields, found, want, strict=True):
        same = torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs
        assert same and getattr(mine, "dtype", None) == getattr(theirs, "dtype", None), name


def test_steps_of_decoding_that_share_pages_are_a_tree():
    plan = plan_of(make(group("a", 128, [1] * 3)))
    assert (plan.keys_read, plan.keys_apart) == (128 + 3, 3 * 129)


def test_tensors_of_another_device_begin_at_multiples_of_16_bytes():
    plan = paged.on(plan_of(make(STEPS["both at once"])), torch.device("meta"))
    assert {x.device.type for x in plan[:6]} == {"meta"} and plan.launches.device.type == "cpu"
    assert all(x.storage_offset() % 4 == 0 and x.is_contiguous() for x in plan[:6])
