"""verify_chain: a speculative rollout is the plain one, token by token; lengths, edges, what is returned."""

import pytest
import torch
from backends import is_slow, running
from bitwise import assert_equal
from test_no_sync import _NoReads
from verify_chain_cases import ON_EVERY_BACKEND, ON_FAST_BACKENDS, B, K, V, able, case, logits_of, verify

import rlkernel
from rlkernel.runtime import debug

pytestmark = pytest.mark.usefixtures("poison")


def model(said):
    """Logits [V] after the tokens ``said``."""
    return logits_of(V, seed=sum((i + 1) * t for i, t in enumerate(said[-3:])) % 10007, scale=2.0)


SETTINGS = {
    "plain": lambda: {"temperature": torch.tensor([0.7, 0.0, 1.0, 1.3])},
    "filtered": lambda: {"top_k": torch.tensor([20, 0, 5, 50]), "top_p": 0.9, "method": "gumbel"},
    "thresholds": lambda: {
        "epsilon_cutoff": torch.tensor([0.01, 0.0, 0.02, 0.0]),
        "top_a": 0.1,
        "top_p": 0.9,
        "filter_order": "top_k_first",
    },
    "band": lambda: {"typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05, "top_k": 40},
    "penalties": lambda: {"penalties": True, "logit_bias": {7: 1.0}, "min_p": 0.01},
}


def options_of(setting, said, device):
    options = {k: x.to(device) if isinstance(x, torch.Tensor) else x for k, x in SETTINGS[setting]().items()}
    if options.pop("penalties", False):
        length = max(map(len, said))
        ids = torch.tensor([row + [-1] * (length - len(row)) for row in said], device=device)
        numbers = {"repetition": 1.3, "frequency": 0.4, "presence": 0.2}
        of_history = {"no_repeat_ngram": 3, "dry": rlkernel.Dry(1.0, allowed_length=1)}
        options["penalties"] = rlkernel.Penalties(ids, **numbers, **of_history)
    return options


@pytest.mark.parametrize("setting", SETTINGS)
@ON_FAST_BACKENDS
def test_a_speculative_rollout_has_the_tokens_of_a_plain_one(backend, device, setting):
    able(backend, device)
    seeds, count = torch.arange(B, device=device) * 1000 + 5, 6
    plain = [[1, 2, b] for b in range(B)]
    for step in range(count):
        logits = torch.stack([model(said) for said in plain]).to(device)
        with running(backend):
            out = rlkernel.sample(logits, seeds=seeds, positions=step, **options_of(setting, plain, device))
        for said, token in zip(plain, out.token_ids.tolist(), strict=True):
            said.append(token)

    said = [[1, 2, b] for b in range(B)]
    accepted, rounds = 0, 0
    while min(map(len, said)) < count + 3:
        drafts = torch.full((B, K), -1)
        for b in range(B):  # row b drafts right, but for its token b of every round; nothing beyond the end
            right = plain[b][len(said[b]) : len(said[b]) + K]
            drafts[b, : len(right)] = torch.tensor(right)
            if b < len(right):
                drafts[b, b] = (drafts[b, b] + 1) % V
        tokens = [[*said[b], *drafts[b].clamp(min=0).tolist()] for b in range(B)]
        logits = torch.stack(
            [torch.stack([model(tokens[b][: len(said[b]) + j]) for j in range(K + 1)]) for b in range(B)]
        ).to(device)
        positions = torch.tensor([len(row) - 3 for row in said], device=device)
        out = verify(
            backend, drafts.to(device), logits, seeds=seeds, positions=positions,
            **options_of(setting, said, device),
        )  # fmt: skip
        for b in range(B):
            said[b] += out.token_ids[b][out.valid[b]].tolist()
            assert out.valid[b].sum() == out.accepted[b] + 1
        accepted, rounds = accepted + int(out.accepted.sum()), rounds + 1
    for b in range(B):
        assert said[b][: count + 3] == plain[b]
    assert accepted > rounds  # it was speculative


@ON_EVERY_BACKEND
def test_what_is_returned_is_what_score_tokens_says(backend, device):
    able(backend, device)
    logits = logits_of(B, K + 1, V, seed=3).to(device)
    q = (logits[:, :K] * 0.6).log_softmax(-1)
    t = torch.tensor([0.8, 0.0, 1.0, 1.2], device=device)
    seeds = torch.arange(B, device=device)
    wide = {"temperature": t[:, None].expand(B, K + 1), "top_k": 30}
    with running(backend):
        drafts = rlkernel.sample(q, seeds=seeds[:, None].expand(B, K)).token_ids
        drafts[1] = logits[1, :K].argmax(-1)
    for draft_logprobs in (None, q):
        out = verify(
            backend, drafts, logits, draft_logprobs=draft_logprobs, seeds=seeds, temperature=t, top_k=30
        )
        with running(backend):
            want = rlkernel.score_tokens(logits, out.token_ids.clamp(min=0), **wide)
        for name in ("raw_logprobs", "tempered_logprobs", "processed_logprobs"):
            expected = torch.where(out.valid, getattr(want, name), 0)
            if (backend, device) == ("reference", "cuda"):  # torch reduces by the number of rows there
                torch.testing.assert_close(getattr(out, name), expected)
            else:
                assert_equal(name, getattr(out, name), expected)
        assert (out.token_ids[~out.valid] == -1).all()
        assert torch.equal(out.valid.sum(-1), out.accepted + 1)
        assert out.accepted[1] == K and out.processed_logprobs[1].eq(0).all()  # a greedy row


@pytest.mark.parametrize("rejection", [False, True])
@ON_FAST_BACKENDS
def test_a_row_does_not_depend_on_the_others(backend, device, rejection):
    able(backend, device)
    drafts, logits, q, seeds = (x.to(device) for x in case(12))
    lengths = torch.tensor(2 * [3, 2, 0, 3, 1, 3], device=device)
    positions = torch.arange(12, device=device)
    order = torch.tensor([4, 0, 5, 2], device=device)

    def run(rows):
        draft_logprobs = q[rows] if rejection else None
        return verify(
            backend, drafts[rows], logits[rows], draft_logprobs=draft_logprobs, draft_lengths=lengths[rows],
            seeds=seeds[rows], positions=positions[rows], top_p=0.9,
        )  # fmt: skip

    whole = run(slice(None))
    assert (whole.accepted <= lengths).all() and (whole.accepted < lengths).any()
    for rows in (order, slice(2, 3)):
        for name, a, b in zip(whole._fields, run(rows), whole, strict=True):
            assert_equal(name, a, b[rows])


def test_lengths_and_padding_are_the_same():
    drafts, logits, q, seeds = case()
    lengths = torch.tensor([0, 1, 2, 3])
    for padding in (-1, V, V + 7, -(2**40)):
        padded = torch.where(torch.arange(K) < lengths[:, None], drafts, padding)
        one = rlkernel.verify_chain(drafts, logits, draft_lengths=lengths.to(torch.int32), seeds=seeds)
        other = rlkernel.verify_chain(padded, logits, seeds=seeds)
        for name, a, b in zip(one._fields, one, other, strict=True):
            assert_equal(name, a, b)
        plain = rlkernel.sample(logits[:, 0], seeds=seeds)
        assert one.token_ids[0, 0] == plain.token_ids[0]  # nothing drafted: a plain draw


@pytest.mark.parametrize("outside", [-1, V, 2**40])
@ON_FAST_BACKENDS
def test_a_draft_outside_the_vocabulary_is_rejected(backend, device, outside):
    """With a q that is p it is the only one, and its place is drawn from what q leaves of p."""
    able(backend, device)
    drafts, logits, _, seeds = (x.to(device) for x in case(40))
    q = logits[:, :K].log_softmax(-1)
    ended = torch.full((40, K, V), -torch.inf, device=device).index_fill(-1, drafts[0, :1], 0.0)
    drafts[:, 1] = outside
    for rows in (q, torch.where(torch.arange(K, device=device)[:, None] == 1, ended, q)):
        out = verify(backend, drafts, logits, draft_logprobs=rows, seeds=seeds)
        assert (out.accepted <= 1).all() and out.valid.sum(-1).sub(out.accepted).eq(1).all()
        assert (out.accepted == 1).float().mean() > 0.9
        second = out.token_ids[out.accepted == 1, 1]
        assert ((second >= 0) & (second < V)).all()
    assert (second != drafts[0, 0]).all()  # all of q was there


@pytest.mark.parametrize("rejection", [False, True])
@ON_EVERY_BACKEND
def test_a_greedy_row_rejects_a_draft(backend, device, rejection):
    """At T = 0 the likeliest token stands in the place of the draft, whatever q and the words say."""
    able(backend, device)
    rows = 3 if is_slow(backend, device) else 40
    logits = logits_of(rows, K + 1, V, seed=7).to(device)
    best = logits.argmax(-1)
    drafts = best[:, :K].clone()
    wrong = torch.arange(rows, device=device) % K
    row = torch.arange(rows, device=device)
    drafts[row, wrong] = (drafts[row, wrong] + 1) % V
    q = (logits[:, :K] + 2 * logits_of(rows, K, V, seed=8).to(device)).log_softmax(-1)
    given = q if rejection else None
    out = verify(backend, drafts, logits, draft_logprobs=given, seeds=row, temperature=0.0, top_k=5)
    assert torch.equal(out.accepted, wrong)
    inside = torch.arange(K + 1, device=device) <= wrong[:, None]
    assert torch.equal(out.token_ids, torch.where(inside, best, -1))
    assert torch.equal(out.valid, inside) and (out.processed_logprobs == 0).all()


def test_ragged_lengths_end_a_row():
    """Behind its last draft a row is drawn from p, not from what the q of an unused place leaves."""
    rows = 300
    logits = logits_of(1, K + 1, V, seed=3).expand(rows, K + 1, V).contiguous()
    q = logits[:, :K].log_softmax(-1)
    seeds, lengths = torch.arange(rows), torch.arange(rows) % (K + 1)
    drafts = rlkernel.sample(q, seeds=seeds[:, None].expand(rows, K) + 10**6).token_ids
    likely = logits[0].argmax(-1)
    unused = torch.arange(K) >= lengths[:, None]
    sure = torch.full((V,), -torch.inf).index_fill(0, likely[:1], 0.0)
    other = torch.where(unused[..., None], sure, q)
    one = rlkernel.verify_chain(drafts, logits, draft_logprobs=q, draft_lengths=lengths, seeds=seeds)
    assert torch.equal(one.accepted, lengths)  # p is q
    drafts = torch.where(unused, likely[0], drafts)
    other = rlkernel.verify_chain(drafts, logits, draft_logprobs=other, draft_lengths=lengths, seeds=seeds)
    for name, a, b in zip(one._fields, one, other, strict=True):
        assert_equal(name, a, b)


def test_a_place_without_a_distribution_ends_its_row():
    drafts, logits, q, seeds = case()
    logits[0, 0, 3], logits[1, 1], logits[2, K, 0] = torch.nan, -torch.inf, torch.inf
    sure = torch.zeros_like(q).scatter(-1, drafts[..., None], 60.0).log_softmax(-1)
    easy = torch.where(
        logits.isfinite().all(-1, keepdim=True), torch.nn.functional.pad(sure, (0, 0, 0, 1)), logits
    )
    for draft_logprobs in (None, sure):
        out = rlkernel.verify_chain(drafts, easy, draft_logprobs=draft_logprobs, seeds=seeds)
        assert out.accepted.tolist() == [0, 1, K, K]
        assert out.valid.sum(-1).tolist() == [0, 1, K, K + 1]
        assert (out.token_ids[~out.valid] == -1).all() and (out.raw_logprobs[~out.valid] == 0).all()


def test_no_drafts_and_no_rows():
    _, logits, q, seeds = case()
    none = torch.empty(B, 0, dtype=torch.int64)
    plain = rlkernel.sample(logits[:, :1], seeds=seeds[:, None])
    for draft_logprobs in (None, q[:, :0]):
        out = rlkernel.verify_chain(none, logits[:, :1], draft_logprobs=draft_logprobs, seeds=seeds)
        if draft_logprobs is None:
            assert_equal("token_ids", out.token_ids, plain.token_ids)
        else:  # a drafter may have dropped what it drew with the words of the plain draw
            assert (out.token_ids != plain.token_ids).any()
        q0 = None if draft_logprobs is None else draft_logprobs[:0]
        out = rlkernel.verify_chain(none[:0], logits[:0, :1], draft_logprobs=q0)
        assert out.token_ids.shape == (0, 1) and out.accepted.shape == (0,)


@pytest.mark.parametrize("rejection", [False, True])
def test_no_value_is_read_on_the_host(rejection, monkeypatch):
    drafts, logits, q, seeds = case()
    monkeypatch.setattr(debug, "may_read", lambda tensor: False)
    with _NoReads():
        rlkernel.verify_chain(drafts, logits, draft_logprobs=q if rejection else None, seeds=seeds, top_p=0.9)


@pytest.mark.parametrize("rejection", [False, True])
def test_it_compiles_in_one_graph(rejection):
    drafts, logits, q, seeds = case()
    options = {"draft_logprobs": q if rejection else None, "seeds": seeds, "top_p": 0.9}
    compiled = torch.compile(rlkernel.verify_chain, fullgraph=True, backend="aot_eager")
    want = rlkernel.verify_chain(drafts, logits, **options)
    for name, a, b in zip(want._fields, compiled(drafts, logits, **options), want, strict=True):
        assert_equal(name, a, b)


def test_positions_of_64_bits_without_a_sign():
    drafts, logits, _, seeds = case()
    large = torch.tensor([-1, 5, -(2**63), 7])
    want = rlkernel.verify_chain(drafts, logits, seeds=seeds, positions=large).token_ids
    got = rlkernel.verify_chain(drafts, logits, seeds=seeds, positions=large.view(torch.uint64)).token_ids
    assert torch.equal(got, want)
    with pytest.raises(TypeError, match="penalties.dry must be a Dry, got dict"):
        said = torch.zeros(4, 1, dtype=torch.int64)
        rlkernel.verify_chain(drafts, logits, penalties=rlkernel.Penalties(said, dry={"multiplier": 1.0}))


def test_seeds_are_torchs_where_none_are_given():
    drafts, logits, q, _ = case(64)
    torch.manual_seed(3)
    first = rlkernel.verify_chain(drafts, logits, draft_logprobs=q)
    again = rlkernel.verify_chain(drafts, logits, draft_logprobs=q)
    torch.manual_seed(3)
    repeated = rlkernel.verify_chain(drafts, logits, draft_logprobs=q)
    assert torch.equal(first.token_ids, repeated.token_ids) and not torch.equal(
        first.token_ids, again.token_ids
    )
