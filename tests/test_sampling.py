"""sampling: what every output is, against fp64, and the rows and shapes that are special."""

import math

import pytest
import torch
from accuracy import check
from backends import is_slow, running
from bitwise import assert_equal
from sampling_cases import (
    FILTERS,
    PAIRS,
    bitmask,
    check_kept,
    everything,
    grid,
    is_on,
    per_row,
    request,
    sample,
    skip_unless_sampling,
    support,
)

import rlkernel
from rlkernel import dispatch
from rlkernel.calls.sampling import SamplingCall
from rlkernel.reference.sampling import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
pytestmark = pytest.mark.usefixtures("poison")


def formulas(x, z, t, kept, token):
    """The statistics of ``token`` in the dtype of ``x`` and ``z``, as one writes them in PyTorch."""
    t = torch.where(t == 0, 1, t).to(z.dtype)[:, None]
    tempered = (z / t).log_softmax(-1)

    def at(values):
        return values.gather(-1, token[:, None])[:, 0]

    p = tempered.exp()
    return {
        "raw_logprobs": at(x.log_softmax(-1)),
        "tempered_logprobs": at(tempered),
        "processed_logprobs": at((z / t).masked_fill(~kept, -torch.inf).log_softmax(-1)),
        "entropy": -torch.where(p > 0, p * tempered, 0).sum(-1),
        "kept_mass": torch.where(kept, p, 0).sum(-1),
    }


def check_statistics(out, logits, z, t):
    """Every number within twice PyTorch's own error; ranks and the likeliest tokens are exact."""
    kept = torch.zeros(z.shape, dtype=torch.bool, device=z.device)
    for row in range(len(z)):
        kept[row, support(out, row) or range(z.shape[1])] = True
    truth = formulas(logits.double(), z.double(), t, kept, out.token_ids)
    torchs = formulas(logits.float(), z.float(), t, kept, out.token_ids)
    for name, exact in truth.items():
        check(name, getattr(out, name), torchs[name], exact, magnitude=1)
    z_token, ids = z.gather(1, out.token_ids[:, None]), torch.arange(z.shape[1], device=z.device)
    before = (z > z_token) | ((z == z_token) & (ids < out.token_ids[:, None]))
    assert torch.equal(out.rank, 1 + before.sum(-1))
    count = out.top_ids.shape[1]
    assert torch.equal(out.top_ids, z.sort(dim=-1, descending=True, stable=True).indices[:, :count])
    t = torch.where(t == 0, 1, t)[:, None]
    logprobs = [
        (z.to(d) / t.to(d)).log_softmax(-1).gather(1, out.top_ids) for d in (torch.float32, torch.float64)
    ]
    check("top_logprobs", out.top_logprobs, *logprobs, magnitude=1)


@pytest.mark.parametrize("method", ["grouped", "gumbel"])
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
@ON_EVERY_BACKEND
def test_matches_fp64(backend, device, dtype, method):
    if is_slow(backend, device) and (dtype == torch.float32) == (method == "gumbel"):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    logits, filters, t = grid(333, is_slow(backend, device), dtype, device, seed=2)
    kept = (logits > -torch.inf).sum(-1) >= 5  # top_logprobs of fewer tokens have a test of their own
    logits, t = logits[kept], t[kept]
    filters = [f for f, keep in zip(filters, kept.tolist(), strict=True) if keep]
    out = sample(backend, logits, temperature=t, method=method, **per_row(filters, device), **everything(333))
    assert out.valid.all()
    check_statistics(out, logits, logits.float(), t)


# one token; a group less one, one group, one more; a split less one, one split, one more
@pytest.mark.parametrize("vocab", [1, 2, 31, 63, 64, 65, 4095, 4096, 4097])
@ON_EVERY_BACKEND
def test_every_size(backend, device, vocab):
    options = [{}, {"top_p": 0.7}, {"top_k": 20, "min_p": 0.001}]
    logits = make_inputs(3, vocab, seed=vocab, device=device)["logits"]
    # the likeliest tokens last: what is left out at the end shows
    logits = torch.cat([logits[:1], logits[1:].sort(-1).values])
    out = sample(backend, logits, **per_row(options, device), **everything(vocab))
    for row, z in enumerate(logits.double().tolist()):
        check_kept(out, row, z, 1.0, options[row])
    check_statistics(out, logits, logits, torch.ones(3, device=device))


@ON_EVERY_BACKEND
def test_huge_vocabulary(backend, device):
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    inputs = make_inputs(4, 151936, dtype=torch.bfloat16, device=device)
    t = torch.tensor([1.0, 0.8, 1.2, 0.0], device=device)
    out = sample(backend, **inputs, temperature=t, **everything(151936))
    check_statistics(out, inputs["logits"], inputs["logits"].float(), t)


@ON_EVERY_BACKEND
def test_log_sum_exp(backend, device):
    logits = make_inputs(4, 5000, device=device)["logits"]
    skip_unless_sampling(backend, logits)
    with running(backend):
        asked = request(logits, temperature=0.6, softmax=True)
        impl = dispatch.pick("sampling", logits, sampling=asked, needs=frozenset())
        stats = impl.forward(SamplingCall(logits, None, asked))
    assert torch.equal(stats.row_max, logits.amax(-1))
    exact, torchs = ((logits.to(d) / 0.6).logsumexp(-1) for d in (torch.float64, torch.float32))
    check("lse", stats.row_max / 0.6 + stats.log_sum, torchs, exact, magnitude=1)


@ON_EVERY_BACKEND
def test_greedy_rows_among_others(backend, device):
    logits = make_inputs(4, 200, device=device)["logits"]
    logits[0, [30, 170]] = 50.0  # a tie: the lowest id
    t = torch.tensor([0.0, 0.8, 0.0, 1.0], device=device)
    out = sample(backend, logits, temperature=t, top_p=0.9, **everything(200))
    greedy = torch.tensor([0, 2], device=device)
    best = torch.stack([torch.tensor(30, device=device), logits[2].argmax()])
    assert torch.equal(out.token_ids[greedy], best) and out.rank[greedy].tolist() == [1, 1]
    assert out.processed_logprobs[greedy].tolist() == [0, 0] and out.kept_count[greedy].tolist() == [1, 1]
    assert [support(out, row) for row in (0, 2)] == [[b] for b in best.tolist()]
    assert not out.support_overflow.any()
    check_statistics(out, logits, logits, t)
    for row in (1, 3):
        check_kept(out, row, logits[row].double().tolist(), t[row].item(), {"top_p": 0.9})
    whole = sample(backend, logits, temperature=0.0, return_support=4)  # no row needs a seed or a filter
    assert torch.equal(whole.token_ids[greedy], best) and (whole.processed_logprobs == 0).all()
    assert_equal("kept_mass", whole.kept_mass, sample(backend, logits, temperature=0, top_k=3).kept_mass)


@ON_EVERY_BACKEND
def test_bias_and_penalties(backend, device):
    """Bias first, then repetition, frequency and presence as vLLM and OpenAI define them, token by token."""
    vocab, t = 130, 0.9
    logits = make_inputs(2, vocab, device=device)["logits"]
    g = torch.Generator().manual_seed(2)
    bias = torch.randn(vocab, generator=g).to(device)
    prompt, output = [[3, 7, 7, -1], [129, 0, 1, 2]], [[7, 7, 5], [130, -1, 4]]  # padded with what is no id
    penalties = rlkernel.Penalties(
        torch.tensor(output, device=device), torch.tensor(prompt, device=device),
        repetition=torch.tensor([1.5, 2.0], device=device), frequency=0.25,
        presence=torch.tensor([0.5, -1.0], device=device),
    )  # fmt: skip
    z = (logits.double() + bias.double()).tolist()
    for row, repetition, presence in ((0, 1.5, 0.5), (1, 2.0, -1.0)):
        said = [i for i in output[row] if 0 <= i < vocab]
        for i in {*said, *(i for i in prompt[row] if 0 <= i < vocab)}:
            z[row][i] = z[row][i] / repetition if z[row][i] > 0 else z[row][i] * repetition
        for i in set(said):
            z[row][i] -= 0.25 * said.count(i) + presence
    z = torch.tensor(z, dtype=torch.float64, device=device)
    before = logits.clone()
    out = sample(
        backend, logits, temperature=t, logit_bias=bias, penalties=penalties, top_k=9, **everything(vocab)
    )
    assert torch.equal(logits, before), "the logits are not ours to change"
    for row in range(2):
        assert support(out, row) == sorted(z[row].topk(9).indices.tolist())
    want = formulas(
        logits.double(), z, torch.full((2,), t, device=device), z >= z.topk(9).values[:, -1:], out.token_ids
    )
    for name, exact in want.items():
        assert (getattr(out, name) - exact).abs().max() < 5e-6, name
    with pytest.raises(ValueError, match=r"logit_bias\[5\] must be finite or -inf, got inf"):
        sample(backend, logits, logit_bias={5: math.inf, 7: 1.0}, top_k=2)
    banned = sample(
        backend, logits, logit_bias={int(i): -math.inf for i in logits[0].topk(3).indices}, temperature=0.0
    )
    assert banned.token_ids[0] == logits[0].topk(4).indices[3]


BROKEN = {
    "NaN": lambda x: x[:, 8].fill_(torch.nan),
    "NaN last": lambda x: x[:, -1].fill_(torch.nan),
    "only NaN": lambda x: x.fill_(torch.nan),
    "+inf": lambda x: x[:, 40].fill_(torch.inf),
    "all -inf": lambda x: x.fill_(-torch.inf),
    "+inf and -inf": lambda x: x.fill_(-torch.inf)[:, 3].fill_(torch.inf),
}


@ON_EVERY_BACKEND
def test_rows_that_cannot_be_sampled(backend, device):
    """They are reported, and their neighbours have the bits that they have without them."""
    good = make_inputs(len(BROKEN) + 1, 700, device=device)["logits"]
    logits = good.repeat_interleave(2, 0)[:-1]
    for row, breaks in enumerate(BROKEN.values()):
        breaks(logits[2 * row + 1][None])
    seeds = torch.arange(len(logits), device=device)
    for filters in (
        {},
        {"top_k": 12},
        {"top_p": 0.8, "top_n_sigma": 3.0},
        {"min_p": 0.1, "temperature": 0.0},
    ):
        if is_slow(backend, device) and "top_n_sigma" not in filters:
            continue
        options = filters | everything(700)
        out = sample(backend, logits, seeds=seeds, **options)
        assert out.valid.tolist() == [row % 2 == 0 for row in range(len(logits))]
        bad = out.token_ids[1::2], out.kept_count[1::2], out.rank[1::2]
        assert [set(x.tolist()) for x in bad] == [{-1}, {0}, {0}]
        for name in ("raw_logprobs", "tempered_logprobs", "processed_logprobs", "kept_mass", "entropy"):
            assert getattr(out, name)[1::2].isnan().all(), name
        alone = sample(backend, good, seeds=seeds[::2], **options)
        for name in (
            "token_ids",
            "raw_logprobs",
            "processed_logprobs",
            "kept_mass",
            "entropy",
            "rank",
            "top_ids",
        ):
            got, want = getattr(out, name)[::2].contiguous(), getattr(alone, name)
            if (backend, device) == ("reference", "cuda"):  # torch reduces by the number of rows there
                torch.testing.assert_close(got, want)
            else:
                assert_equal(name, got, want)
        assert [support(out, 2 * r) for r in range(len(good))] == [
            support(alone, r) for r in range(len(good))
        ]
        assert not any(support(out, 2 * r + 1) for r in range(len(BROKEN)))


@ON_EVERY_BACKEND
def test_a_mask_that_allows_nothing_and_logits_it_hides(backend, device):
    logits = make_inputs(3, 90, device=device)["logits"]
    logits[1, 4], logits[2, 4] = torch.nan, torch.nan
    allowed = torch.ones(3, 90, dtype=torch.bool, device=device)
    allowed[0], allowed[1, 4] = False, False
    out = sample(backend, logits, token_bitmask=bitmask(allowed))
    assert out.valid.tolist() == [False, False, False] and out.token_ids.tolist() == [-1, -1, -1]


@ON_EVERY_BACKEND
def test_shapes_and_strides(backend, device):
    wide = make_inputs(6, 260, device=device)["logits"]
    t = torch.tensor([0.5, 1.0, 0.0, 2.0, 1.1, 0.9], device=device)
    options = {
        "top_p": 0.9,
        "return_support": 257,
        "return_rank": True,
        "return_entropy": True,
        "top_logprobs": 2,
        "logprob_token_ids": torch.tensor([256, 0]),
    }
    want = sample(backend, wide[:, 3:].contiguous(), temperature=t, **options)
    views = {
        "rows apart": wide[:, 3:],
        "columns apart": wide[:, 3:].t().contiguous().t(),
        "leading dimensions": wide[:, 3:].reshape(2, 3, 257),
    }
    for name, logits in views.items():
        shape = logits.shape[:-1]
        got = sample(backend, logits, temperature=t.view(shape), **options)
        assert got.token_ids.shape == shape and got.top_logprobs.shape == (*shape, 2), name
        for field, a, b in zip(got._fields, got, want, strict=True):
            assert_equal(f"{name}: {field}", a.reshape(b.shape), b)
    same = sample(backend, wide[:1, 3:].expand(4, 257), seeds=11, **options)
    assert len(set(same.token_ids.tolist())) == 1, "rows with a stride of 0"


@ON_EVERY_BACKEND
def test_a_row_without_a_batch(backend, device):
    logits = make_inputs(1, 260, device=device)["logits"]
    options = {"top_k": 2, "return_support": 5, "top_logprobs": 4}
    want = sample(backend, logits, seeds=3, **options)
    got = sample(backend, logits[0], seeds=torch.tensor(3, device=device), **options)
    assert got.token_ids.shape == () and got.top_ids.shape == (4,) and got.support_offsets.tolist() == [0, 2]
    for name, a, b in zip(got._fields, got, want, strict=True):
        if b is not None:
            assert_equal(name, a.reshape(b.shape), b)


@ON_EVERY_BACKEND
def test_no_rows(backend, device):
    out = sample(backend, torch.empty(0, 50, device=device), top_p=0.5, **everything(50))
    assert out.token_ids.shape == (0,) and out.top_ids.shape == (0, 3)
    assert out.support_offsets.tolist() == [0] and out.support_ids.shape == (0,)
    with running(backend):
        assert rlkernel.sample(torch.empty(0, 100, device=device)[:, ::2], top_p=0.5).token_ids.shape == (0,)


@ON_EVERY_BACKEND
def test_forced_tokens_have_the_statistics_that_drawn_ones_have(backend, device):
    logits, filters, t = grid(333, is_slow(backend, device), torch.float32, device, seed=9)
    t[::7] = 0
    options = {"temperature": t, **per_row(filters, device), **everything(333)}
    options["logprob_token_ids"] = options["logprob_token_ids"].to(device)
    drawn = sample(backend, logits, **options)
    with running(backend):
        forced = rlkernel.score_tokens(logits, drawn.token_ids, **options)
    for name, a, b in zip(drawn._fields, forced, drawn, strict=True):
        assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_forced_tokens_outside_of_what_is_kept(backend, device):
    logits = torch.tensor([5.0, 4.0, 3.0, -torch.inf], device=device).repeat(5, 1)
    ids = torch.tensor([2, 1, 3, 0, 2], device=device)
    t = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0], device=device)
    skip_unless_sampling(backend, logits)
    with running(backend):
        out = rlkernel.score_tokens(logits, ids, temperature=t, top_k=2, return_rank=True)
    assert out.processed_logprobs.isneginf().tolist() == [True, False, True, False, True]
    assert out.tempered_logprobs.isneginf().tolist() == [False, False, True, False, False]
    assert out.processed_logprobs[3] == 0 and torch.equal(out.token_ids, ids)
    assert out.rank.tolist() == [3, 2, 4, 1, 3]


@ON_EVERY_BACKEND
def test_only_what_was_asked_for(backend, device):
    logits = make_inputs(3, 150, device=device)["logits"]
    everything_there = sample(backend, logits, top_k=9, **everything(150))
    for wanted in ((), ("processed",), ("raw", "tempered")):
        out = sample(backend, logits, top_k=9, return_logprobs=wanted)
        for name, got, full in zip(out._fields, out, everything_there, strict=True):
            asked = name.removesuffix("_logprobs") in wanted
            if name in ("token_ids", "kept_mass", "kept_count", "valid") or asked:
                assert_equal(name, got, full)
            else:
                assert got is None, name


@ON_EVERY_BACKEND
def test_top_logprobs_of_fewer_tokens_than_asked_for(backend, device):
    logits = torch.full((2, 70), -torch.inf, device=device)
    logits[0, [60, 5]], logits[1] = 1.0, torch.nan
    out = sample(backend, logits, top_logprobs=3)
    assert out.top_ids.tolist() == [[5, 60, -1], [-1, -1, -1]]
    assert (
        out.top_logprobs[0].isneginf().tolist() == [False, False, True] and out.top_logprobs[1].isnan().all()
    )
    assert torch.allclose(out.top_logprobs[0, :2], torch.tensor(0.5, device=device).log())


@ON_EVERY_BACKEND
def test_results_in_given_tensors(backend, device):
    logits = make_inputs(3, 150, device=device)["logits"]
    out = sample(backend, logits, top_p=0.9, **everything(150))
    addresses = [x.data_ptr() for x in out]
    want = sample(backend, logits.flip(0), top_p=0.8, **everything(150))
    got = sample(backend, logits.flip(0), top_p=0.8, **everything(150), out=out)
    assert got is out and [x.data_ptr() for x in got] == addresses
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert_equal(name, a, b)


def test_fp64_stays_fp64():
    inputs = make_inputs(4, 999, dtype=torch.float64)
    out = rlkernel.sample(**inputs, top_p=0.9, **everything(999))
    want = inputs["logits"].log_softmax(-1).gather(1, out.token_ids[:, None])[:, 0]
    assert out.raw_logprobs.dtype == torch.float64 and (out.raw_logprobs - want).abs().max() < 1e-13
    assert rlkernel.last_backend("sampling") == "reference"


MUTANTS = {
    "temperature is forgotten": lambda ref, call, off: ref.forward(off),
    "half precision inside": lambda ref, call, off: ref.forward(
        call._replace(logits=call.logits.bfloat16().float())
    ),
    "raw is tempered": lambda ref, call, off: (s := ref.forward(call))._replace(
        raw_logprobs=s.tempered_logprobs
    ),
    "processed is not": lambda ref, call, off: (s := ref.forward(call))._replace(
        processed_logprobs=s.tempered_logprobs
    ),
    "rank from 0": lambda ref, call, off: (s := ref.forward(call))._replace(
        rank=s.rank if s.rank is None else s.rank - 1
    ),
    "entropy at T=1": lambda ref, call, off: ref.forward(call)._replace(entropy=ref.forward(off).entropy),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_statistics_fail(mutant, monkeypatch):
    from types import SimpleNamespace

    from rlkernel.reference import sampling as reference

    real = SimpleNamespace(forward=reference.forward)

    def wrong(call):
        off = call._replace(request=call.request._replace(temperature=1.0))
        return MUTANTS[mutant](real, call, off)

    monkeypatch.setattr(reference, "forward", wrong)
    with pytest.raises(AssertionError):
        test_matches_fp64("reference", "cpu", torch.float32, "grouped")


def test_a_filter_that_is_off_is_known_as_such():
    assert [is_on(f, 333) for f in FILTERS.values()].count(False) == 2


def test_the_reference_does_not_follow_the_default_dtype():
    torch.set_default_dtype(torch.float64)
    try:
        with rlkernel.use_backend("reference"):
            found = rlkernel.sample(torch.randn(2, 9, dtype=torch.float32), seeds=1)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.processed_logprobs.dtype == torch.float32
