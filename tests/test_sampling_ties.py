"""sampling: vLLM's ranks, which count ties, and greedy rows that have a distribution."""

import pytest
import sampling_peers as peers
import torch
from backends import is_slow, running
from bitwise import assert_equal
from sampling_cases import PAIRS, bitmask, sample

import rlkernel

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
RANKINGS = ("tempered", "raw", "processed")
FILTERS = {
    "none": {},
    "a k among ties": {"top_k": 30},
    "a nucleus that ends among ties": {"top_p": 0.55},
    "k and p": {"top_k": 100, "top_p": 0.9},
    "a threshold": {"min_p": 0.1},
    "the likeliest dropped": {"top_k": 60, "xtc_probability": 1.0, "xtc_threshold": 0.02},
}


def case(vocab, device):
    """Logits in steps, so that many tie; a mask and a bias of one token change them; row 3 is greedy."""
    g = torch.Generator().manual_seed(vocab)
    logits = (1.5 * torch.randn(6, vocab, generator=g)).round().to(device)
    allowed = (torch.rand(6, vocab, generator=g) < 0.9).to(device)
    options = {
        "token_bitmask": bitmask(allowed),
        "logit_bias": {7: 2.0},
        "temperature": torch.tensor([1.0, 0.7, 1.3, 0.0, 2.0, 1.0], device=device),
    }
    z = logits.clone()
    z[:, 7] += 2.0
    return logits, z.masked_fill(~allowed, -torch.inf), options


def kept_by(out, vocab):
    """[B, V]; a row that lists nothing keeps all."""
    kept = torch.zeros(len(out.token_ids), vocab, dtype=torch.bool, device=out.token_ids.device)
    offsets = out.support_offsets.tolist()
    for row, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        kept[row, out.support_ids[start:end].long()] = True
        kept[row] |= start == end
    return kept


def rank(z, token_ids, kept=None):
    """How many are at least as likely; of those that tie with a token that is kept, the ones that are too."""
    own = z.gather(1, token_ids[:, None])
    ties = z == own
    if kept is not None:
        ties &= kept | ~kept.gather(1, token_ids[:, None])
    return ((z > own) | ties).sum(-1)


@pytest.mark.parametrize("name", FILTERS)
@ON_EVERY_BACKEND
def test_tokens_that_tie_have_the_rank_of_the_last(backend, device, name):
    slow = is_slow(backend, device)
    for vocab in (333, 4200)[: 1 if slow else 2]:
        logits, z, options = case(vocab, device)
        asked = options | FILTERS[name] | {"return_rank": True, "return_support": vocab}
        counted = 0
        for ranking in RANKINGS[-1 if slow and name != "none" else 0 :]:
            plain = sample(backend, logits, **asked, ranking=ranking)
            out = sample(backend, logits, **asked, ranking=ranking, rank_ties="max")
            kept = kept_by(out, vocab) if ranking == "processed" else None
            base = logits if ranking == "raw" else z
            assert torch.equal(out.rank, rank(base, out.token_ids, kept))
            counted += int((out.rank - plain.rank).sum())
            for field in set(out._fields) - {"rank"}:
                if getattr(plain, field) is not None:
                    assert_equal(field, getattr(out, field), getattr(plain, field))
        assert counted > 0


@pytest.mark.parametrize("name", FILTERS)
@ON_EVERY_BACKEND
def test_the_ranks_of_given_tokens(backend, device, name):
    """The first, the last and a masked token, one that ties with the last kept one, one that was not kept."""
    vocab, slow = 333, is_slow(backend, device)
    logits, z, options = case(vocab, device)
    sample(backend, logits[:1])  # skips where the backend does not run here
    order = z.sort(dim=-1, descending=True, stable=True).indices
    places = torch.tensor([0, 29, 30, 31, 62, vocab - 1], device=device)
    asked = options | FILTERS[name] | {"return_rank": True, "return_support": vocab}
    asked |= {"rank_ties": "max", "seeds": 0, "return_logprobs": ("processed",)}
    for shift in range(1 if slow else len(places)):
        token_ids = order.gather(1, places.roll(shift)[:, None])[:, 0]
        for ranking in RANKINGS[-1 if slow and name != "none" else 0 :]:
            with running(backend):
                out = rlkernel.score_tokens(logits, token_ids, **asked, ranking=ranking)
            kept = kept_by(out, vocab) if ranking == "processed" else None
            base = logits if ranking == "raw" else z
            assert torch.equal(out.rank, rank(base, token_ids, kept)), (ranking, token_ids)


@ON_EVERY_BACKEND
def test_a_greedy_row_has_the_distribution_before_its_likeliest_token_is_taken(backend, device):
    vocab = 333
    logits, z, options = case(vocab, device)
    ids = torch.tensor([7, 0, vocab - 1, -1], device=device)
    asked = options | {
        "top_k": 20, "top_p": 0.8, "ranking": "processed", "return_rank": True, "rank_ties": "max",
        "top_logprobs": 40, "logprob_token_ids": ids, "return_support": vocab, "return_entropy": True,
    }  # fmt: skip
    out = sample(backend, logits, **asked, greedy_logprobs="softmax")
    single = sample(backend, logits, **asked)
    greedy = options["temperature"] == 0
    changed = {"processed_logprobs", "rank", "top_logprobs", "id_logprobs"}
    for name, got, want in zip(out._fields, out, single, strict=True):
        every = name not in changed
        assert_equal(name, got if every else got[~greedy], want if every else want[~greedy])
    assert_equal("processed", out.processed_logprobs[greedy], out.tempered_logprobs[greedy])
    assert torch.equal(out.rank[greedy], rank(z[greedy], out.token_ids[greedy])) and out.rank[greedy] > 1
    assert single.rank[greedy].tolist() == [1]
    want = z[greedy].double().log_softmax(-1)
    order = z[greedy].sort(dim=-1, descending=True, stable=True).indices
    close = torch.testing.assert_close
    close(out.top_logprobs[greedy].double(), want.gather(1, order[:, :40]), rtol=0, atol=5e-6)
    given = want.gather(1, ids[None].clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    close(out.id_logprobs[greedy].double(), given, rtol=0, atol=5e-6)
    with running(backend):
        scored = rlkernel.score_tokens(
            logits, out.token_ids, **asked, greedy_logprobs="softmax", return_logprobs=("processed",)
        )
        other = rlkernel.score_tokens(
            logits, order[0, 3].expand(len(logits)), **options, greedy_logprobs="softmax"
        )
    for name in ("processed_logprobs", "rank", "kept_mass", "kept_count", "id_logprobs"):
        assert_equal(name, getattr(scored, name), getattr(out, name))
    assert_equal("other", other.processed_logprobs[greedy], other.tempered_logprobs[greedy])


@ON_EVERY_BACKEND
def test_all_rows_greedy(backend, device):
    """One temperature for all: no row can be filtered."""
    logits, _, _ = case(333, device)
    out = sample(
        backend,
        logits,
        temperature=0.0,
        greedy_logprobs="softmax",
        return_rank=True,
        rank_ties="max",
        top_k=3,
    )
    assert torch.equal(out.rank, rank(logits, out.token_ids))
    assert_equal("processed", out.processed_logprobs, out.tempered_logprobs)


@ON_EVERY_BACKEND
def test_with_typical_p_too(backend, device):
    """A band drops the likeliest of a sampled row and none of a greedy one."""
    logits, z, options = case(333, device)
    asked = options | {"typical_p": 0.3, "ranking": "processed", "top_logprobs": 5}
    out = sample(backend, logits, **asked, greedy_logprobs="softmax")
    greedy = options["temperature"] == 0
    want = z[greedy].double().log_softmax(-1).topk(5).values
    torch.testing.assert_close(out.top_logprobs[greedy].double(), want, rtol=0, atol=5e-6)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@ON_EVERY_BACKEND
def test_vllms_ranks(backend, device, mode):
    """Of vLLM's own sampler, on logits of which many tie."""
    logits = (2 * torch.randn(6, 200, generator=torch.Generator().manual_seed(3))).round()
    sample(backend, logits[:1].to(device))  # skips where the backend does not run here
    for greedy in (False, True):
        theirs = peers.vllm_sampler(mode, logits, None if greedy else 0.8, num_logprobs=1)
        token_ids, table = theirs.sampled_token_ids[:, 0].long(), theirs.logprobs_tensors
        with running(backend):
            out = rlkernel.score_tokens(
                logits.to(device), token_ids.to(device), temperature=0.0 if greedy else 0.8, return_rank=True,
                rank_ties="max", greedy_logprobs="softmax", ranking=mode.removesuffix("_logprobs"),
            )  # fmt: skip
        assert torch.equal(out.rank.cpu(), table.selected_token_ranks) and out.rank.max() > 1
        torch.testing.assert_close(getattr(out, mode).cpu(), table.logprobs[:, 0], rtol=0, atol=5e-6)


def test_from_hidden_states_too():
    g = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(4, 16, generator=g), torch.randn(40, 16, generator=g).repeat(3, 1)
    asked = {"seeds": 3, "temperature": torch.tensor([0.0, 1.0, 0.5, 0.0]), "return_rank": True, "top_p": 0.9}
    asked |= {"rank_ties": "max", "greedy_logprobs": "softmax", "ranking": "processed"}
    got, want = rlkernel.sample_linear(hidden, weight, **asked), rlkernel.sample(hidden @ weight.T, **asked)
    assert torch.equal(got.rank, want.rank) and want.rank[0] == 3
    torch.testing.assert_close(got.processed_logprobs, want.processed_logprobs)


BAD = {
    "rank_ties": ({"rank_ties": "min"}, "rank_ties must be .*first.*max.*, got 'min'"),
    "kernels' own": ({"rank_ties": "kept"}, "rank_ties must be .*first.*max.*, got 'kept'"),
    "greedy_logprobs": (
        {"greedy_logprobs": "vllm"},
        "greedy_logprobs must be .*argmax.*softmax.*, got 'vllm'",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        rlkernel.sample(torch.zeros(2, 9), **options)
    with pytest.raises(ValueError, match=message):
        rlkernel.score_tokens(torch.zeros(2, 9), torch.tensor([1, 2]), **options)
