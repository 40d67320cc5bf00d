"""PrefixBatch.from_sequences, split, balance: whole sequences that share prefixes, and what runs together."""

import itertools
import random
import re

import host_work
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel import PrefixBatch

UNHURRIED = settings(deadline=None, max_examples=80)


@st.composite
def sequences(draw):
    """Some random, some that go on where another one is, and their masks."""
    found: list[list[int]] = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.sampled_from(found)) if found and draw(st.booleans()) else []
        start = start[: draw(st.integers(0, len(start)))]
        found.append(start + draw(st.lists(st.integers(0, 2), max_size=6)))
    return found, [draw(st.lists(st.integers(0, 1), min_size=len(s), max_size=len(s))) for s in found]


def check(batch, tokens, masks):
    """Against the sequences' own tokens: labels, their places, and all that the rows in front of them see."""
    assert len(batch) == len(tokens) and batch.completion_lengths.tolist() == [len(s) for s in tokens]
    assert batch.tokens_dense == sum(map(len, tokens))
    first, last, pos = batch.layout.row_tables()
    assert pos.tolist() == batch.position_ids[0].tolist() and batch.total == len(pos)
    sees = (first[None] <= first[:, None]) & (first[:, None] < last[None]) & (pos[None] <= pos[:, None])
    rows = batch.completion_rows(torch.arange(batch.total)[:, None].expand(-1, 2))[:, 0]
    index = batch.unpack(torch.arange(batch.labels.numel()), fill=-1)
    used = set()
    for n, (sequence, mask) in enumerate(zip(tokens, masks, strict=True)):
        for t in range(batch.width):
            m = int(index[n, t])
            if not (0 < t < len(sequence) and mask[t]):
                assert m == -1
                continue
            used.add(m)
            seen = sees[rows[m]].nonzero()[:, 0]
            seen = seen[pos[seen].argsort()]
            assert batch.input_ids[0, seen].tolist() == sequence[:t] and seen[-1] == rows[m]
            assert batch.labels[m] == sequence[t]
    assert used == set(range(batch.labels.numel())) and len(set(rows.tolist())) == len(rows)


@UNHURRIED
@given(sequences())
def test_every_token_under_its_mask_is_predicted_from_its_own_past(case):
    check(PrefixBatch.from_sequences(*case), *case)


@UNHURRIED
@given(sequences())
def test_a_token_behind_the_same_tokens_is_one_row(case):
    """And no row is there that nothing needs: of what is not masked, the tokens in front."""
    batch = PrefixBatch.from_sequences(*case)
    wanted = set()
    for sequence, mask in zip(*case, strict=True):
        wanted |= {tuple(sequence[: t + 1]) for t in range(len(sequence)) if mask[t] and t}
    assert batch.labels.numel() == len(wanted)
    needed = {past[:n] for past in wanted for n in range(1, len(past))}
    # at a fork the token in front stands once for each branch
    branches = {past[:-1]: set() for past in needed | wanted if len(past) > 1}
    for past in needed | wanted:
        if len(past) > 1:
            branches[past[:-1]].add(past[-1])
    assert batch.total == sum(map(len, branches.values()))


@UNHURRIED
@given(sequences(), st.integers(1, 12))
def test_parts(case, limit):
    tokens, masks = case
    batch = PrefixBatch.from_sequences(*case)
    for parts in (batch.split(limit), batch.balance(3, pair_cost=0.1)):
        assert sorted(n for part in parts for n in part.samples.tolist()) == list(range(len(tokens)))
        for part in parts:
            own = part.samples.tolist()
            check(part, [tokens[n] for n in own], [masks[n] for n in own])
            assert part.width == batch.width
    alone = [batch.select([n]).total for n in range(len(batch))]
    for part in batch.split(limit):  # a sample too large alone takes no other rows with it
        assert part.total <= limit or part.total in [alone[n] for n in part.samples.tolist()]


@UNHURRIED
@given(sequences())
def test_last_tokens_and_how_many_sequences_hold_each(case):
    tokens, masks = case
    batch = PrefixBatch.from_sequences(tokens, masks)
    longer, keep = batch.with_last_tokens()
    assert longer.labels[keep].tolist() == batch.labels.tolist()
    # the rows of a token, one for each branch behind it, count the sequences that hold it
    first, last, pos = longer.layout.row_tables()
    sees = (first[None] <= first[:, None]) & (first[:, None] < last[None]) & (pos[None] <= pos[:, None])
    counted: dict[tuple[int, ...], int] = {}
    for row, count in enumerate(longer.token_counts().tolist()):
        seen = sees[row].nonzero()[:, 0]
        past = tuple(longer.input_ids[0, seen[pos[seen].argsort()]].tolist())
        counted[past] = counted.get(past, 0) + count
    held = [tuple(sequence[: t + 1]) for sequence in tokens for t in range(len(sequence))]
    assert counted == {past: held.count(past) for past in set(held)}


def test_turns_of_an_agent():
    """Five turns behind a prompt, each a sequence with all before it: 8,000 tokens on 2,000 rows."""
    ids = list(range(2000))
    ends = [1000 + 200 * turn for turn in range(1, 6)]
    # of every turn the first half is the policy's, the second half is what a tool says
    mask = [0] * 1000 + ([1] * 100 + [0] * 100) * 5
    batch = PrefixBatch.from_sequences([ids[:end] for end in ends], [mask[:end] for end in ends])
    # neither the prompt's last token twice, nor what the last tool says
    assert (batch.tokens_dense, batch.total, batch.labels.numel()) == (8000, 1899, 500)
    assert batch.n_prefix == 999 and len(batch.layout.lengths) == 2
    hidden = torch.randn(batch.total, 3)
    assert torch.equal(batch.completion_rows(hidden), hidden[torch.tensor(mask[1:1900]).nonzero()[:, 0]])
    got = batch.unpack(batch.labels, fill=-1)
    assert got[1].tolist() == [t if t < 1400 and mask[t] else -1 for t in range(2000)]


def test_each_sequence_has_its_own_mask():
    """One trains on the first turn, another on the second: both rows are there, each for its own."""
    batch = PrefixBatch.from_sequences([[1, 2, 3], [1, 2, 3, 4]], [[0, 1, 1], [0, 0, 0, 1]])
    assert batch.unpack(batch.labels, fill=-1).tolist() == [[-1, 2, 3, -1], [-1, -1, -1, 4]]
    second = batch.select([1])
    assert second.unpack(second.labels, fill=-1).tolist() == [[-1, -1, -1, 4]]
    assert second.labels.tolist() == [4] and second.n_prefix + 1 <= second.total == 3
    both = PrefixBatch.from_sequences([[1, 2, 3]] * 2, [torch.tensor([False, True, True])] * 2)
    assert both.total == 2 and both.unpack(both.labels).tolist() == [[0, 2, 3]] * 2


def test_anything_that_has_rows_is_a_list():
    tokens, masks = [[1, 2, 3], [1, 2, 4]], [[0, 1, 1], [0, 1, 1]]
    want = PrefixBatch.from_sequences(tokens, masks)
    for make in (tuple, iter, torch.tensor, lambda x: torch.tensor(x, dtype=torch.uint8).numpy()):
        got = PrefixBatch.from_sequences(make(tokens), make(masks))
        assert torch.equal(got.input_ids, want.input_ids)
        assert torch.equal(got.unpack(got.labels), want.unpack(want.labels))


def test_groups_become_the_batch_of_pack():
    prompts, completions = [[1, 2, 3], [9, 8]], [[[4, 5], [6, 7, 8]], [[1, 1], [2]]]
    want = PrefixBatch.pack(prompts, completions)
    whole = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
    got = PrefixBatch.from_sequences(
        [p + c for p, c in whole], [[0] * len(p) + [1] * len(c) for p, c in whole]
    )
    for name in ("input_ids", "position_ids", "labels"):
        assert torch.equal(getattr(got, name), getattr(want, name))
    assert got.layout.segments.tolist() == want.layout.segments.tolist() and got.n_prefix == want.n_prefix


# parts


def random_groups(n, seed):
    g = random.Random(seed)
    return [(g.randrange(200, 1200), [g.randrange(50, 1000) for _ in range(8)]) for _ in range(n)]


def pack_lengths(groups):
    fresh = itertools.count()

    def tokens(n):
        return [next(fresh) for _ in range(n)]

    return PrefixBatch.pack([tokens(p) for p, _ in groups], [[tokens(n) for n in c] for _, c in groups])


def test_split_needs_few_parts():
    """In the order of the groups every third part would be half empty."""
    groups = random_groups(64, seed=3)
    batch, limit = pack_lengths(groups), 8192
    sizes = [p + sum(c) for p, c in groups]
    in_order, room = 0, 0
    for size in sizes:
        if size > room:
            in_order, room = in_order + 1, limit
        room -= size
    parts = batch.split(limit)
    assert -(-sum(sizes) // limit) <= len(parts) <= 0.9 * in_order
    assert all(part.total <= limit for part in parts) and sum(map(len, parts)) == len(batch)
    assert sum(part.total for part in parts) == batch.total  # no prompt is computed twice
    firsts = [part.samples[0].item() for part in parts]
    assert firsts == sorted(firsts)
    assert all(part.samples.tolist() == sorted(part.samples.tolist()) for part in parts)


def test_a_tree_is_cut_as_low_as_it_can_be():
    """All below one system prompt: groups stay whole, only the system prompt is computed in each part."""
    system = list(range(100))
    prompts = [[1000 + b] * 50 for b in range(6)]
    tokens = [system + p + [10_000 + g] * 40 for p in prompts for g in range(4)]
    batch = PrefixBatch.from_sequences(tokens, [[0] * 150 + [1] * 40] * len(tokens))
    parts = batch.split(600)  # the system prompt and two groups of 50 + 4 * 40
    assert [part.samples.tolist() for part in parts] == [list(range(n, n + 8)) for n in (0, 8, 16)]
    assert sum(part.total for part in parts) == batch.total + 2 * 99


def test_turns_stay_with_the_last_one_where_that_alone_is_too_large():
    """The rows of the earlier turns are among its own: they cost nothing more, and much elsewhere."""
    ids, ends = list(range(2000)), [1000 + 200 * turn for turn in range(1, 6)]
    batch = PrefixBatch.from_sequences(
        [ids[:end] for end in ends], [[0] * 1000 + [1] * (e - 1000) for e in ends]
    )
    for limit in (100, 1500, 1900):
        assert [(part.total, len(part)) for part in batch.split(limit)] == [(1999, 5)]


def test_tokens_that_nothing_needs_count_for_no_part():
    """Filtered sequences, and what follows the last label: no rows, so nothing to split or to balance."""
    tokens = [list(range(1000 * n, 1000 * (n + 1))) for n in range(8)]
    masks = [[0] * 500 + [1] * 500 if n in (0, 1, 4, 5) else [0] * 1000 for n in range(8)]
    batch = PrefixBatch.from_sequences(tokens, masks)
    assert [part.total for part in batch.balance(4)] == [999] * 4
    assert [part.total for part in batch.split(2000)] == [1998] * 2
    assert len(PrefixBatch.from_sequences(tokens, [[0] * 1000] * 8).split(10)) == 1
    masks = [[0] * 10 + [1] * 10 + [0] * 980 if n < 7 else [0] * 10 + [1] * 990 for n in range(8)]
    parts = PrefixBatch.from_sequences(tokens, masks).balance(2)
    assert sorted(part.total for part in parts) == [7 * 19, 999]
    assert [part.total for part in PrefixBatch.from_sequences(tokens, masks).split(1140)] == [7 * 19 + 999]


def test_the_parts_of_a_limit_are_found_once(monkeypatch):
    from rlkernel.prefix import parts

    batch = PrefixBatch.pack([[1, 2]], [[[3], [4, 5]]])
    first = [part.samples.tolist() for part in batch.split(3)]
    monkeypatch.setattr(parts, "parts", None)
    assert [part.samples.tolist() for part in batch.split(3)] == first == [[0], [1]]


@pytest.mark.parametrize("pair_cost", [0.0, 1e-3])
@pytest.mark.parametrize("ranks", [1, 2, 7])
def test_ranks_get_nearly_the_same(ranks, pair_cost):
    batch = pack_lengths(random_groups(40, seed=8))

    def cost(part):
        first, last, pos = part.layout.row_tables()
        return part.total + pair_cost * int((pos + 1).sum())  # a row sees as many as its position says

    parts = batch.balance(ranks, pair_cost=pair_cost)
    assert len(parts) == ranks and sum(part.total for part in parts) == batch.total
    costs = [cost(part) for part in parts]
    assert max(costs) <= 1.1 * sum(costs) / ranks


def test_a_rank_may_have_nothing_and_a_large_group_is_cut():
    empty, one = sorted(PrefixBatch.pack([[1]], [[[2, 3]]]).balance(2), key=len)
    assert len(empty) == empty.total == 0 and len(one) == 1
    batch = pack_lengths([(10, [100] * 8), (10, [5])])
    loads = [part.total for part in batch.balance(4)]
    assert max(loads) <= 225 and sum(loads) == batch.total + 3 * 9


MUTANTS = {
    "an unlabelled row for a labelled one": lambda b: setattr(b, "_label_rows", b._label_rows - 1),
    "labels of the next row": lambda b: setattr(b, "labels", b.labels.roll(1)),
    "a value at its neighbour's place": lambda b: setattr(b, "_places", b._places.flip(0)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant):
    tokens, masks = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7]], [[0, 0, 1, 0, 0, 1], [0, 0, 1, 1]]
    batch = PrefixBatch.from_sequences(tokens, masks)
    check(batch, tokens, masks)
    MUTANTS[mutant](batch)
    with pytest.raises(AssertionError):
        check(batch, tokens, masks)


def test_the_host_does_work_linear_in_the_batch():
    def calls(n):
        tokens = [[b, 1, 2, 3 + g] for b in range(n) for g in range(4)]
        masks = [[0, 0, 1, 1]] * len(tokens)
        return host_work.events(lambda: PrefixBatch.from_sequences(tokens, masks).split(30))

    assert calls(200) < 4.5 * calls(50)


WRONG = {
    "token_ids must be a list, got None": (None, [[1]]),
    "loss_mask must be a list, got 1": ([[1]], 1),
    "loss_mask must have a mask for each of the 2 sequences, got 1": ([[1], [2]], [[1]]),
    "loss_mask[1] must have token_ids[1]'s shape (2,), got (3,)": ([[1], [2, 3]], [[1], [1, 1, 1]]),
    "loss_mask[0] must be a list of booleans or numbers, got 'yes'": ([[1]], ["yes"]),
    "token_ids[0] must be a list of token ids, got [1.5]": ([[1.5]], [[1]]),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PrefixBatch.from_sequences(*WRONG[message])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ranks": 0}, "ranks must be an integer >= 1, got 0"),
        ({"ranks": 2.0}, "ranks must be an integer >= 1, got 2.0"),
        ({"ranks": 2, "pair_cost": -1}, "pair_cost must be a finite number >= 0, got -1"),
        ({"ranks": 2, "pair_cost": float("nan")}, "pair_cost must be a finite number >= 0, got nan"),
    ],
)
def test_balance_names_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        PrefixBatch.pack([[1]], [[[2]]]).balance(**arguments)
