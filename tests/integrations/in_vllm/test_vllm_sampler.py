"""vLLM's sampler and ours on the same batches: all that vLLM's definitions leave no choice in is the same."""

import contextlib
import copy
import dataclasses
import itertools
from contextlib import contextmanager

import engines
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.sampler import Sampler

import rlkernel
from rlkernel.consistency.bits import differ
from rlkernel.integrations.vllm import plain
from rlkernel.integrations.vllm import sampler as ours
from rlkernel.native import sampling as native

MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
WHOLE = -1e30  # in the place of -inf, which no difference is taken of


def stock(sampler, logits, metadata, mode):
    """What vLLM's own sampler answers where the engine's ``logprobs_mode`` is ``mode``."""
    places = (sampler, sampler.topk_topp_sampler)
    before = [place.logprobs_mode for place in places]
    for place in places:
        place.logprobs_mode = mode
    try:
        return Sampler.forward(sampler, logits.clone(), frozen(metadata))
    finally:
        for place, value in zip(places, before, strict=True):
            place.logprobs_mode = value


@contextmanager
def watching(seen):
    """Hands ``seen`` what each batch asks of vLLM's sampler, which then does it."""
    original = Sampler.forward

    def forward(self, logits, sampling_metadata, *arguments):
        seen(self, logits.clone(), frozen(sampling_metadata))
        return original(self, logits, sampling_metadata, *arguments)

    Sampler.forward = forward
    try:
        yield
    finally:
        Sampler.forward = original


@pytest.fixture(scope="module")
def batches(llm):
    """(sampler, logits, metadata) of every batch of 48 requests of all kinds."""
    seen = []
    with watching(lambda *call: seen.append(call)):
        llm.generate(engines.prompts(48), engines.mixed(48), use_tqdm=False)
    assert len(seen) > 15
    return seen


def frozen(metadata):
    """With tensors and lists of its own: the batch changes under it."""
    values = {}
    for field in dataclasses.fields(metadata):
        value = getattr(metadata, field.name)
        values[field.name] = value if field.name == "thinking_budget_state_holder" else copy.deepcopy(value)
    return dataclasses.replace(metadata, **values)


def dense(out, vocab):
    """[n, V] of the ids and values of LogprobsTensors, the token's own among them; NaN: not among them."""
    ids, values = out.logprobs_tensors.logprob_token_ids.long(), out.logprobs_tensors.logprobs
    made = torch.full((ids.shape[0], vocab), torch.nan).scatter_(1, ids, values)
    # where one row has a top_p, vLLM drops of every row what has a probability of 0 in fp32
    return made.masked_fill(made - made.amax(-1, keepdim=True) < -80, -torch.inf)


@pytest.mark.parametrize("mode", MODES)
def test_whole_distributions_ranks_and_greedy_tokens_are_those_of_vllm(batches, mode):
    rows = greedy = filtered = 0
    for sampler, logits, metadata in batches:
        whole = dataclasses.replace(metadata, max_num_logprobs=engines.VOCAB)
        theirs = stock(sampler, logits, whole, mode)
        before = logits.clone()
        mine = ours.sampled(sampler, logits, whole, mode)
        assert torch.equal(before, logits)  # a raw log-probability may be asked for later
        want, got = dense(theirs, engines.VOCAB), dense(mine, engines.VOCAB)
        assert torch.equal(want == -torch.inf, got == -torch.inf)
        torch.testing.assert_close(
            got.clamp(min=WHOLE), want.clamp(min=WHOLE), rtol=0, atol=2e-5 if "logprobs" in mode else 1e-4
        )
        mode_rows = mine.sampled_token_ids.long()
        t = metadata.temperature
        is_greedy = torch.ones(len(logits), dtype=torch.bool) if t is None else t < 1e-5
        assert torch.equal(mine.sampled_token_ids[is_greedy], theirs.sampled_token_ids[is_greedy])
        # of the distribution that our token was drawn from, vLLM's definition of its rank
        own = want.gather(1, mode_rows)
        assert (own > -torch.inf).all()  # nothing is drawn that vLLM filters out
        assert torch.equal(mine.logprobs_tensors.selected_token_ranks, (want >= own).sum(-1))
        rows, greedy = rows + len(logits), greedy + int(is_greedy.sum())
        filtered += int((want == -torch.inf).any(-1).sum())
    assert rows > greedy > 20 and (filtered > 20 or mode.startswith("raw"))


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
def test_fewer_kept_tokens_than_are_asked_for(batches, mode):
    """Of three allowed tokens, token 0 among them, all have their values; what fills up is named once."""
    allowed = [0, 17, engines.VOCAB - 1]
    sampler, logits, metadata = max(batches, key=lambda batch: len(batch[1]))
    mask = torch.ones(len(logits), engines.VOCAB, dtype=torch.bool)
    mask[:, allowed] = False
    for asked in (1, 3, 5, engines.VOCAB):
        few = dataclasses.replace(
            frozen(metadata), max_num_logprobs=asked, allowed_token_ids_mask=mask, bad_words_token_ids={},
            top_p=None, top_k=None,
        )  # fmt: skip
        theirs, mine = stock(sampler, logits, few, mode), ours.sampled(sampler, logits, few, mode)
        ids = mine.logprobs_tensors.logprob_token_ids
        assert ids.shape == theirs.logprobs_tensors.logprob_token_ids.shape
        assert all(len(set(row)) == len(row) for row in ids[:, 1:].tolist()) and (ids >= 0).all()
        if asked == 1:  # our token is drawn, and may be another one
            continue
        # min_p leaves some of them out, and which others vLLM names then is torch.topk's choice
        want, got = (
            dense(out, engines.VOCAB)[:, allowed].nan_to_num(nan=-torch.inf) for out in (theirs, mine)
        )
        assert (want[:, 0] > -torch.inf).any()
        torch.testing.assert_close(got.clamp(min=WHOLE), want.clamp(min=WHOLE), rtol=0, atol=1e-4)


@pytest.mark.parametrize("by", ["allowed tokens", "bad words"])
@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits"])
def test_raw_values_of_a_row_whose_tokens_are_all_banned(batches, mode, by):
    """They are of the model's own logits, which no ban touches; the token is 0, as vLLM's greedy one."""
    sampler, logits, metadata = max(batches, key=lambda batch: len(batch[1]))
    banned, mask, words = [0, 2], None, {}
    if by == "allowed tokens":
        mask = torch.zeros(len(logits), engines.VOCAB, dtype=torch.bool)
        mask[banned] = True
    else:
        words = {row: [[token] for token in range(engines.VOCAB)] for row in banned}
    for asked in ({"max_num_logprobs": 5}, {"max_num_logprobs": None, "logprob_token_ids": {0: [3], 2: [7]}}):
        none = dataclasses.replace(
            frozen(metadata), allowed_token_ids_mask=mask, bad_words_token_ids=words, temperature=None,
            all_greedy=True, all_random=False, logitsprocs=LogitsProcessors(), no_penalties=True, **asked,
        )  # fmt: skip
        theirs, mine = stock(sampler, logits, none, mode), ours.sampled(sampler, logits, none, mode)
        assert torch.equal(mine.sampled_token_ids, theirs.sampled_token_ids)
        assert not mine.sampled_token_ids[banned].any()
        for name in ("logprob_token_ids", "selected_token_ranks"):
            got, want = (getattr(out.logprobs_tensors, name)[banned] for out in (mine, theirs))
            assert torch.equal(got, want)
        got, want = mine.logprobs_tensors.logprobs, theirs.logprobs_tensors.logprobs
        assert got[banned, :2].isfinite().all()
        torch.testing.assert_close(got.clamp(min=WHOLE), want.clamp(min=WHOLE), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_token_that_ties_has_vllms_rank(batches, mode):
    ties = 0
    for sampler, logits, metadata in batches[::4]:
        # neither top_k nor top_p, which keep other sets of tokens that tie
        few = dataclasses.replace(
            frozen(metadata),
            max_num_logprobs=engines.VOCAB,
            temperature=None,
            all_greedy=True,
            all_random=False,
            top_k=None,
            top_p=None,
        )
        coarse = (logits * 2).round() / 2
        want = dense(stock(sampler, coarse, few, mode), engines.VOCAB)
        mine = ours.sampled(sampler, coarse, few, mode)
        own = want.gather(1, mine.sampled_token_ids.long())
        assert torch.equal(mine.logprobs_tensors.selected_token_ranks, (want >= own).sum(-1))
        ties += int((want == own).sum()) - len(logits)
    assert ties > 10


class Masks(TorchDispatchMode):
    """Notes what makes a bool of each logit, as a comparison of a row with its token's does."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.seen = shape, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool and out.shape == self.shape:
            self.seen.append(str(function))
        return out


@pytest.mark.parametrize("mode", MODES)
def test_ranks_and_logprobs_come_with_the_draw(batches, mode, monkeypatch):
    passes, forward = [], native.forward
    monkeypatch.setattr(native, "forward", lambda call: passes.append(call) or forward(call))
    for sampler, logits, metadata in batches[::6]:
        plain = dataclasses.replace(
            metadata, max_num_logprobs=0, no_penalties=True, allowed_token_ids_mask=None,
            bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
        )  # fmt: skip
        passes.clear()
        with Masks(logits.shape) as masks:
            out = ours.sampled(sampler, logits, plain, mode)
            assert not masks.seen and len(passes) == 1
            assert (out.logprobs_tensors.selected_token_ranks >= 1).all()
            assert (logits >= 0).any() and masks.seen  # it can see one


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_the_likeliest_come_in_vllms_shapes_and_order(batches, mode, count):
    for sampler, logits, metadata in batches[::4]:
        few = dataclasses.replace(metadata, max_num_logprobs=count)
        theirs = stock(sampler, logits, few, mode)
        mine = ours.sampled(sampler, logits, few, mode)
        assert mine.sampled_token_ids.dtype == theirs.sampled_token_ids.dtype
        for one, other in zip(mine.logprobs_tensors[:3], theirs.logprobs_tensors[:3], strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype
        values, want = mine.logprobs_tensors.logprobs[:, 1:], theirs.logprobs_tensors.logprobs[:, 1:]
        torch.testing.assert_close(values.clamp(min=WHOLE), want.clamp(min=WHOLE), rtol=0, atol=1e-4)
        there = want > -torch.inf  # which of those that are left out vLLM lists, its sort decides
        mine_ids, ids = (x.logprobs_tensors.logprob_token_ids[:, 1:] for x in (mine, theirs))
        assert torch.equal(mine_ids[there], ids[there])


@pytest.mark.parametrize("mode", MODES)
def test_given_tokens(batches, mode):
    for sampler, logits, metadata in batches[::6]:
        given = {0: [3, 5, 11]} | {row: [row] for row in range(2, len(logits))}
        asked = dataclasses.replace(metadata, max_num_logprobs=None, logprob_token_ids=given)
        theirs = stock(sampler, logits, asked, mode)
        mine = ours.sampled(sampler, logits, asked, mode)
        got, want = mine.logprobs_tensors.logprobs[:, 1:], theirs.logprobs_tensors.logprobs[:, 1:]
        torch.testing.assert_close(got.clamp(min=WHOLE), want.clamp(min=WHOLE), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_k": 5},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.3, "min_p": 0.2, "repetition_penalty": 1.2},
    ],
    ids=lambda options: ",".join(options),
)
def test_tokens_are_drawn_from_vllms_distribution(llm, options):
    """Chi-square of 20000 draws of one batch, of which vLLM's own sampler says the distribution."""
    from vllm import SamplingParams

    captured, size = [], 20000
    with watching(lambda *call: captured.append(call)):
        llm.generate(engines.prompts(1, seed=5), SamplingParams(max_tokens=1, **options), use_tqdm=False)
    ((sampler, logits, metadata),) = captured

    def rows(value):
        per_row = isinstance(value, torch.Tensor) and value.shape[:1] == (1,)
        return value.repeat(size, *[1] * (value.dim() - 1)) if per_row else value

    wide = frozen(metadata)
    wide = dataclasses.replace(
        wide, **{f.name: rows(getattr(wide, f.name)) for f in dataclasses.fields(wide)}
    )
    wide.output_token_ids[:] *= size
    for processor in wide.logitsprocs.argmax_invariant:
        if processor.min_p_count:
            processor.min_p_device = processor.min_p_device[:1].repeat(size)
    drawn = ours.sampled(sampler, logits.repeat(size, 1), wide, "raw_logprobs").sampled_token_ids[:, 0]
    drawn = torch.bincount(drawn, minlength=engines.VOCAB)
    whole = dataclasses.replace(frozen(metadata), max_num_logprobs=engines.VOCAB)
    p = dense(stock(sampler, logits, whole, "processed_logprobs"), engines.VOCAB)[0].exp()
    common = p * size >= 5
    expected = torch.cat((p[common], p[~common].sum()[None])) * size
    observed = torch.cat((drawn[common], drawn[~common].sum()[None]))
    assert (drawn[p == 0] == 0).all()
    used = expected > 0
    statistic = ((observed - expected)[used] ** 2 / expected[used]).sum().item()
    freedom = int(used.sum()) - 1
    assert freedom >= 3
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5  # five standard deviations


def test_what_cannot_be_served_goes_to_vllm_and_is_counted(llm, patch, batches):
    sampler, logits, metadata = batches[0]
    asked = dataclasses.replace(metadata, max_num_logprobs=-1)
    with pytest.warns(UserWarning, match="the whole distribution is asked for, as a tensor"):
        out = sampler(logits.clone(), asked)
    assert out.logprobs_tensors.logprobs.shape == logits.shape
    assert patch.stats()[0]["fallbacks"] == {
        "Sampler.forward: the whole distribution is asked for, as a tensor": 1
    }


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_short_way_of_plain_batches_has_the_bits_of_the_long_one(batches, monkeypatch, dtype, invariant):
    sampler, logits, metadata = max(batches, key=lambda batch: len(batch[1]))
    n, taken, short = len(logits), [], plain.sampled
    monkeypatch.setattr(plain, "sampled", lambda *x: taken.append(short(*x)) or taken[-1])
    odd = logits.clone()
    odd[0, 5:], odd[1], odd[2, 3] = -torch.inf, -torch.inf, torch.nan  # few tokens, none, and no distribution
    ties = (logits * 2).round() / 2
    wide = logits.repeat(1, 10)[:, 3:5000]  # of two parts, with each number several times
    plainly = dataclasses.replace(
        frozen(metadata), top_k=None, top_p=None, no_penalties=True, allowed_token_ids_mask=None,
        bad_words_token_ids={}, logitsprocs=LogitsProcessors(metadata.logitsprocs.all), generators={},
        all_greedy=False, all_random=False,
    )  # fmt: skip
    for processor in plainly.logitsprocs.all:
        for name in ("biases", "min_toks"):
            if hasattr(processor, name):
                setattr(processor, name, {})
        processor.min_p_count = 0
    some = torch.linspace(0.3, 3, n)
    some[::3] = 0
    seeded = {row: torch.Generator().manual_seed(row) for row in range(0, n, 2)}
    monkeypatch.setattr(ours.positions, "positions", lambda n, device: torch.arange(n))
    cases = [
        {"temperature": t, "generators": g, "max_num_logprobs": top, "all_greedy": t is None}
        for t in (torch.ones(n), some, None)
        for g in ({}, seeded)
        for top in (0, 1)
    ]
    mode = rlkernel.batch_invariant(strict=False) if invariant else contextlib.nullcontext()
    with mode:
        for case, z in itertools.product(cases, (logits, odd, ties, wide)):
            asked = dataclasses.replace(plainly, **case)
            with monkeypatch.context() as change:
                change.setattr(plain, "takes", lambda *x: False)
                torch.manual_seed(3)
                want = ours.sampled(sampler, z.to(dtype), asked, "raw_logprobs")
            torch.manual_seed(3)
            got = ours.sampled(sampler, z.to(dtype), asked, "raw_logprobs")
            assert got is taken.pop()
            assert torch.equal(got.sampled_token_ids, want.sampled_token_ids)
            for mine, theirs in zip(got.logprobs_tensors[:3], want.logprobs_tensors[:3], strict=True):
                assert mine.dtype == theirs.dtype and not differ(mine, theirs).any()
