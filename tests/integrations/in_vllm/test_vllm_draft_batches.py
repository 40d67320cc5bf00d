"""vLLM's rejection sampler and ours on the same batches, with and without probabilities of the drafts."""

import copy
import dataclasses
import types

import pytest
import torch
from chi_square import chi_square
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.logits_processor.builtin import MinTokensLogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

import rlkernel
from rlkernel.integrations.vllm import drafts, positions, support

VOCAB = 32
LENGTHS = [3, 0, 2, 1, 3, 3]
STOCK = RejectionSampler.forward
MODES = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@pytest.fixture(autouse=True, scope="module")
def kernels():
    current_platform.import_kernels()
    current_platform.register_triton_kernel_overrides()


def drafted(lengths, draft_token_ids):
    """vLLM's metadata of drafts: the logits of a request are those of its drafts and one row more."""
    ids = iter(draft_token_ids.tolist())
    made = SpecDecodeMetadata.make_dummy([[next(ids) for _ in range(k)] for k in lengths], "cpu")
    last = (torch.tensor(lengths) + 1).cumsum(0) - 1
    made.bonus_logits_indices = last.int()
    rows = torch.arange(sum(lengths) + len(lengths))
    made.target_logits_indices = rows[~torch.isin(rows, last)].int()
    return made


def asked(rows, **options):
    """What requests ask for that ask for nothing."""
    return dataclasses.replace(
        SamplingMetadata(
            temperature=torch.ones(rows), all_greedy=False, all_random=True, top_p=None, top_k=None,
            generators={}, max_num_logprobs=None, no_penalties=True, prompt_token_ids=None,
            frequency_penalties=torch.zeros(rows), presence_penalties=torch.zeros(rows),
            repetition_penalties=torch.ones(rows), output_token_ids=[[] for _ in range(rows)],
            allowed_token_ids_mask=None, bad_words_token_ids={}, logitsprocs=LogitsProcessors(),
        ),
        **options,
    )  # fmt: skip


def batch(seed, kind):
    """(drafts, their probabilities, logits, what is asked) of requests of which some are greedy."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(LENGTHS)
    logits = torch.randn(sum(LENGTHS) + rows, VOCAB, generator=generator) * 2
    places = drafted(LENGTHS, torch.zeros(sum(LENGTHS), dtype=torch.int32)).target_logits_indices.long()
    q = (logits[places] + 0.3 * torch.randn(len(places), VOCAB, generator=generator)).softmax(1)
    ids = torch.multinomial(q, 1, generator=generator)[:, 0].int()
    ids[-2:] = logits[places[-2:]].argmax(1).int()  # of the last request, which is greedy
    ids[3] = -1  # dropped
    metadata = drafted(LENGTHS, ids)
    said = [torch.randint(0, VOCAB, (9,), generator=generator).tolist() for _ in LENGTHS]
    each = torch.arange(rows)
    options = {
        "temperature": torch.tensor([0.3, 1.0, 2.0, 0.0, 0.7, 0.0]), "all_random": False,
        "output_token_ids": said,
        "spec_token_ids": [x.tolist() for x in metadata.draft_token_ids.split(LENGTHS)],
    }  # fmt: skip
    if kind == "filters":
        cold = options["temperature"] == 0
        options["top_k"] = torch.where(cold, VOCAB, torch.tensor([3, VOCAB, 9])[each % 3]).int()
        options["top_p"] = torch.where(cold, 1.0, torch.tensor([0.9, 0.5, 0.7])[each % 3])
    if kind == "penalties":
        options |= {
            "no_penalties": False,
            "prompt_token_ids": torch.randint(0, VOCAB + 1, (rows, 5), generator=generator),
            "frequency_penalties": torch.linspace(-1, 2, rows),
            "presence_penalties": torch.linspace(2, -2, rows),
            "repetition_penalties": torch.linspace(0.5, 2, rows),
        }
    if kind == "bans":
        allowed = torch.rand(rows, VOCAB, generator=generator) < 0.6
        options["allowed_token_ids_mask"] = ~allowed
        options["bad_words_token_ids"] = {0: [[said[0][-1], 3], [4]], 5: [[int(ids[-3]), int(ids[-2])]]}
        least = MinTokensLogitsProcessor(None, torch.device("cpu"), False)
        params = types.SimpleNamespace(min_tokens=99, all_stop_token_ids={1, 2}, structured_outputs=None)
        least.update_state(BatchUpdate(rows, [], [(4, params, [], said[4])], []))
        options["logitsprocs"] = LogitsProcessors([least])
    return metadata, q, logits, asked(rows, **options)


def answers(mode, metadata, q, logits, wanted, monkeypatch):
    """Ours; vLLM's; and what vLLM says of our tokens."""
    sampler = RejectionSampler(Sampler(mode))
    assert not drafts.unserved(sampler, metadata, q, wanted, VOCAB)
    mine = drafts.chained(sampler.sampler, metadata, q, logits, wanted)
    theirs = STOCK(sampler, metadata, q, logits.clone(), copy.deepcopy(wanted))
    with monkeypatch.context() as patched:
        patched.setattr(rejection_sampler, "rejection_sample", lambda *a, **k: mine.sampled_token_ids)
        return mine, theirs, STOCK(sampler, metadata, q, logits.clone(), copy.deepcopy(wanted))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["temperatures", "filters", "penalties", "bans"])
@pytest.mark.parametrize("given", [True, False], ids=["q", "no q"])
def test_greedy_tokens_and_definitions_are_those_of_vllm(kind, mode, given, expanded, monkeypatch):
    stood = 0
    for seed in range(4):
        torch.manual_seed(seed)
        metadata, q, logits, wanted = batch(seed, kind)
        q = q if given else None
        before, wanted = logits.clone(), dataclasses.replace(wanted, max_num_logprobs=(0, 1, 5, VOCAB)[seed])
        mine, theirs, told = answers(mode, metadata, q, logits, wanted, monkeypatch)
        assert torch.equal(logits, before)
        tokens = mine.sampled_token_ids
        assert (
            tokens.dtype == theirs.sampled_token_ids.dtype and tokens.shape == theirs.sampled_token_ids.shape
        )
        greedy = wanted.temperature == 0
        assert torch.equal(tokens[greedy], theirs.sampled_token_ids[greedy])
        assert (tokens[2, 1:] == -1).all() or tokens[2, 0] == metadata.draft_token_ids[3]
        stood += int((tokens >= 0).sum()) - len(tokens)
        there = tokens.flatten() >= 0
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks"):
            got, want = (getattr(x.logprobs_tensors, name) for x in (mine, told))
            assert got.shape == want.shape and got.dtype == want.dtype
            got, want = got[there], want[there]
            if name == "logprobs":
                assert (want[:, 0] > -torch.inf).all()  # nothing is drawn that vLLM filters out
                torch.testing.assert_close(got.clamp(min=-1e30), want.clamp(min=-1e30), rtol=0, atol=1e-4)
            elif name == "selected_token_ranks":
                assert torch.equal(got, want)
            else:
                assert torch.equal(got[:, 0], want[:, 0])
    assert stood > 2


def test_every_token_is_distributed_as_the_targets():
    rows, vocab = 10_000, 12
    torch.manual_seed(0)
    target, q = torch.randn(3, vocab) * 1.5, (torch.randn(2, vocab) * 1.5).softmax(1)
    ids = torch.stack([torch.multinomial(x, rows, replacement=True) for x in q], 1).flatten()
    options = {"temperature": torch.full((rows,), 0.8), "top_k": torch.full((rows,), 7)}
    sampler = RejectionSampler(Sampler())
    tokens = drafts.chained(
        sampler.sampler, drafted([2] * rows, ids), q.repeat(rows, 1), target.repeat(rows, 1),
        asked(rows, **options),
    ).sampled_token_ids  # fmt: skip
    scaled = target / 0.8
    p = scaled.masked_fill(scaled < scaled.topk(7).values[:, -1:], -torch.inf).softmax(1)
    for place in range(3):
        here = tokens[:, place] >= 0
        assert here.sum() > 500 and chi_square(tokens[here, place], p[place]) < 5
    assert chi_square(tokens[:, 0], q[0].where(p[0] > 0, 0) / q[0][p[0] > 0].sum()) > 5


def runner_at(places):
    """vLLM's under asynchronous scheduling, whose host takes all drafts of the step before for accepted."""
    return types.SimpleNamespace(
        seq_lens=places, optimistic_seq_lens_cpu=torch.full_like(places, 99), use_async_spec_decode=True
    )


@pytest.mark.parametrize("given", [True, False], ids=["q", "no q"])
def test_a_seeds_place_is_that_of_the_device(given, expanded, monkeypatch):
    """Through the sampler of the patch, which leaves nothing to vLLM."""
    metadata, q, logits, wanted = batch(2, "temperatures")
    rows = len(LENGTHS)
    wanted = dataclasses.replace(
        wanted, generators={row: torch.Generator().manual_seed(row) for row in range(rows)}
    )
    places, said = torch.arange(40, 40 + rows), []
    with rlkernel.patch_vllm(ops=("sampler", "rejection"), strict=True) as patch:
        for moved in (0, 0, 1):
            monkeypatch.setattr(positions, "_runner", runner_at(places + moved))
            sampler = RejectionSampler(Sampler())
            said.append(sampler(metadata, q if given else None, logits, wanted).sampled_token_ids)
    assert patch.calls[drafts.NAME] == 3 and not patch.fallbacks
    assert torch.equal(said[0], said[1]) and not torch.equal(said[0], said[2])


def test_a_seeds_tokens_depend_on_no_other_request(monkeypatch):
    """On the seed, on the place and on what was drafted, the token behind the last draft too."""
    metadata, q, logits, _ = batch(0, "temperatures")
    rows = slice(int(metadata.bonus_logits_indices[3]) + 1, int(metadata.bonus_logits_indices[4]) + 1)
    one = slice(sum(LENGTHS[:4]), sum(LENGTHS[:5]))
    alone = drafted([3], metadata.draft_token_ids[one])

    def draw(metadata, q, logits, row, seed, place):
        count = len(metadata.num_draft_tokens)
        monkeypatch.setattr(positions, "_runner", runner_at(torch.full((count,), place)))
        wanted = asked(count, generators={row: torch.Generator().manual_seed(seed)})
        out = drafts.chained(Sampler(), metadata, q, logits, wanted).sampled_token_ids
        return [x for x in out[row].tolist() if x >= 0]

    sure = torch.nn.functional.one_hot(metadata.draft_token_ids.long().clamp(min=0), VOCAB)
    said, q = set(), 0.5 * sure + 0.5 / VOCAB
    for seed in range(24):
        tokens = draw(metadata, q, logits, 4, seed, 40)
        assert draw(alone, q[one], logits[rows], 0, seed, 40) == tokens
        said |= {tuple(tokens), tuple(draw(alone, q[one], logits[rows], 0, seed, 41))}
    assert len(said) > 5 and len({len(x) for x in said}) > 1


def test_the_support_of_drafted_tokens(expanded, monkeypatch):
    metadata, q, logits, wanted = batch(1, "filters")
    step = support._Step([VOCAB] * len(LENGTHS), LENGTHS)
    monkeypatch.setattr(support, "_step", step)
    wanted = dataclasses.replace(wanted, max_num_logprobs=VOCAB)
    mine, _, told = answers("processed_logits", metadata, q, logits, wanted, monkeypatch)
    values = torch.full((len(mine.logprobs_tensors.logprobs), VOCAB), -torch.inf)
    values.scatter_(
        1, told.logprobs_tensors.logprob_token_ids[:, 1:].long(), told.logprobs_tensors.logprobs[:, 1:]
    )
    masks, width = step.masks(), mine.sampled_token_ids.shape[1]
    for row, taken in enumerate((mine.sampled_token_ids >= 0).sum(1).tolist()):
        kept = masks.slice_request(row, LENGTHS[row] + 1)
        ends = [0, len(kept.token_ids)] if kept.offsets is None else kept.offsets.tolist()
        for place in range(taken):
            got = kept.token_ids[ends[place] : ends[place + 1]].tolist()
            want = (values[row * width + place] > -torch.inf).nonzero().flatten().tolist()
            if wanted.temperature[row] == 0:
                want = [int(mine.sampled_token_ids[row, place])]
            assert got == ([] if len(want) == VOCAB else want)


def test_what_stays_with_vllm():
    metadata, q, _, wanted = batch(0, "temperatures")
    sampler = RejectionSampler(Sampler())
    assert "must be distributions" in drafts.unserved(sampler, metadata, 2 * q, wanted, VOCAB)
    assert "another vocabulary" in drafts.unserved(sampler, metadata, q, wanted, VOCAB + 1)
