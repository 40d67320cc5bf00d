"""sampling: biases of few tokens and of what repeats: against vLLM, Hugging Face and DRY's own processor."""

import random

import numpy as np
import pytest
import sampling_peers as peers
import torch
from backends import is_slow
from bitwise import assert_equal
from sampling_cases import PAIRS, sample, support

import rlkernel
from rlkernel import Dry, Penalties, TokenBias
from rlkernel.reference.sampling import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
VOCAB = 12  # so few that repetitions are many


def histories(seed, rows, most=24):
    """Token lists full of copies, of several lengths; the last one is empty."""
    r = random.Random(seed)
    made = []
    for _ in range(rows - 1):
        part = [r.randrange(VOCAB) for _ in range(r.randrange(1, 6))]
        made.append((part * 6)[: r.randrange(1, most)] + [r.randrange(VOCAB) for _ in range(r.randrange(3))])
    return [*made, []]


def padded(lists, side="right", padding=-1):
    width = max(map(len, lists))
    rows = [
        [padding] * (width - len(x)) + x if side == "left" else x + [padding] * (width - len(x))
        for x in lists
    ]
    return torch.tensor(rows)


def adjusted(z, **options):
    """The logits after everything that comes before the filters, by what the tokens' probabilities are."""
    every = torch.arange(z.shape[-1], device=z.device)
    out = rlkernel.sample(z, seeds=0, logprob_token_ids=every, **options)
    return out.id_logprobs


def logits_of(rows, seed=1):
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def check(got, want):
    want = want.log_softmax(-1)
    assert torch.equal(got.isfinite(), want.isfinite())
    want = torch.where(want.isfinite(), want, 0)
    assert ((torch.where(got.isfinite(), got, 0) - want).abs() <= 1e-5 * (1 + want.abs())).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_hugging_faces_no_repeat_ngram(n):
    lists = histories(n, 40)[:-1]
    for tokens in lists:
        z = logits_of(1)
        theirs = peers.hf("NoRepeatNGramLogitsProcessor")(n)(torch.tensor([tokens]), z.clone())
        check(adjusted(z, penalties=Penalties(torch.tensor([tokens]), no_repeat_ngram=n)), theirs)
    # all rows at once, padded: the same as alone
    z = logits_of(len(lists))
    whole = adjusted(z, penalties=Penalties(padded(lists, "left"), no_repeat_ngram=n))
    for i, tokens in enumerate(lists):
        alone = adjusted(z[i : i + 1], penalties=Penalties(torch.tensor([tokens]), no_repeat_ngram=n))
        assert_equal(f"row {i}", whole[i : i + 1], alone)


def test_a_history_is_its_tokens_without_padding():
    """Prompts padded on the left, outputs on the right, by an id that is not in the vocabulary."""
    lists = histories(5, 30)
    cut = [len(tokens) // 2 for tokens in lists]
    prompt = padded([t[:c] for t, c in zip(lists, cut, strict=True)], "left", VOCAB)
    output = padded([t[c:] for t, c in zip(lists, cut, strict=True)], "right", -100)
    options = {"dry": Dry(0.8, breakers=[3]), "no_repeat_ngram": 3, "bad_words": [[5], [1, 2]]}
    z = logits_of(len(lists))
    got = adjusted(z, penalties=Penalties(output, prompt, **options))
    want = adjusted(z, penalties=Penalties(padded(lists), **options))
    assert torch.equal(got, want) and want.isneginf().any() and want.isneginf()[-1].sum() == 1


WORDS = [[4], [2, 3], [0, 1, 2], [7, 7], [1, 2, 3, 4, 5]]


def test_vllms_bad_words():
    lists = histories(8, 60)
    z = logits_of(len(lists))
    theirs = z.clone()
    own = {i: WORDS[i % 3 :] for i in range(0, len(lists), 2)}
    peers.vllm("v1.sample.ops.bad_words").apply_bad_words(theirs, own, lists)
    words = [own.get(i) for i in range(len(lists))]
    penalties = Penalties(padded(lists), bad_words=words)
    check(adjusted(z, penalties=penalties), theirs)
    shared = z.clone()
    peers.vllm("v1.sample.ops.bad_words").apply_bad_words(
        shared, dict.fromkeys(range(len(lists)), WORDS), lists
    )
    check(adjusted(z, penalties=Penalties(padded(lists), bad_words=WORDS)), shared)


def test_hugging_faces_bad_words():
    process = peers.hf("NoBadWordsLogitsProcessor")(WORDS)
    for tokens in [[2], [0, 1], [1], *histories(9, 60)[:-1]]:
        z, said = logits_of(1), torch.tensor([tokens])
        theirs = process(said, z.clone()).isneginf()
        ours = adjusted(z, penalties=Penalties(said, bad_words=WORDS)).isneginf()
        assert torch.equal(ours, theirs) and ours[0, 4], tokens


@pytest.mark.parametrize("allowed, breakers, last_n", [(1, [], 0), (2, [], 0), (2, [0, 5], 0), (3, [1], 9)])
def test_dry(allowed, breakers, last_n):
    lists = [*histories(allowed + last_n, 60)[:-1], [1, 2, 3] * 40]
    z = logits_of(len(lists))
    theirs = z.clone()
    for tokens, row in zip(lists, theirs, strict=True):
        peers.dry(tokens, row, 0.8, 1.75, allowed, set(breakers), last_n)
    dry = Dry(0.8, 1.75, allowed, breakers, last_n)
    got = adjusted(z, penalties=Penalties(padded(lists), dry=dry))
    check(got, theirs)
    assert not torch.equal(got, adjusted(z, penalties=Penalties(padded(lists))))
    rows = Dry(
        torch.full((len(lists),), 0.8), torch.full((len(lists),), 1.75),
        torch.full((len(lists),), allowed), torch.tensor(breakers, dtype=torch.int64), last_n,
    )  # fmt: skip
    assert_equal("per row", adjusted(z, penalties=Penalties(padded(lists), dry=rows)), got)
    rows.multiplier[:5] = 0
    off = adjusted(z, penalties=Penalties(padded(lists), dry=rows))
    assert_equal("off", off[:5], adjusted(z[:5], penalties=Penalties(padded(lists)[:5])))


def test_dry_comes_behind_the_repetition_penalty():
    z, said = logits_of(1), torch.tensor([[3, 4, 5, 3, 4]])
    got = adjusted(z, penalties=Penalties(said, repetition=2.0, dry=Dry(1.0, 2.0, 1), no_repeat_ngram=5))
    want = z.clone()
    want[0, 3:6] = torch.where(want[0, 3:6] > 0, want[0, 3:6] / 2, want[0, 3:6] * 2)
    want[0, 5] -= 2.0
    check(got, want)


@ON_EVERY_BACKEND
def test_every_backend_draws_from_what_is_left(backend, device):
    """Bans are -inf logits: never drawn, never kept, not in the tempered distribution; a row of nothing else
    is not valid."""
    rows = 4 if is_slow(backend, device) else 16
    lists = histories(2, rows)
    z = (3 * logits_of(rows)).to(device)
    words = [[[t] for t in range(VOCAB)] if i == 1 else [[7]] for i in range(rows)]
    penalties = Penalties(padded(lists).to(device), no_repeat_ngram=2, bad_words=words, dry=Dry(2.0))
    options = {"penalties": penalties, "top_p": 0.9, "return_support": VOCAB}
    out = sample(backend, z, **options)
    want = sample("reference", z, **options)
    assert torch.equal(out.token_ids, want.token_ids)
    banned = adjusted(z, penalties=penalties).isneginf()
    for row in range(rows):
        assert out.valid[row] == (row != 1)
        if row != 1:
            assert not banned[row, support(out, row)].any() and not banned[row, out.token_ids[row]]
    raw = z.log_softmax(-1).gather(1, out.token_ids.clamp(min=0)[:, None])[:, 0]
    assert ((out.raw_logprobs - raw).abs() < 1e-5)[out.valid].all(), "raw knows no ban"


@ON_EVERY_BACKEND
def test_bias_of_each_row(backend, device):
    """Dicts, a ``TokenBias`` and a dense tensor of the same biases give the same bits."""
    vocab, rows = 200, 4
    logits = (2 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4))).to(device)
    bias = [{3: 9.0, 5: -4.0}, None, {190: 12.0, 0: -torch.inf, 7: 0.5}, {}]
    dense = torch.zeros(rows, vocab, device=device)
    for row, entries in enumerate(bias):
        for token, value in (entries or {}).items():
            dense[row, token] = value
    ids = torch.tensor([[3, -1, 5], [-1, vocab, -7], [190, 0, 7], [9, 9, 9]], device=device)
    values = torch.tensor(
        [[9.0, 5.0, -4.0], [1.0, 2.0, 3.0], [12.0, -torch.inf, 0.5], [0.0, 0.0, 0.0]], device=device
    )
    options = {"top_p": 0.95, "return_rank": True, "return_support": vocab, "temperature": 0.7}
    want = sample(backend, logits, logit_bias=dense, **options)
    before = logits.clone()
    for name, given in {"dicts": bias, "ids": TokenBias(ids, values)}.items():
        got = sample(backend, logits, logit_bias=given, **options)
        for field, a, b in zip(got._fields, got, want, strict=True):
            if b is not None:
                assert_equal(f"{name}: {field}", a, b)
    assert torch.equal(logits, before), "the logits are not modified"


def test_vllms_bias_of_each_request():
    z = torch.randn(6, 50, generator=torch.Generator().manual_seed(4))
    bias = {0: {3: 9.0, 5: -4.0}, 2: {40: 12.0, 0: -100.0}}
    theirs = peers.vllm_processed(z, processors=[peers.vllm_logit_bias(bias)])
    out = rlkernel.sample(z, logit_bias=[bias.get(i) for i in range(6)], logprob_token_ids=torch.arange(50))
    assert (out.id_logprobs - theirs).abs().max() < 5e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_dict_is_the_bias_of_every_row(dtype):
    z = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = {7: 1.3, 0: -torch.inf, VOCAB - 1: -0.1}
    kept = z.clone()
    got = adjusted(z, logit_bias=bias)
    assert_equal("rows", got, adjusted(z, logit_bias=[bias] * 3))
    assert got[:, 0].isneginf().all() and torch.equal(z, kept)
    assert_equal("empty", adjusted(z, logit_bias={}), adjusted(z))


def test_of_a_token_twice_the_smaller_value_counts():
    z = torch.zeros(3, 5)
    ids = torch.tensor([[1, 1, 1, -1], [2, -1, 2, 0], [-1, -1, -1, -1]])
    values = torch.tensor([[3.0, -1.0, 2.0, -9.0], [4.0, -9.0, 5.0, 1.0], [-9.0, -9.0, -9.0, -9.0]])
    got = adjusted(z, logit_bias=TokenBias(ids, values))
    want = torch.tensor([[0.0, -1.0, 0.0, 0.0, 0.0], [1.0, 0.0, 4.0, 0.0, 0.0], [0.0] * 5])
    check(got, want)
    check(
        adjusted(z, logit_bias=TokenBias(torch.tensor([3, 0]), -2.0)), torch.tensor([[-2.0, 0, 0, -2, 0]] * 3)
    )


def test_more_dimensions_and_half_precision():
    z = torch.randn(2, 3, VOCAB, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    ids = torch.arange(6).view(2, 3, 1)
    got = adjusted(z, logit_bias=TokenBias(ids, -torch.inf))
    assert got.isneginf().sum() == 6 and got.isneginf().gather(-1, ids).all()
    flat = [{i: -torch.inf} for i in range(6)]
    assert torch.equal(adjusted(z, logit_bias=flat), got)


def test_verify_chain_counts_the_drafts_before_each_place():
    """Each place of a chain is ``sample`` with the drafts before it behind the output."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 4, VOCAB, generator=g)
    said = torch.tensor([[1, 2, 3, 1, 2], [5, 5, 5, -1, -1], [4, -1, -1, -1, -1]])
    bias = [{2: 3.0}, None, {7: -torch.inf}]
    words = [[[9]], None, [[4, 6]]]

    def penalties(output, rows=slice(None)):
        dry = Dry(torch.tensor([0.5, 1.0, 2.0])[rows], 2.0, 1)
        return Penalties(output, dry=dry, no_repeat_ngram=3, bad_words=words[rows], repetition=1.2)

    # the drafts are what the target draws, so that all places are seen
    drafts = torch.zeros(3, 3, dtype=torch.int64)
    for place in range(4):
        output = torch.cat([said, drafts[:, :place]], 1)
        want = rlkernel.sample(
            logits[:, place], seeds=5, positions=place, penalties=penalties(output), logit_bias=bias
        )
        if place < 3:
            drafts[:, place] = want.token_ids
    out = rlkernel.verify_chain(drafts, logits, seeds=5, penalties=penalties(said), logit_bias=bias)
    assert out.accepted.tolist() == [3, 3, 3] and torch.equal(out.token_ids[:, :3], drafts)
    assert_equal("last logprob", out.processed_logprobs[:, 3], want.processed_logprobs)
    ids = torch.tensor([[2], [-1], [7]])
    given = TokenBias(ids, torch.tensor([[3.0], [0.0], [-torch.inf]]))
    other = rlkernel.verify_chain(drafts, logits, seeds=5, penalties=penalties(said), logit_bias=given)
    assert_equal("TokenBias", other.processed_logprobs, out.processed_logprobs)


def test_from_hidden_states_too():
    g = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(4, 16, generator=g), torch.randn(VOCAB, 16, generator=g)
    options = {
        "logit_bias": [{2: 3.0}, None, {7: -torch.inf}, {}],
        "penalties": Penalties(padded(histories(1, 4)), no_repeat_ngram=2, bad_words=[[5]], dry=Dry(1.0)),
        "seeds": 3,
    }
    got, want = (
        rlkernel.sample_linear(hidden, weight, **options),
        rlkernel.sample(hidden @ weight.T, **options),
    )
    assert torch.equal(got.token_ids, want.token_ids)
    assert (got.processed_logprobs - want.processed_logprobs).abs().max() < 1e-5


WORDS_AND_BIASES = {
    "tensors": (
        torch.tensor([[-1, 4]]),
        TokenBias(torch.tensor([[1, -1]] * 4), torch.tensor([[2.0, 0.0]] * 4)),
    ),
    "lists": ([[4], [1, 2]], [{1: 2.0}, None, {}, {3: -torch.inf}]),
    "lists of each row": ([[[4]], None, [[1, 2], [3]], []], {3: 1.0}),
}


@pytest.mark.parametrize("name", WORDS_AND_BIASES)
def test_one_graph(name):
    inputs = make_inputs(4, VOCAB)
    said, (words, bias) = padded(histories(3, 4)), WORDS_AND_BIASES[name]

    def step(logits, seeds, positions):
        penalties = Penalties(said, dry=Dry(1.0, last_n=12), no_repeat_ngram=3, bad_words=words)
        options = {"seeds": seeds, "positions": positions, "logit_bias": bias}
        return rlkernel.sample(logits * 1, penalties=penalties, **options)

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**inputs)
    assert_equal("processed", compiled.processed_logprobs, step(**inputs).processed_logprobs)


SAID = torch.zeros(2, 3, dtype=torch.int64)
BAD = {
    "n-gram": (Penalties(SAID, no_repeat_ngram=-1), "no_repeat_ngram must be an integer >= 0, got -1"),
    "an empty word": (Penalties(SAID, bad_words=[[1], []]), r"must be lists of token ids, got \[\]"),
    "a negative word": (Penalties(SAID, bad_words=[[-1]]), r"must be lists of token ids, got \[-1\]"),
    "an id of no vocabulary": (Penalties(SAID, bad_words=[[12]]), r"must hold ids in \[0, 12\), got 12"),
    "words of three rows": (Penalties(SAID, bad_words=[[[1]], None, None]), "each of 2 rows, got 3 lists"),
    "words and None": (Penalties(SAID, bad_words=[[1], None]), "must be lists of token ids, got None"),
    "no words": (Penalties(SAID, bad_words=7), "bad_words must be lists of token ids, got 7"),
    "dry.breakers": (Penalties(SAID, dry=Dry(1.0, breakers="a")), "dry.breakers must be token ids, got 'a'"),
    "breakers of floats": (Penalties(SAID, dry=Dry(1.0, breakers=[1.5])), r"must be token ids, got \[1.5\]"),
    "words of floats": (Penalties(SAID, bad_words=torch.ones(1, 1)), "bad_words must be integers"),
    "dry": (Penalties(SAID, dry=0.8), "penalties.dry must be a Dry, got float"),
    "dry.multiplier": (Penalties(SAID, dry=Dry(-1.0)), "dry.multiplier must be >= 0 and finite, got -1"),
    "dry.base": (Penalties(SAID, dry=Dry(1.0, base=float("nan"))), "base must be >= 1 and finite, got nan"),
    "dry.allowed_length": (
        Penalties(SAID, dry=Dry(1.0, 2.0, torch.tensor([1, 0]))),
        r"dry.allowed_length\[1\] must be >= 1 and finite, got 0",
    ),
    "dry.last_n": (Penalties(SAID, dry=Dry(1.0, last_n=-1)), "dry.last_n must be an integer >= 0, got -1"),
    "dicts of three rows": ([{}, {}, {}], "one dict or None for each of 2 rows, got 3"),
    "a list of numbers": ([1.0, 2.0], r"logit_bias\[0\] must be a dict or None, got float"),
    "a token of no vocabulary": ([{12: 1.0}, None], r"token ids in \[0, 12\) as keys, got 12"),
    "nan": ([{1: float("nan")}, None], r"logit_bias\[0\]\[1\] must be finite or -inf, got nan"),
    "too large": ([None, {1: 1e39}], r"logit_bias\[1\]\[1\] must be finite or -inf, got 1e\+39"),
    "ids of floats": (TokenBias(torch.ones(1), 0.0), "must be an int32 or int64 tensor, got float32"),
    "ids of three rows": (
        TokenBias(torch.ones(3, 1, dtype=torch.int64), 0.0),
        r"token_ids must have shape \[K\] or \(2, K\), got \(3, 1\)",
    ),
    "values of another shape": (
        TokenBias(torch.tensor([1, 2]), torch.tensor([1.0])),
        r"values must be one value or have shape \(2,\), got \(1,\)",
    ),
    "values": (TokenBias(torch.tensor([1]), [1.0]), "values must be numbers or a tensor, got list"),
}


def test_numbers_of_numpy_and_requests_without_words():
    said, z = padded(histories(3, 5)), torch.randn(5, VOCAB, generator=torch.Generator().manual_seed(3))
    words = [[[np.int64(5)], [1, np.int64(2)]], [], None, [], []]
    plain = [[[5], [1, 2]], None, None, None, None]
    numpys = Penalties(said, no_repeat_ngram=np.int64(2), bad_words=words, dry=Dry(1.0, last_n=np.int32(9)))
    want = adjusted(z, penalties=Penalties(said, no_repeat_ngram=2, bad_words=plain, dry=Dry(1.0, last_n=9)))
    assert_equal("NumPy", adjusted(z, penalties=numpys), want)
    none = Penalties(said, bad_words=[[], [], [], [], []])
    assert_equal("no words", adjusted(z, penalties=none), adjusted(z, penalties=Penalties(said)))
    one = TokenBias(torch.tensor([1]), np.float32(-2.0))
    assert_equal("a bias", adjusted(z, logit_bias=one), adjusted(z, logit_bias={1: -2.0}))
    assert_equal("a ban", adjusted(z, logit_bias={1: -(10**400)}), adjusted(z, logit_bias={1: -torch.inf}))


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    given, message = BAD[name]
    options = {"penalties" if isinstance(given, Penalties) else "logit_bias": given}
    with pytest.raises((ValueError, TypeError), match=message):
        rlkernel.sample(torch.zeros(2, VOCAB), **options)
