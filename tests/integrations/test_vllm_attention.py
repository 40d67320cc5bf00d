"""The groups of a step, and attention that reads what they share once, against dense attention in fp64."""

import itertools
import math
import random

import pytest
import torch
from accuracy import check
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel.calls.prefix_shared_attention import AttentionRule
from rlkernel.integrations.vllm import attention_pages
from rlkernel.integrations.vllm.attention_groups import groups_of
from rlkernel.integrations.vllm.attention_pages import Pages, attend
from rlkernel.integrations.vllm.attention_plan import SharedPlan

BLOCK = 4
HEAD_DIM = 16


def saved(groups):
    return sum((len(group.requests) - 1) * group.blocks for group in groups)


def test_groups_are_found_wherever_their_requests_stand():
    table = torch.tensor([[7, 8, 1], [5, 6, 2], [7, 8, 3], [9, 9, 9], [5, 6, 4], [7, 8, 5]])
    found = groups_of(table, [3] * 6)
    assert sorted(found) == [((0, 2, 5), 2), ((1, 4), 2)]


def test_only_blocks_that_lie_before_the_rows_of_both_are_shared():
    table = torch.tensor([[7, 8, 1], [7, 8, 2], [7, 8, 3]])
    assert groups_of(table, [2, 1, 0]) == [((0, 1), 1)]
    assert groups_of(table, [2, 0, 0]) == []


def test_of_a_tree_the_levels_are_taken_that_save_most():
    prompts = [[1, 2, 10, 11, 12, 20 + i] for i in range(4)] + [[1, 2, 13, 14, 15, 30 + i] for i in range(4)]
    assert sorted(groups_of(torch.tensor(prompts), [6] * 8)) == [((0, 1, 2, 3), 5), ((4, 5, 6, 7), 5)]
    system = [[1, 2, 3, 4, 40 + i // 2, 50 + i] for i in range(8)]
    assert groups_of(torch.tensor(system), [6] * 8) == [(tuple(range(8)), 4)]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=4, max_size=4), min_size=1, max_size=6), st.data())
def test_no_other_groups_save_more(table, data):
    usable = [data.draw(st.integers(0, 4)) for _ in table]
    found = groups_of(torch.tensor(table), usable)
    taken = [request for group in found for request in group.requests]
    assert len(taken) == len(set(taken))
    for requests, blocks in found:
        assert len(requests) > 1 and blocks >= 1
        assert all(usable[r] >= blocks and table[r][:blocks] == table[requests[0]][:blocks] for r in requests)

    def best(left):
        """Every partition into groups that share a prefix, by brute force."""
        if not left:
            return 0
        head, *rest = left
        most = best(rest)
        for size in range(1, len(rest) + 1):
            for others in itertools.combinations(rest, size):
                rows = [table[r][: min(usable[s] for s in (head, *others))] for r in (head, *others)]
                depth = next(
                    (d for d in range(len(rows[0]), 0, -1) if len({*(tuple(r[:d]) for r in rows)}) == 1), 0
                )
                if depth:
                    most = max(most, size * depth + best([r for r in rest if r not in others]))
        return most

    assert saved(found) == best(list(range(len(table))))


class Step:
    """A step of an engine: requests on a paged cache, whose other pages and places hold NaN."""

    def __init__(self, shared, own, queries, *, heads=4, kv_heads=2, dtype=torch.float32, seed=0):
        """For each group, blocks that it shares; of each request, tokens behind them, and its rows."""
        generator = torch.Generator().manual_seed(seed)
        blocks = itertools.count(1)
        owners, tables, self.lengths, self.queries = [], [], [], []
        for depth, lengths, asked in zip(shared, own, queries, strict=True):
            first = [next(blocks) for _ in range(depth)]
            for length, rows in zip(lengths, asked, strict=True):
                tables.append(first + [next(blocks) for _ in range(-(-length // BLOCK))])
                self.lengths.append(depth * BLOCK + length)
                self.queries.append(rows)
                owners.append(depth)
        count = next(blocks)
        place = list(range(count))
        random.Random(seed).shuffle(place)  # neighbours in a sequence are not neighbours in the cache
        width = max(map(len, tables))
        self.table = torch.tensor(
            [[place[b] for b in t] + [0] * (width - len(t)) for t in tables], dtype=torch.int32
        )
        self.starts = [0, *itertools.accumulate(self.queries)]
        k, v = (
            torch.randn(count, kv_heads, BLOCK, HEAD_DIM, generator=generator).to(dtype) for _ in range(2)
        )
        written = torch.zeros(count, BLOCK, dtype=torch.bool)
        for row, length in zip(self.table.tolist(), self.lengths, strict=True):
            for i in range(length):
                written[row[i // BLOCK], i % BLOCK] = True
        for x in (k, v):
            x.transpose(1, 2)[~written] = math.nan
        self.k, self.v = k, v
        kv = torch.stack([k.transpose(2, 3).flatten(2), v.flatten(2)], 2)
        self.pages = Pages(kv.view(count, kv_heads, BLOCK, 2 * HEAD_DIM))
        self.q = torch.randn(self.starts[-1], heads, HEAD_DIM, generator=generator).to(dtype)
        self.plan = SharedPlan.of(self.table, self.starts, self.lengths, BLOCK)

    def dense(self, rule, sinks=None, dtype=torch.float64):
        """The plan's rows, each request by itself."""
        out = torch.empty(self.q.shape, dtype=dtype)
        for n, (a, b, length) in enumerate(zip(self.starts, self.starts[1:], self.lengths, strict=False)):
            blocks = self.table[n, : -(-length // BLOCK)].long()
            k, v = (x[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(dtype) for x in (self.k, self.v))
            k, v = (x.repeat_interleave(self.q.shape[1] // len(x), 0) for x in (k, v))
            score = (self.q[a:b].to(dtype) * rule.scale).transpose(0, 1) @ k.transpose(1, 2)
            if rule.softcap:
                score = rule.softcap * torch.tanh(score / rule.softcap)
            back = torch.arange(length - (b - a), length)[:, None] - torch.arange(length)
            score = score.masked_fill((back < 0) | (back >= (rule.window or length)), -math.inf)
            if sinks is not None:
                score = torch.cat([score, sinks.to(dtype)[:, None, None].expand(-1, b - a, 1)], 2)
            out[a:b] = (score.softmax(2)[..., :length] @ v).transpose(0, 1)
        return out[self.plan.rows]


STEPS = {
    "decode of one group": ([5], [[3, 9, 1]], [[1, 1, 1]]),
    "decode of several": ([5, 2], [[3, 9, 1], [4, 8]], [[1, 1, 1], [1, 1]]),
    "prefill behind a cached prompt": ([4], [[7, 12, 5]], [[7, 12, 5]]),
    "both at once": ([6, 3], [[1, 20, 5], [13, 2]], [[1, 6, 1], [13, 1]]),
    "alone beside them": ([3, 0], [[5, 6], [17]], [[1, 1], [1]]),
}
RULES = {
    "plain": AttentionRule(0.25, 0.0, 0, False),
    "softcap": AttentionRule(0.5, 3.0, 0, False),
    "window": AttentionRule(0.25, 0.0, 11, False),
    "window of one": AttentionRule(0.25, 0.0, 1, False),
    "window beyond": AttentionRule(0.25, 0.0, 1000, False),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("chunk", [1 << 19, 2 * BLOCK * HEAD_DIM], ids=["one chunk", "many"])
def test_rows_see_what_they_see_alone(step, rule, chunk, monkeypatch):
    monkeypatch.setattr(attention_pages, "CHUNK", chunk)
    case = Step(*step)
    sinks = torch.randn(4) if rule.softcap else None
    got = attend(case.q, case.pages, case.plan, rule, sinks)
    check("out", got, case.dense(rule, sinks, torch.float32), case.dense(rule, sinks))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype):
    case = Step(*STEPS["both at once"], dtype=dtype)
    rule = RULES["plain"]
    got = attend(case.q, case.pages, case.plan, rule)
    assert got.dtype == torch.float32
    check("out", got, case.dense(rule, dtype=torch.float32), case.dense(rule))


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 1), (6, 2)])
def test_heads_share_keys(heads, kv_heads):
    case = Step(*STEPS["both at once"], heads=heads, kv_heads=kv_heads)
    rule = RULES["plain"]
    got = attend(case.q, case.pages, case.plan, rule)
    check("out", got, case.dense(rule, dtype=torch.float32), case.dense(rule))


def test_a_group_reads_its_prompt_once():
    case = Step([100], [[4] * 8], [[1] * 8])
    work = case.plan.window(0)
    assert (work.read, work.apart) == (400 + 8 * 4, 8 * 404)


def test_a_window_reads_no_block_before_it():
    case = Step([100], [[8] * 8], [[1] * 8])
    work = case.plan.window(10)
    assert (work.read, work.apart) == (4 + 8 * 8, 8 * 10)
    assert not case.plan.window(8).shared


def test_no_page_is_read_twice():
    work = Step(*STEPS["both at once"]).plan.window(0)
    read = torch.cat([*(part.blocks for part in (*work.shared, *work.own)), work.singles.blocks]).tolist()
    assert len(read) == len(set(read)) == work.read // BLOCK


def test_without_a_shared_block_there_is_no_plan():
    assert Step([0], [[3, 9]], [[1, 1]]).plan is None
