"""verify_chain: a speculative rollout is the plain one, token by token or in distribution."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from backends import is_slow, needs_interpreter, of, running, skip_unless_able
from bitwise import assert_equal
from sampling_cases import bitmask
from test_no_sync import _NoReads

import rlkernel
from rlkernel.calls.sampling import Domain
from rlkernel.ops.sampling import verify_chain as _verify_chain
from rlkernel.reference import sampling_stream as stream
from rlkernel.runtime import debug

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("sampling"))
# It is made of `sample`, whose own tests run everywhere: a rollout on what is slow would show nothing new.
ON_FAST_BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("sampling") if not is_slow(*pair.values)]
)
pytestmark = pytest.mark.usefixtures("poison")
B, K, V = 4, 3, 150


def verify(backend, *arguments, **options):
    with running(backend):
        return rlkernel.verify_chain(*arguments, **options)


def logits_of(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def able(backend, device):
    skip_unless_able(backend, "sampling", torch.zeros(2, V, device=device))


# -- without draft_logprobs: the tokens of a plain rollout


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


# -- with draft_logprobs: Leviathan's rejection


def test_flashinfers_documented_example():
    """The docstring of ``chain_speculative_sampling``: the first draft stays, the second cannot."""
    q = torch.tensor([[[0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.4, 0.1]]]).log()
    p = torch.tensor([[[0.0, 0.1, 0.6, 0.3], [1.0, 0.0, 0.0, 0.0], [0.7, 0.1, 0.1, 0.1]]]).log()
    for seed in range(20):
        out = rlkernel.verify_chain(torch.tensor([[2, 1]]), p, draft_logprobs=q, seeds=seed)
        assert out.token_ids.tolist() == [[2, 0, -1]] and out.accepted.tolist() == [1]


def chi_square(tokens, probs):
    """Of the counts, per degree of freedom, over the tokens that can be expected; and of the rest none."""
    counts = torch.bincount(tokens, minlength=len(probs)).double()
    expected = probs.double() * len(tokens)
    assert (counts[probs == 0] == 0).all()
    likely = expected >= 5
    return float(((counts - expected)[likely] ** 2 / expected[likely]).sum() / (likely.sum() - 1))


def drawn(count, filters, **options):
    """First and second tokens of ``count`` rows whose drafts ``sample`` drew with the same seeds."""
    p = logits_of(1, 3, 12, seed=1, scale=1.5).expand(count, 3, 12)
    q = (0.5 * p[:, :2] + logits_of(1, 2, 12, seed=2, scale=1.0)).log_softmax(-1)
    seeds = torch.arange(count)
    place = torch.arange(2).expand(count, 2)
    with rlkernel.use_backend("reference"):
        drafts = rlkernel.sample(q, seeds=seeds[:, None].expand(count, 2), positions=place).token_ids
        out = rlkernel.verify_chain(drafts, p, draft_logprobs=q, seeds=seeds, **filters, **options)
        kept = rlkernel.sample(p[0, :2], return_support=12, **filters)
    z = p[0, :2] / filters.get("temperature", 1.0)
    probs = z.softmax(-1)
    if kept.support_offsets[-1]:
        for row in range(2):
            ids = kept.support_ids[kept.support_offsets[row] : kept.support_offsets[row + 1]].long()
            inside = torch.zeros(12).index_fill(0, ids, 1.0)
            probs[row] = probs[row] * inside / (probs[row] * inside).sum()
    return out, probs


FILTERS = {"whole": {}, "top_p": {"top_p": 0.8}, "top_k, T": {"top_k": 4, "temperature": 0.7}}


@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_are_distributed_as_the_target(filters):
    out, probs = drawn(20000, FILTERS[filters])
    assert chi_square(out.token_ids[:, 0], probs[0]) < 4  # of three degrees of freedom: one time in 140
    second = out.token_ids[:, 1]
    assert chi_square(second[second >= 0], probs[1]) < 4
    assert 0.2 < float((out.accepted > 0).float().mean()) < 0.95


# How drafts go missing, and what q has to be then: (what stays of the drafts, lengths, draft_logprobs).
# ``legal`` is the grammar, at places of 12 tokens every second one; a mask lets the target draw these alone.


def _none_dropped(drafts, q, legal):
    return drafts, None, q


def _illegal_as_minus_one(drafts, q, legal):
    """vLLM's rule: -1 where the target could not have taken the draft, q as it was drawn from."""
    return torch.where(legal[drafts], drafts, -1), None, q


def _restricted(keep):
    """What the drafter drops for its value ends the drafts; q is that of the drafts that stay."""

    def select(drafts, q, legal):
        inside = keep(q, legal)
        stays = inside.gather(-1, drafts[..., None])[..., 0]
        return drafts, stays.long().cumprod(-1).sum(-1), q.masked_fill(~inside, -torch.inf).log_softmax(-1)

    return select


def _unsure(drafts, q, legal):
    """What does not depend on the draft itself may drop it: here every third row drafts once."""
    return drafts, torch.where(torch.arange(len(drafts)) % 3 == 0, 1, 2), q


MISSING = {
    "kept, and the mask rejects them": _none_dropped,
    "illegal ones as vLLM's -1": _illegal_as_minus_one,
    "illegal ones dropped": _restricted(lambda q, legal: legal.expand(q.shape)),
    "improbable ones dropped": _restricted(lambda q, legal: q > q.amax(-1, keepdim=True) - 2.5),
    "short rows": _unsure,
}


def verified(missing, count, own_seeds, backend="reference", device="cpu", **options):
    """Places 0 and 1 of ``count`` rows, and what they should be distributed as."""
    p = logits_of(1, 3, 12, seed=1, scale=1.5).expand(count, 3, 12)
    q = (0.7 * p[:, :2] + logits_of(1, 2, 12, seed=2, scale=0.5)).log_softmax(-1)
    legal = torch.arange(12) % 2 == 0
    mask = bitmask(legal[None])[:, None].expand(count, 3, 1)
    seeds, place = torch.arange(count), torch.arange(2).expand(count, 2)
    drafter = seeds if own_seeds else seeds + 10**9
    with rlkernel.use_backend("reference"):
        drafts = rlkernel.sample(q, seeds=drafter[:, None].expand(count, 2), positions=place).token_ids
    drafts, lengths, q = MISSING[missing](drafts, q, legal)
    arguments = {"draft_logprobs": q, "draft_lengths": lengths, "seeds": seeds, "token_bitmask": mask}
    arguments = {k: None if x is None else x.to(device) for k, x in arguments.items()}
    out = verify(backend, drafts.to(device), p.to(device), **arguments, **options)
    return out, p[0, :2].masked_fill(~legal, -torch.inf).softmax(-1)


def total_variation(tokens, probs):
    return float((torch.bincount(tokens, minlength=len(probs)) / len(tokens) - probs).abs().sum()) / 2


@pytest.mark.parametrize("own_seeds", [True, False], ids=["the same seeds", "other seeds"])
@pytest.mark.parametrize("missing", MISSING)
def test_missing_drafts_leave_the_targets_distribution(missing, own_seeds):
    out, probs = verified(missing, 60_000, own_seeds)
    assert total_variation(out.token_ids[:, 0], probs[0]) < 0.01
    second = out.token_ids[:, 1]
    assert total_variation(second[second >= 0], probs[1]) < 0.01 * (60_000 / (second >= 0).sum()) ** 0.5
    assert 0.1 < float((out.accepted > 0).float().mean()) < 0.95


@pytest.mark.parametrize("missing", MISSING)
@ON_EVERY_BACKEND
def test_missing_drafts_on_every_backend(backend, device, missing):
    able(backend, device)
    slow = is_slow(backend, device)
    count = 4 if slow else 500
    for method in ("grouped",) if slow else ("grouped", "gumbel"):
        got, _ = verified(missing, count, True, backend, device, method=method)
        want, _ = verified(missing, count, True, method=method)
        assert torch.equal(got.token_ids.cpu(), want.token_ids)
        assert torch.equal(got.accepted.cpu(), want.accepted)


residual = _verify_chain._residual
FAULTS = {
    "residual of p": ("_residual", lambda call, q, drawn: residual(call, q - 99, drawn)),
    "every draft": ("_leading", lambda taken, lengths: lengths),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_chi_square_can_fail(fault, monkeypatch):
    monkeypatch.setattr(_verify_chain, *FAULTS[fault])
    out, probs = drawn(6000, {})
    assert chi_square(out.token_ids[:, 0], probs[0]) > 5


def vllm_kernels(tmp_path):
    """vLLM's kernels of acceptance out of its own file, as ``make`` fetched it; interpreted."""
    file = Path(sys.prefix) / "peers/vllm/v1/sample/rejection_sampler.py"
    if not file.is_file():
        pytest.skip("vLLM's files are not here")
    if torch.cuda.is_available():
        pytest.skip("its kernels are interpreted here, on CPU tensors")
    text = file.read_text()
    names = ("rejection_random_sample_kernel", "rejection_greedy_sample_kernel")
    found = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name in names]
    assert len(found) == 2
    lines = text.splitlines()
    code = ["import triton", "import triton.language as tl"]
    for node in found:
        code += lines[node.decorator_list[0].lineno - 1 : node.end_lineno]
    (tmp_path / "vllm_rejection_kernels.py").write_text("\n".join(code) + "\n")
    spec = importlib.util.spec_from_file_location("vllm_kernels", tmp_path / "vllm_rejection_kernels.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@needs_interpreter
@pytest.mark.parametrize("drafted", ["by q", "given"])
def test_vllm_accepts_the_same_drafts(drafted, tmp_path):
    """Fed with the uniforms of our stream; of given drafts, its greedy kernel, which has the same rule."""
    kernels = vllm_kernels(tmp_path)
    rows, places, size = 48, 4, 60
    logits, q = logits_of(rows, places, size, seed=8), logits_of(rows, places - 1, size, seed=9)
    q = (logits[:, :-1] * 0.7 + 0.6 * q).log_softmax(-1)
    seeds, positions = torch.arange(rows) * 3, torch.arange(rows)
    wide = seeds[:, None].expand(rows, places - 1)
    drafts = rlkernel.sample(q, seeds=wide, positions=positions[:, None] + torch.arange(places - 1)).token_ids
    lengths = torch.arange(rows) % places
    want = torch.full((rows, places), -1, dtype=torch.int32)
    inside = torch.arange(places - 1) < lengths[:, None]
    flat, total = drafts[inside].to(torch.int32), lengths.cumsum(0).to(torch.int32)
    bonus = torch.full((rows,), size + 1, dtype=torch.int32)
    if drafted == "by q":
        u = stream.uniform64(Domain.ACCEPT, wide, positions[:, None] + torch.arange(places - 1))
        instead = torch.full_like(flat, size + 2)
        kernels.rejection_random_sample_kernel[(rows,)](
            want, total, flat, q.exp()[inside], logits.softmax(-1)[:, :-1][inside], bonus, instead,
            u.float()[inside], torch.zeros(rows, dtype=torch.bool), places - 1, size, None,
            NO_DRAFT_PROBS=False, SYNTHETIC_MODE=False,
        )  # fmt: skip
        got = rlkernel.verify_chain(
            drafts, logits, draft_logprobs=q, draft_lengths=lengths, seeds=seeds, positions=positions
        )
        p = logits.softmax(-1)
        replaced = (want == size + 2) & got.valid
        row, place = replaced.nonzero().T
        token = got.token_ids[row, place]
        assert (p[row, place, token] > q.exp()[row, place, token]).all() and len(row) > 10
    else:
        best = logits.argmax(-1)
        flat = torch.where(torch.arange(len(flat)) % 4 > 0, best[:, :-1][inside], flat).to(torch.int32)
        drafts[inside] = flat.long()
        kernels.rejection_greedy_sample_kernel[(rows,)](
            want, total, flat, best[:, :-1][inside].to(torch.int32), bonus,
            torch.ones(rows, dtype=torch.bool), places - 1, torch.zeros(flat.shape), None,
            SYNTHETIC_MODE=False,
        )  # fmt: skip
        got = rlkernel.verify_chain(drafts, logits, draft_lengths=lengths, temperature=0.0)
    known = (want >= 0) & (want < size)
    assert torch.equal(got.valid, want >= 0)
    assert torch.equal(got.token_ids[known], want[known].long())
    assert 5 < int((got.accepted < lengths).sum()) < rows - 5


def test_proposal_and_residual_share_no_noise():
    """What accepts and redraws is no other draw's."""
    domains = [Domain.GROUP, Domain.INSIDE, Domain.REDRAW, Domain.ACCEPT, Domain.RESIDUAL, Domain.BONUS]
    domains += [*Domain.SPLIT, Domain.XTC]
    assert len(set(domains)) == len(domains)
    seeds, zero = torch.arange(4096), torch.zeros(4096, dtype=torch.int64)
    words = [word.double() for domain in domains for word in stream.bits(domain, seeds, zero)]
    words.append(stream.murmur3(seeds, zero, zero).double())
    correlation = torch.corrcoef(torch.stack(words)) - torch.eye(len(words))
    assert correlation.abs().max() < 0.08  # five standard deviations


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


def case(rows=B, seed=5):
    logits = logits_of(rows, K + 1, V, seed=seed)
    q = (logits[:, :K] + logits_of(rows, K, V, seed=seed + 1, scale=0.5)).log_softmax(-1)
    drafts = q.argmax(-1)
    return drafts, logits, q, torch.arange(rows) + 40


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_q_is_compared_in_fp64(dtype):
    """The ratio is that of the numbers given: the same q in fp64 accepts the same, on the edge too."""
    rows = 400
    drafts, logits, q, seeds = case(rows)
    u = stream.uniform64(Domain.ACCEPT, seeds, torch.zeros_like(seeds))
    p = rlkernel.score_tokens(logits[:, 0], drafts[:, 0]).processed_logprobs.double()
    edge = (p - u.log()).to(dtype)  # log q at which u = p / q
    edge = torch.where(edge < 0, edge, q[:, 0, 0].to(dtype))
    q = q.to(dtype)
    q[torch.arange(rows), 0, drafts[:, 0]] = edge
    narrow = torch.zeros_like(u, dtype=torch.bool)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(debug, "may_read", lambda tensor: False)  # q is not normalised
        got = rlkernel.verify_chain(drafts, logits, draft_logprobs=q, seeds=seeds)
        want = rlkernel.verify_chain(drafts, logits, draft_logprobs=q.double(), seeds=seeds)
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_equal(name, a, b)
    exact = u < (p - edge.double()).exp()
    assert torch.equal(got.accepted > 0, exact)
    narrow = u.to(dtype) < (p.to(dtype) - edge).exp()
    assert (narrow != exact).any()


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


WRONG = {
    "drafts": (lambda d, x, q: {"draft_token_ids": d[:, :2]}, "draft_token_ids must have the shape (4, 3)"),
    "float drafts": (lambda d, x, q: {"draft_token_ids": d.float()}, "draft_token_ids must be integers, got"),
    "logits": (lambda d, x, q: {"target_logits": x[0]}, "target_logits must be [B, K + 1, V] with K >= 0"),
    "q": (
        lambda d, x, q: {"draft_logprobs": q[..., :9]},
        "draft_logprobs must be (4, 3, 150), got (4, 3, 9)",
    ),
    "probabilities": (
        lambda d, x, q: {"draft_logprobs": q.exp()},
        "draft_logprobs[0, 0] must be normalised log-probabilities, of which exp sums to 1, got a sum of 15",
    ),
    "masked q": (
        lambda d, x, q: {"draft_logprobs": q.masked_fill(q < -6, -torch.inf)},
        "draft_logprobs[0, 0] must be normalised log-probabilities, of which exp sums to 1, got a sum of 0.9",
    ),
    "q of nothing under a draft": (
        lambda d, x, q: {"draft_logprobs": torch.full_like(q, -torch.inf)},
        "draft_logprobs[0, 0] must be normalised log-probabilities, of which exp sums to 1, got a sum of 0",
    ),
    "q NaN": (
        lambda d, x, q: {"draft_logprobs": q.index_fill(1, torch.tensor(2), torch.nan)},
        "draft_logprobs[0, 2] must be normalised log-probabilities, of which exp sums to 1, got a sum of nan",
    ),
    "lengths": (
        lambda d, x, q: {"draft_lengths": torch.tensor([1, 2, 4, 0])},
        "draft_lengths[2] must be in [0, 3], got 4",
    ),
    "length shape": (
        lambda d, x, q: {"draft_lengths": torch.tensor([1])},
        "draft_lengths must be integers of shape (4,), got int64 (1,)",
    ),
    "temperature": (
        lambda d, x, q: {"temperature": torch.ones(4, 4)},
        "temperature must be one value or have shape (4,), got (4, 4)",
    ),
    "top_p": (lambda d, x, q: {"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
    "positions": (
        lambda d, x, q: {"positions": "a"},
        "positions must be a 64-bit integer or a tensor, got 'a'",
    ),
    "biases": (
        lambda d, x, q: {"logit_bias": [{1: 1.0}]},
        "logit_bias must be one dict or None for each of 4 requests, got 1",
    ),
    "penalties": (
        lambda d, x, q: {"penalties": rlkernel.Penalties(torch.zeros(2, 2, dtype=torch.int64))},
        "penalties.output_token_ids must be [4, L], got (2, 2)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    drafts, logits, q, seeds = case()
    change, message = WRONG[name]
    arguments = {"draft_token_ids": drafts, "target_logits": logits, "draft_logprobs": q, "seeds": seeds}
    with pytest.raises(ValueError) as caught:
        rlkernel.verify_chain(**{**arguments, **change(drafts, logits, q)})
    assert str(caught.value).startswith(message)


# -- seeds of several samples


def test_split_seeds_are_distinct():
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 2**32])
    split = rlkernel.split_seeds(seeds, 2**16)
    assert split.dtype == torch.int64 and split.shape == (6, 2**16)
    assert split.flatten().unique().numel() == 6 * 2**16
    assert torch.equal(split[:, 0], seeds)
    assert torch.equal(rlkernel.split_seeds(seeds, 1), seeds[:, None])
    assert torch.equal(rlkernel.split_seeds(2**32, 5), split[5, :5])
    assert torch.equal(rlkernel.split_seeds(seeds, 5), split[:, :5])  # more samples change none


@pytest.mark.parametrize(
    ("seeds", "n", "message"),
    [
        (1, 0, "n must be an integer in [1, 2**31), got 0"),
        (1, True, "n must be an integer in [1, 2**31), got True"),
        (2**64, 1, f"seeds must be a 64-bit integer or a tensor, got {2**64}"),
        (torch.zeros(2), 1, "seeds must be integers, got float32"),
    ],
)
def test_errors_of_split_seeds(seeds, n, message):
    with pytest.raises(ValueError) as caught:
        rlkernel.split_seeds(seeds, n)
    assert str(caught.value) == message
