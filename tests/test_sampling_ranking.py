"""sampling: whose distribution rank, likeliest tokens and the log-probabilities of given ids belong to."""

import pytest
import sampling_peers as peers
import torch
from backends import is_slow, running
from bitwise import assert_equal
from sampling_cases import PAIRS, bitmask, sample

import rlkernel
from rlkernel.reference.sampling import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
RANKINGS = ("tempered", "raw", "processed")
ROWS, VOCAB = 5, 333


def case(device):
    """Logits and options under which the three distributions rank differently; the last row is greedy."""
    g = torch.Generator().manual_seed(12)
    logits = (2 * torch.randn(ROWS, VOCAB, generator=g)).to(device)
    allowed = (torch.rand(ROWS, VOCAB, generator=g) < 0.7).to(device)
    options = {
        "token_bitmask": bitmask(allowed),
        "logit_bias": (3 * torch.randn(VOCAB, generator=g)).to(device),
        "temperature": torch.tensor([1.0, 0.7, 1.3, 2.0, 0.0], device=device),
        "top_k": 40,
        "top_p": 0.8,
    }
    z = (logits.double() + options["logit_bias"].double()).masked_fill(~allowed, -torch.inf)
    return logits, z, options


def distributions(logits, z, options, out):
    """log-probabilities [B, V] of each ranking, in fp64; the kept set is known by its number."""
    t = options["temperature"].double()[:, None]
    tempered = (z / torch.where(t == 0, 1, t)).log_softmax(-1)
    order = z.sort(dim=-1, descending=True, stable=True).indices
    place = torch.arange(z.shape[1], device=z.device).expand_as(order)
    kept = torch.zeros_like(order, dtype=torch.bool).scatter(1, order, place < out.kept_count[:, None])
    processed = tempered.masked_fill(~kept, -torch.inf).log_softmax(-1)
    return {"raw": logits.double().log_softmax(-1), "tempered": tempered, "processed": processed}


def close(got, want):
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite) and torch.equal(got[~finite], want[~finite].to(got.dtype))
    assert ((got - want)[finite].abs() < 5e-6).all()


@pytest.mark.parametrize("ranking", RANKINGS)
@ON_EVERY_BACKEND
def test_each_distribution(backend, device, ranking):
    logits, z, options = case(device)
    ids = torch.tensor([0, 332, 7, -1, 150], device=device).repeat(ROWS, 1)
    ids[:, 2] = z.argmax(-1)
    out = sample(
        backend, logits, **options, return_rank=True, top_logprobs=50, ranking=ranking, logprob_token_ids=ids
    )
    logprobs = distributions(logits, z, options, out)[ranking]
    base = logits.double() if ranking == "raw" else z
    order = base.sort(dim=-1, descending=True, stable=True).indices[:, :50]
    assert torch.equal(out.top_ids, order)
    close(out.top_logprobs, logprobs.gather(1, order))
    at = base.gather(1, out.token_ids[:, None])
    assert torch.equal(out.rank, 1 + (base > at).sum(-1))
    given = logprobs.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf)
    close(out.id_logprobs, given)


@ON_EVERY_BACKEND
def test_the_draw_does_not_depend_on_what_is_ranked(backend, device):
    logits, _, options = case(device)
    plain = sample(backend, logits, **options, return_rank=True)
    for ranking in RANKINGS:
        out = sample(backend, logits, **options, return_rank=True, ranking=ranking, top_logprobs=3)
        for name in set(out._fields) - {"rank", "top_ids", "top_logprobs"}:
            if getattr(plain, name) is not None:
                assert_equal(name, getattr(out, name), getattr(plain, name))
    assert (out.rank == plain.rank).all(), "processed has the order of tempered"


@ON_EVERY_BACKEND
def test_vllms_three_modes_with_everything_on(backend, device):
    """vLLM's own sampler under a mask, a bias and filters: ranks, likeliest tokens and given ids."""
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    g = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(6, 200, generator=g)
    allowed = torch.rand(6, 200, generator=g) < 0.8
    bias = {0: {3: 9.0, 5: -4.0}, 2: {190: 12.0}}
    dense = torch.zeros_like(logits)
    for row, entries in bias.items():
        dense[row, list(entries)] = torch.tensor(list(entries.values()))
    given = {0: [3, 7], 2: [190], 5: [0, 1, 2]}
    ids = torch.full((6, 3), -1)
    for row, tokens in given.items():
        ids[row, : len(tokens)] = torch.tensor(tokens)
    for mode, ranking in (("raw_logprobs", "raw"), ("processed_logprobs", "processed")):
        asked = {"allowed": allowed, "processors": [peers.vllm_logit_bias(bias)], "top_k": 20}
        theirs = peers.vllm_sampler(mode, logits, 0.8, num_logprobs=6, **asked)
        token_ids, table = theirs.sampled_token_ids[:, 0].long(), theirs.logprobs_tensors
        with running(backend):
            out = rlkernel.score_tokens(
                logits.to(device), token_ids.to(device), temperature=0.8, top_k=20, return_rank=True,
                token_bitmask=bitmask(allowed).to(device), logit_bias=dense.to(device), top_logprobs=6,
                ranking=ranking, logprob_token_ids=ids.to(device),
            )  # fmt: skip
        assert torch.equal(out.rank.cpu(), table.selected_token_ranks)
        assert torch.equal(out.top_ids.cpu(), table.logprob_token_ids[:, 1:].long())
        close(out.top_logprobs.cpu(), table.logprobs[:, 1:])
        named = peers.vllm_sampler(mode, logits, 0.8, num_logprobs=None, given=given, **asked)
        close(out.id_logprobs.cpu(), named.logprobs_tensors.logprobs[:, 1:])


@pytest.mark.parametrize("ranking", RANKINGS)
@ON_EVERY_BACKEND
def test_rows_that_hold_nothing(backend, device, ranking):
    logits = torch.zeros(3, 70, device=device)
    logits[1] = -torch.inf
    logits[2, 5] = torch.nan
    ids = torch.tensor([4, -1], device=device)
    out = sample(
        backend, logits, ranking=ranking, top_logprobs=2, return_rank=True, logprob_token_ids=ids, top_p=0.5
    )
    assert out.rank.tolist()[1:] == [0, 0] and (out.top_ids[1:] == -1).all()
    assert out.top_logprobs[1:].isnan().all() and out.id_logprobs[1:].isnan().all()
    assert out.top_ids[0].tolist() == [0, 1] and out.id_logprobs[0, 1] == -torch.inf
    want = {"processed": 35, "raw": 70, "tempered": 70}[ranking]
    assert abs(out.id_logprobs[0, 0].item() + torch.tensor(want).log().item()) < 1e-6
    empty = sample(backend, logits[:0], ranking=ranking, top_logprobs=2, logprob_token_ids=ids)
    assert empty.top_ids.shape == empty.id_logprobs.shape == (0, 2)


@pytest.mark.parametrize("ranking", RANKINGS)
def test_every_token_and_more_dimensions(ranking):
    """``top_logprobs`` of the whole vocabulary, fp64, ids of one row for all and of each."""
    logits = torch.randn(2, 3, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    shared = torch.tensor([5, 39])
    options = {"temperature": 0.5, "min_p": 0.05, "ranking": ranking, "top_logprobs": 40, "seeds": 1}
    out = rlkernel.sample(logits, logprob_token_ids=shared, **options)
    each = rlkernel.sample(logits, logprob_token_ids=shared.expand(2, 3, 2), **options)
    assert out.id_logprobs.shape == (2, 3, 2) and out.top_logprobs.shape == (2, 3, 40)
    assert torch.equal(out.id_logprobs, each.id_logprobs)
    scattered = torch.zeros_like(out.top_logprobs).scatter(-1, out.top_ids, out.top_logprobs)
    assert torch.equal(scattered[..., shared], out.id_logprobs)
    sums = out.top_logprobs.exp().sum(-1)
    assert (sums - 1).abs().max() < 1e-9


def test_from_hidden_states_too():
    g = torch.Generator().manual_seed(4)
    hidden, weight = torch.randn(4, 16, generator=g), torch.randn(300, 16, generator=g)
    ids, options = torch.tensor([1, 299]), {"seeds": 3, "logit_bias": {7: 2.0}, "top_logprobs": 4}
    for ranking in RANKINGS:
        asked = options | {"ranking": ranking, "logprob_token_ids": ids, "return_rank": True, "top_k": 9}
        got = rlkernel.sample_linear(hidden, weight, **asked)
        logits = rlkernel.sample_linear(hidden, weight, logprob_token_ids=torch.arange(300), seeds=3)
        want = torch.log_softmax(hidden.double() @ weight.double().T, -1)
        close(logits.id_logprobs, want)
        there = rlkernel.sample(hidden @ weight.T, **asked)
        for name in ("rank", "top_ids"):
            assert torch.equal(getattr(got, name), getattr(there, name)), (ranking, name)
        close(got.id_logprobs, there.id_logprobs)
    with pytest.raises(ValueError, match="store_logits must be True or 'auto' with logprob_token_ids"):
        rlkernel.sample_linear(hidden, weight, logprob_token_ids=ids, store_logits=False)


@pytest.mark.parametrize("ranking", RANKINGS)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_temperature_for_all_rows_is_that_of_each(temperature, ranking):
    logits, z, options = case("cpu")
    ids = torch.arange(-1, VOCAB).repeat(ROWS, 1)
    options |= {"ranking": ranking, "top_logprobs": 50, "logprob_token_ids": ids, "seeds": 1}
    one = rlkernel.sample(logits, **options | {"temperature": temperature})
    each = options | {"temperature": torch.full((ROWS,), temperature)}
    assert torch.equal(one.top_logprobs, rlkernel.sample(logits, **each).top_logprobs)
    logprobs = distributions(logits, z, each, one)[ranking]
    close(one.id_logprobs, logprobs.gather(-1, ids.clamp(min=0)).masked_fill(ids < 0, -torch.inf))


@pytest.mark.parametrize("ranking", ["tempered", "processed"])
def test_fewer_tokens_are_allowed_than_are_wanted(ranking):
    """The places behind them hold no token: not token 0, which is allowed and likely."""
    logits = torch.tensor([[3.0, 1.0, 2.0, 0.5, 0.1, 4.0, 0.2, 0.3]])
    mask = bitmask(torch.tensor([[True, False, False, False, False, True, False, False]]))
    want = torch.tensor([4.0, 3.0]).log_softmax(0)
    for backend in ("native", "reference"):
        out = sample(backend, logits, token_bitmask=mask, top_logprobs=4, ranking=ranking, seeds=1)
        assert out.top_ids.tolist() == [[5, 0, -1, -1]]
        close(out.top_logprobs[0], torch.cat([want, torch.full((2,), -torch.inf)]))


@pytest.mark.parametrize("ranking", RANKINGS)
def test_one_graph(ranking):
    inputs = make_inputs(3, 70)
    ids = torch.tensor([[1, 69, -1]] * 3)

    def step(logits, seeds, positions):
        return rlkernel.sample(
            logits * 1, seeds=seeds, positions=positions, top_p=0.8, temperature=0.7, ranking=ranking,
            logit_bias={3: 2.0}, top_logprobs=4, return_rank=True, logprob_token_ids=ids,
        )  # fmt: skip

    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(**inputs)
    for name, got, want in zip(compiled._fields, compiled, step(**inputs), strict=True):
        assert (got is None) == (want is None), name
        if want is not None:
            assert_equal(name, got, want)


BAD = {
    "ranking": ({"ranking": "processed_logprobs"}, "ranking must be .*raw.*, got 'processed_logprobs'"),
    "a list": ({"logprob_token_ids": [1]}, "logprob_token_ids must be an integer tensor, got list"),
    "floats": (
        {"logprob_token_ids": torch.ones(2)},
        "logprob_token_ids must be an integer tensor, got float32",
    ),
    "shape": (
        {"logprob_token_ids": torch.ones(3, 2, dtype=torch.int64)},
        r"logprob_token_ids must have shape \[K\] or \(2, K\), got \(3, 2\)",
    ),
    "V": (
        {"logprob_token_ids": torch.tensor([0, 9])},
        r"logprob_token_ids\[1\] must be in \[0, 9\), or -1, got 9",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    options, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        rlkernel.sample(torch.zeros(2, 9), **options)
    with pytest.raises(ValueError, match=message):
        rlkernel.score_tokens(torch.zeros(2, 9), torch.tensor([1, 2]), **options)
