"""PrefixBatch and PrefixLayout: every row sees its own sample and predicts its next token."""

import re
from collections.abc import Sequence

import host_work
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlkernel import PrefixBatch, PrefixLayout

Sample = tuple[list[int], list[int]]  # prompt, completion

UNHURRIED = settings(deadline=None, max_examples=60)
# few tokens, so that prompts and completions repeat each other's
TOKENS = st.lists(st.integers(0, 3), max_size=5)
GROUPS = st.lists(st.tuples(TOKENS, st.lists(TOKENS, max_size=4)), max_size=4)


@st.composite
def forests(draw):
    nodes: list[list[int]] = []
    parents: list[int] = []
    completion: list[bool] = []
    for i in range(draw(st.integers(0, 10))):
        parents.append(draw(st.integers(-1, i - 1)))
        nodes.append(draw(TOKENS))
        completion.append(completion[parents[i]] if parents[i] >= 0 else False)
        completion[i] = completion[i] or draw(st.booleans())
    return nodes, parents, completion


def samples_of(nodes, parents, completion) -> list[Sample]:
    def down(i, part) -> list[int]:
        return [] if i < 0 else down(parents[i], part) + (nodes[i] if completion[i] == part else [])

    return [(down(i, False), down(i, True)) for i in range(len(nodes)) if i not in parents]


def check(batch: PrefixBatch, samples: Sequence[Sample]) -> None:
    """Against the samples' own tokens: labels, their places, and all that the rows in front of them see."""
    assert len(batch) == len(samples) == len(batch.samples)
    assert batch.completion_lengths.tolist() == [len(completion) for _, completion in samples]
    assert batch.tokens_dense == sum(len(p) + len(c) for p, c in samples)
    assert batch.total == batch.layout.total == batch.input_ids.shape[1] == batch.position_ids.shape[1]
    assert batch.total - batch.n_prefix == batch.labels.numel()
    first, last, pos = batch.layout.row_tables()
    assert pos.tolist() == batch.position_ids[0].tolist()
    sees = (first[None] <= first[:, None]) & (first[:, None] < last[None]) & (pos[None] <= pos[:, None])
    index = batch.unpack(torch.arange(batch.labels.numel()), fill=-1)
    assert index.shape == (len(samples), batch.width)
    used = set()
    for n, (prompt, completion) in enumerate(samples):
        unpredicted = 0 if prompt else 1  # nothing stands in front of the first token
        for t in range(batch.width):
            m = int(index[n, t])
            if not unpredicted <= t < len(completion):
                assert m == -1
                continue
            used.add(m)
            row = batch.n_prefix + m
            seen = sees[row].nonzero()[:, 0]
            seen = seen[pos[seen].argsort()]
            assert batch.input_ids[0, seen].tolist() == prompt + completion[:t]
            assert pos[seen].tolist() == list(range(len(prompt) + t)) and seen[-1] == row
            assert batch.labels[m] == completion[t]
    assert used == set(range(batch.labels.numel()))  # no row is for nothing


def packed(groups) -> tuple[PrefixBatch, list[Sample]]:
    samples = [(prompt, c) for prompt, completions in groups for c in completions]
    return PrefixBatch.pack([p for p, _ in groups], [c for _, c in groups]), samples


def rows(prompt: Sequence[int], lengths: Sequence[int]) -> int:
    """P - 1 + sum(L); no prompt where nothing is predicted; nothing predicts the first token without one."""
    if prompt:
        return len(prompt) - 1 + sum(lengths) if sum(lengths) else 0
    return sum(max(n - 1, 0) for n in lengths)


@UNHURRIED
@given(GROUPS)
def test_pack(groups):
    batch, samples = packed(groups)
    check(batch, samples)
    assert batch.total == sum(rows(prompt, [len(c) for c in group]) for prompt, group in groups)
    assert batch.ratio == (batch.tokens_dense / batch.total if batch.total else 1)


@UNHURRIED
@given(forests())
def test_pack_tree(forest):
    nodes, parents, completion = forest
    batch, samples = PrefixBatch.pack_tree(nodes, parents, completion), samples_of(*forest)
    check(batch, samples)
    repeated, index = batch.layout.repeated()
    assert repeated.total == index.numel() >= batch.total
    pos = batch.position_ids[0, index]
    starts = set(repeated.starts)
    assert all(p == 0 if i in starts else p == pos[i - 1] + 1 for i, p in enumerate(pos))


@st.composite
def padded(draw):
    prompts = draw(st.lists(TOKENS, min_size=1, max_size=3))
    samples = draw(st.lists(st.tuples(st.sampled_from(prompts), TOKENS), max_size=7))
    return samples, draw(st.sampled_from(["left", "right"])), draw(st.integers(0, 2))


def pad(rows_: list[list[int]], side: str, extra: int) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows_), default=0) + extra
    ids, mask = torch.full((len(rows_), width), 9), torch.zeros(len(rows_), width, dtype=torch.int64)
    for i, row in enumerate(rows_):
        at = slice(width - len(row), width) if side == "left" else slice(0, len(row))
        ids[i, at], mask[i, at] = torch.tensor(row, dtype=torch.int64), 1
    return ids, mask


@UNHURRIED
@given(padded())
def test_from_padded(case):
    samples, side, extra = case
    completion = pad([c for _, c in samples], "right", extra)
    batch = PrefixBatch.from_padded(*pad([p for p, _ in samples], side, extra), *completion)
    check(batch, samples)
    groups: dict[tuple, list[int]] = {}
    for prompt, c in samples:
        groups.setdefault(tuple(prompt), []).append(len(c))
    assert batch.total == sum(rows(prompt, lengths) for prompt, lengths in groups.items())
    # what TRL asks for: every completion token at its place
    labels = batch.unpack(batch.labels, fill=-1)
    predicted = completion[1].bool()
    predicted[[i for i, (p, _) in enumerate(samples) if not p], :1] = False
    assert torch.equal(labels, torch.where(predicted, completion[0], -1))


@UNHURRIED
@given(forests(), st.integers(0, 3))
def test_unpack_gives_each_sample_its_values_and_sums_their_gradients(forest, trailing):
    batch = PrefixBatch.pack_tree(*forest)
    shape = (batch.labels.numel(), *[2] * trailing)
    values = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    got = batch.unpack(values, fill=7.0)
    index = batch.unpack(torch.arange(shape[0]), fill=-1)
    padded_values = torch.cat([values, values.new_full((1, *shape[1:]), 7.0)])
    want = padded_values[index]
    assert torch.equal(got, want)
    given_grad = torch.randn_like(got)
    a, b = (torch.autograd.grad(x, values, given_grad, allow_unused=True)[0] for x in (got, want))
    torch.testing.assert_close(a, b, rtol=0, atol=1e-14)


def test_shared_gradients_are_summed_wide_and_in_order():
    stem = PrefixBatch.pack_tree([[1, 2], [3, 4], *[[5]] * 300], [-1, 0, *[1] * 300], [False] + [True] * 301)
    values = torch.zeros(stem.labels.numel(), dtype=torch.bfloat16, requires_grad=True)
    (grad,) = torch.autograd.grad(stem.unpack(values).sum(), values)
    assert grad.tolist() == [300, 300] + [1] * 300  # 300 ones do not add up in bf16: 256 + 1 = 256


@UNHURRIED
@given(GROUPS, st.integers(1, 25))
def test_split(groups, limit):
    batch, samples = packed(groups)
    check_split(batch, samples, limit, batch.split(limit))
    place = 0
    for prompt, group in groups:  # a group that fits stays together
        numbers = set(range(place, place + len(group)))
        place += len(group)
        if len(prompt) + sum(map(len, group)) <= limit:
            assert sum(bool(numbers & set(part.samples.tolist())) for part in batch.split(limit)) <= 1


@UNHURRIED
@given(forests(), st.integers(1, 25))
def test_split_trees(forest, limit):
    batch = PrefixBatch.pack_tree(*forest)
    check_split(batch, samples_of(*forest), limit, batch.split(limit))


def check_split(batch, samples, limit, parts):
    alone = [batch.select([n]).total for n in range(len(batch))]
    for part in parts:
        check(part, [samples[n] for n in part.samples.tolist()])
        # a sample too large alone takes no other rows with it
        assert part.total <= limit or part.total in [alone[n] for n in part.samples.tolist()]
        assert part.width == batch.width
    assert sorted(n for part in parts for n in part.samples.tolist()) == list(range(len(samples)))
    again = [part.samples.tolist() for part in batch.split(limit)]
    assert again == [part.samples.tolist() for part in parts]


def test_parts_of_parts_keep_the_numbers():
    batch, _ = packed([([1, 2], [[3], [4, 5]]), ([6], [[7, 8], [9]])])
    part = batch.select([3, 1])
    assert part.samples.tolist() == [3, 1]
    assert [p.samples.tolist() for p in part.split(2)] == [[3], [1]]
    assert part.unpack(part.labels).tolist() == [[9, 0], [4, 5]]


def test_a_prompt_that_predicts_nothing_fills_no_part():
    """An empty completion, as of a rollout that failed: its prompt has no row."""
    batch = PrefixBatch.pack([[1] * 10, [5], [8]], [[[]], [[6, 7]], [[9, 9]]])
    assert batch.total == 4
    assert [part.samples.tolist() for part in batch.split(6)] == [[0, 1, 2]]
    assert [part.total for part in batch.balance(2)] == [2, 2]


def test_a_part_without_samples():
    batch, _ = packed([([1, 2], [[3], [4, 5]])])
    assert len(batch.select([])) == batch.select([]).total == 0
    (only,) = PrefixBatch.pack([], []).split(4)
    assert len(only) == 0 and only.unpack(only.labels).shape == (0, 0) and only.ratio == 1


def test_the_picture_of_the_documentation():
    """``[prompts | completions]``, the last token of what is shared in front of every continuation."""
    batch, _ = packed([([1, 2, 3], [[4, 5], [6, 7, 8]]), ([9], [[10]])])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 3, 6, 7, 9]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 4, 0]]
    assert batch.labels.tolist() == [4, 5, 6, 7, 8, 10]
    assert batch.n_prefix == 2 and batch.total == 8 and batch.tokens_dense == 13 and batch.ratio == 13 / 8
    assert repr(batch) == "PrefixBatch(3 samples, 13 tokens in 8 rows, ratio 1.62, cpu)"


def test_a_tree_of_the_documentation():
    nodes, parents = [[1, 2], [3], [4, 5], [6], [7, 8]], [-1, 0, 1, 2, 2]
    batch = PrefixBatch.pack_tree(nodes, parents, [False, False, True, True, True])
    assert batch.input_ids.tolist() == [[1, 2, 3, 4, 5, 5, 7]]
    assert batch.unpack(batch.labels).tolist() == [[4, 5, 6, 0], [4, 5, 7, 8]]
    # the first two prompts follow each other alone: one segment for the kernels
    assert batch.layout.lengths == (2, 2, 1, 2) and batch.layout.parents == (-1, 0, 1, 1)


@UNHURRIED
@given(forests())
def test_last_tokens_and_how_many_samples_hold_each(forest):
    batch, samples = PrefixBatch.pack_tree(*forest), samples_of(*forest)
    longer, keep = batch.with_last_tokens()
    assert longer.labels[keep].tolist() == batch.labels.tolist()
    first, last, pos = longer.layout.row_tables()
    sees = (first[None] <= first[:, None]) & (first[:, None] < last[None]) & (pos[None] <= pos[:, None])
    labels = longer.unpack(torch.arange(longer.labels.numel()), fill=-1)
    want = torch.zeros(longer.total)
    for n, sample in enumerate(samples):
        tokens = [token for part in sample for token in part]
        if not tokens:
            continue
        seen = sees[longer.n_prefix + int(labels[n, int(longer.completion_lengths[n]) - 1])]
        assert longer.input_ids[0, seen][longer.position_ids[0, seen].argsort()].tolist() == tokens
        want += seen
    assert longer.token_counts().tolist() == want.tolist()
    assert longer.token_counts().sum() == batch.tokens_dense


def test_completion_rows_is_a_view_and_refuses_other_shapes():
    batch, _ = packed([([1, 2, 3], [[4, 5], [6]])])
    hidden = torch.randn(1, batch.total, 4)
    for x in (hidden, hidden[0]):
        got = batch.completion_rows(x)
        assert got.shape == (3, 4) and got.data_ptr() == hidden[0, batch.n_prefix].data_ptr()
    with pytest.raises(ValueError, match=re.escape("hidden must have the batch's 5 rows, got shape (4, 4)")):
        batch.completion_rows(hidden[0, :4])


def test_model_kwargs():
    batch, _ = packed([([1, 2, 3], [[4, 5], [6]])])
    given_kwargs = batch.model_kwargs()
    assert given_kwargs["input_ids"] is batch.input_ids and given_kwargs["position_ids"] is batch.position_ids
    assert given_kwargs["attention_mask"].dim() == 4 and given_kwargs["use_cache"] is False
    assert given_kwargs["prefix_batch"] is batch


def test_to_moves_what_models_read_and_keeps_the_layout():
    batch, _ = packed([([1, 2, 3], [[4, 5], [6]])])
    assert batch.to("cpu") is batch
    moved = batch.to("meta")
    assert moved.device.type == moved.input_ids.device.type == moved.labels.device.type == "meta"
    assert moved.samples.device.type == moved.completion_lengths.device.type == "cpu"
    assert moved.layout is batch.layout and batch.labels.device.type == "cpu"
    assert moved.unpack(torch.zeros(3, device="meta")).shape == (2, 2)
    shared = PrefixBatch.pack_tree([[1, 2], [3], [4], [5]], [-1, 0, 1, 1], [False, True, True, True]).to(
        "meta"
    )
    assert shared.unpack(torch.zeros(3, device="meta")).shape == (2, 2)


def test_what_is_made_of_a_batch_is_where_it_is():
    batch = PrefixBatch.pack([[1, 2]], [[[3, 4], [5]]], device="meta")
    longer, keep = batch.with_last_tokens()
    made = [longer, batch.one_row(), batch.select([1]), *batch.split(3), *batch.balance(2)]
    tensors = [x for b in made for x in (b.input_ids, b.position_ids, b.labels, b.unpack(b.labels))]
    tensors += [keep, longer.token_counts()]
    assert {x.device.type for x in tensors} == {str(b.device) for b in made} == {"meta"}


def test_tensors_numpy_arrays_and_lists_are_the_same():
    lists = PrefixBatch.pack([[1, 2]], [[[3], [4, 5]]])
    tensors = PrefixBatch.pack([torch.tensor([1, 2], dtype=torch.int32)], [[torch.tensor([3]), [4, 5]]])
    arrays = PrefixBatch.pack([torch.tensor([1, 2]).numpy()], [[torch.tensor([3]).numpy(), [4, 5]]])
    for other in (tensors, arrays):
        assert torch.equal(lists.input_ids, other.input_ids) and torch.equal(lists.labels, other.labels)


@pytest.mark.parametrize("what", ["pack", "split", "from_padded"])
def test_the_host_does_work_linear_in_the_batch(what):
    def calls(n: int) -> int:
        prompts, completions = [[i, 1, 2] for i in range(n)], [[[3], [4, 5]]] * n
        batch = PrefixBatch.pack(prompts, completions)
        samples = [(p, c) for p, group in zip(prompts, completions, strict=True) for c in group]
        tensors = *pad([p for p, _ in samples], "left", 0), *pad([c for _, c in samples], "right", 0)
        work = {
            "pack": lambda: PrefixBatch.pack(prompts, completions),
            "split": lambda: batch.split(30),
            "from_padded": lambda: PrefixBatch.from_padded(*tensors),
        }[what]
        return host_work.events(work)

    assert calls(400) < 4.5 * calls(100)


def siblings_in_a_row(batch):
    parents = list(batch.layout.parents)
    parents[-1] = len(parents) - 2
    batch.layout = PrefixLayout(batch.layout.lengths, tuple(parents), batch.layout.completion)
    batch.position_ids = batch.layout.row_tables().pos.long()[None]


MUTANTS = {
    "labels of the next row": lambda batch: setattr(batch, "labels", batch.labels.roll(1)),
    "a row's token": lambda batch: setattr(batch, "input_ids", batch.input_ids.roll(1)),
    "positions that start again": lambda batch: batch.position_ids[0, batch.n_prefix :].sub_(2),
    "a value at its neighbour's place": lambda batch: setattr(batch, "_places", batch._places.flip(0)),
    "a sibling is seen": siblings_in_a_row,
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_fails(mutant):
    batch, samples = packed([([1, 2, 3], [[4, 5], [6, 7, 8]])])
    check(batch, samples)
    MUTANTS[mutant](batch)
    with pytest.raises(AssertionError):
        check(batch, samples)


# Errors


def full(*shape):
    return torch.ones(shape, dtype=torch.int64)


WRONG = {
    "completions must have a list for each of the 2 prompts, got 1": lambda: PrefixBatch.pack(
        [[1], [2]], [[[3]]]
    ),
    "prompts[0] must be a list of token ids, got 'hello'": lambda: PrefixBatch.pack(["hello"], [[]]),
    "completions[0][1] must be a list of token ids, got [1.5]": lambda: PrefixBatch.pack(
        [[1]], [[[2], [1.5]]]
    ),
    "completions[0][0] must be a list of token ids, got 3": lambda: PrefixBatch.pack([[1]], [[3]]),
    "completions[0] must be a list of completions, got 3": lambda: PrefixBatch.pack([[1]], [3]),
    "nodes, parents and completion must have the same length, got 1, 2 and 1": lambda: PrefixBatch.pack_tree(
        [[1]], [-1, 0], [True]
    ),
    "parents[1] must be -1 or an earlier node, got 1": lambda: PrefixBatch.pack_tree(
        [[1], [2]], [-1, 1], [False, True]
    ),
    "completion[1] must be True below completion node 0, got False": lambda: PrefixBatch.pack_tree(
        [[1], [2]], [-1, 0], [True, False]
    ),
    "prompt_ids must have the 2 rows of completion_ids, got 3": lambda: PrefixBatch.from_padded(
        full(3, 4), full(3, 4), full(2, 4), full(2, 4)
    ),
    "completion_mask must have completion_ids' shape (2, 4), got (2, 3)": lambda: PrefixBatch.from_padded(
        full(2, 4), full(2, 4), full(2, 4), full(2, 3)
    ),
    "prompt_ids must be integers, got float32": lambda: PrefixBatch.from_padded(
        full(2, 4).float(), full(2, 4), full(2, 4), full(2, 4)
    ),
    "prompt_ids must have 2 dimensions (samples, tokens), got 1": lambda: PrefixBatch.from_padded(
        full(4), full(4), full(2, 4), full(2, 4)
    ),
    "prompt_mask must be a tensor, got list": lambda: PrefixBatch.from_padded(
        full(2, 4), [[1]], full(2, 4), full(2, 4)
    ),
    "prompt_mask[1] must have its tokens side by side, got a gap": lambda: PrefixBatch.from_padded(
        full(2, 3), torch.tensor([[1, 1, 0], [1, 0, 1]]), full(2, 4), full(2, 4)
    ),
    "completion_mask must be padded on the right, got a gap or padding on the left": (
        lambda: PrefixBatch.from_padded(full(1, 3), full(1, 3), full(1, 3), torch.tensor([[0, 1, 1]]))
    ),
    "max_tokens must be an integer >= 1, got 0": lambda: PrefixBatch.pack([[1]], [[[2]]]).split(0),
    "max_tokens must be an integer >= 1, got 2.0": lambda: PrefixBatch.pack([[1]], [[[2]]]).split(2.0),
    "samples must be places in [0, 1), got [1]": lambda: PrefixBatch.pack([[1]], [[[2]]]).select([1]),
    "samples must be places in [0, 1), got [0.5]": lambda: PrefixBatch.pack([[1]], [[[2]]]).select([0.5]),
    "samples must be places in [0, 1), got None": lambda: PrefixBatch.pack([[1]], [[[2]]]).select(None),
    "prompts must be a list, got None": lambda: PrefixBatch.pack(None, []),
    "completions must be a list, got 3": lambda: PrefixBatch.pack([], 3),
    "parents must be a list, got None": lambda: PrefixBatch.pack_tree([], None, []),
    "samples must be places in [0, 1), got [-1]": lambda: PrefixBatch.pack([[1]], [[[2]]]).select([-1]),
    "per_token must have shape (1,) (one value a label), got (2,)": lambda: PrefixBatch.pack(
        [[1]], [[[2]]]
    ).unpack(torch.zeros(2)),
    "lengths[0] must be >= 1, got 0": lambda: PrefixLayout((0,), (-1,), (True,)),
    "parents[0] must be -1 or an earlier segment, got 0": lambda: PrefixLayout((1,), (0,), (True,)),
    "completion[1] must be True below completion segment 0, got False": lambda: PrefixLayout(
        (1, 1), (-1, 0), (True, False)
    ),
    "completion must be False for the first segments and True for the rest": lambda: PrefixLayout(
        (1, 1), (-1, -1), (True, False)
    ),
    "the completion segments below segment 0 must be consecutive": lambda: PrefixLayout(
        (1, 1, 1, 1, 1), (-1, -1, 0, 1, 0), (False, False, True, True, True)
    ),
    "lengths, parents and completion must have one value a segment, got 1, 2 and 1": lambda: PrefixLayout(
        (1,), (-1, 0), (True,)
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_the_argument(message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        WRONG[message]()


# The layout itself


@UNHURRIED
@given(forests())
def test_the_layout_of_any_forest(forest):
    nodes, parents, completion = forest
    layout, place = PrefixLayout.of([len(n) for n in nodes], parents, completion)
    assert [s < 0 for s in place] == [not n for n in nodes]

    def above(i: int) -> set[int]:
        return set() if i < 0 else above(parents[i]) | ({place[i]} if place[i] >= 0 else set())

    paths = {place[i]: above(i) for i in range(len(nodes)) if place[i] >= 0}
    for s, path in paths.items():
        assert set(layout.path(s)) == path and layout.path(s)[-1] == s
        below = {row for t, other in paths.items() if s in other - {t} for row in range(*layout.rows(t))}
        runs = layout.rows_below(s)
        assert len(runs) <= 2 and all(a < b for a, b in runs)
        assert {row for run in runs for row in range(*run)} == below
        assert layout.offsets[s] == sum(layout.lengths[t] for t in path - {s})
    assert layout.max_position == max(layout.row_tables().pos.tolist(), default=-1)
    assert layout.is_flat == all(len(path) <= 2 for path in paths.values())
    assert set(layout.leaves) == {s for s in paths if not any(s in paths[t] for t in paths if t != s)}
    gathered = layout.gathered()
    runs = zip(gathered.cu_seqlens_k.tolist(), gathered.cu_seqlens_k.tolist()[1:], strict=False)
    for s, (a, b) in enumerate(runs):
        assert gathered.keys[a:b].tolist() == [row for t in layout.path(s) for row in range(*layout.rows(t))]


def test_rows_below_that_lie_side_by_side_are_one_run():
    """A kernel takes a run as a view: two would be two launches."""
    prompts_and_completions = PrefixLayout((2, 3, 4, 1), (-1, 0, 1, 1), (False, False, True, True))
    assert prompts_and_completions.rows_below(0) == [(2, 10)]
    apart = PrefixLayout((2, 3, 4, 5, 1), (-1, 0, -1, 1, 0), (False, False, False, True, True))
    assert apart.rows_below(0) == [(2, 5), (9, 15)]


def test_tables_are_made_once_and_come_back_from_the_segments():
    layout = PrefixLayout((2, 3), (-1, 0), (False, True))
    assert layout.row_tables() is layout.row_tables("cpu")
    again = PrefixLayout.of_tensor(layout.as_tensor())
    assert again.segments.tolist() == [[2, -1, 0], [3, 0, 1]]
    assert again is PrefixLayout.of_tensor(layout.segments.clone())
    assert layout.row_tables("meta").pos.device.type == "meta"
