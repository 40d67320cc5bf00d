"""verify_chain with draft_logprobs: Leviathan's rejection, the target's distribution, vLLM's kernels."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from backends import is_slow, needs_interpreter
from bitwise import assert_equal
from sampling_cases import bitmask
from verify_chain_cases import ON_EVERY_BACKEND, able, case, logits_of, verify

import rlkernel
from rlkernel.calls.sampling import Domain
from rlkernel.ops.sampling import verify_chain as _verify_chain
from rlkernel.reference import sampling_stream as stream
from rlkernel.runtime import debug

pytestmark = pytest.mark.usefixtures("poison")


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


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_the_target_is_that_of_the_adjusted_logits(backend):
    """A bias moves p: which drafts stay, what is drawn in the place of one that does not, and the bonus."""
    count, bias = 200, torch.tensor([2.0, -3.0, 0.0, 0.5, -torch.inf, 1.0, 0.0, -1.0, 4.0, 0.0, 0.0, -0.5])
    p = logits_of(count, 3, 12, seed=3, scale=1.5)
    q = (0.5 * p[:, :2] + logits_of(1, 2, 12, seed=2, scale=1.0)).log_softmax(-1)
    seeds = torch.arange(count)
    with rlkernel.use_backend(backend):
        drafts = rlkernel.sample(q, seeds=seeds[:, None].expand(count, 2)).token_ids
        want = rlkernel.verify_chain(drafts, p + bias, draft_logprobs=q, seeds=seeds)
        got = rlkernel.verify_chain(drafts, p, draft_logprobs=q, seeds=seeds, logit_bias=bias)
    assert torch.equal(got.token_ids, want.token_ids) and torch.equal(got.accepted, want.accepted)
    assert not (got.token_ids == 4).any() and got.accepted.unique().tolist() == [0, 1, 2]
    close = got.processed_logprobs - want.processed_logprobs
    assert close.abs().max() < 1e-5


def test_where_nothing_of_the_target_is_left_the_token_is_drawn_from_it():
    """max(p - q, 0) of a drafter that is as sure as the target, and whose draft was dropped, is 0."""
    sure = torch.full((8, 2, 6), -torch.inf)
    sure[..., 1] = 0.0
    out = rlkernel.verify_chain(
        torch.full((8, 1), -1), sure, draft_logprobs=sure[:, :1], seeds=torch.arange(8)
    )
    assert out.token_ids.tolist() == [[1, -1]] * 8 and not out.accepted.any()


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
