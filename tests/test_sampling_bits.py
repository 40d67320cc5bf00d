"""sampling: a row's results, bit by bit, whatever stands around it and however it is computed."""

import pytest
import torch
from backends import is_slow, running
from bitwise import assert_batch_invariant, assert_equal, probe
from sampling_cases import (
    FEW,
    FILTERS,
    OFF,
    PAIRS,
    bitmask,
    everything,
    grid,
    per_row,
    request,
    sample,
    skip_unless_sampling,
)

import rlkernel
from rlkernel import dispatch
from rlkernel.calls.sampling import SamplingCall, Scratch
from rlkernel.consistency import assert_invariant
from rlkernel.reference import sampling_stream as stream

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
METHODS = pytest.mark.parametrize("method", ["grouped", "gumbel"])
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)
pytestmark = pytest.mark.usefixtures("poison")
# by which the reference's sums and softmax are not invariant; its draws and its sets are
EXACT = ("token_ids", "kept_count", "rank", "top_ids", "valid", "support")


def rows_of(out):
    """The results of the rows by name, the support as [B, K] padded with -1."""
    room = out.support_ids.numel() // max(out.token_ids.shape[0], 1)
    place = out.support_offsets[:-1, None] + torch.arange(room, device=out.support_ids.device)
    inside = place < out.support_offsets[1:, None]
    padded = torch.where(inside, out.support_ids[place.clamp(max=max(out.support_ids.numel() - 1, 0))], -1)
    rows = out._asdict() | {"support": padded}
    return {name: x for name, x in rows.items() if name not in ("support_ids", "support_offsets")}


def checked(backend, out):
    rows = rows_of(out)
    return [x for name, x in rows.items() if backend != "reference" or name in EXACT]


def runner(backend, method, order="sequential"):
    """``run(logits, *per_row)`` of ``assert_batch_invariant``, every row with filters of its own."""

    def run(logits, seeds, positions, t, *filters):
        named = dict(zip(OFF, filters, strict=True))
        out = sample(
            backend, logits, seeds=seeds, positions=positions, temperature=t, method=method,
            filter_order=order, **named, **everything(logits.shape[1]),
        )  # fmt: skip
        return checked(backend, out)

    return run


def rows_for(logits, names):
    count, device = len(logits), logits.device
    options = [FILTERS[names[i % len(names)]] for i in range(count)]
    g = torch.Generator().manual_seed(count)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (2, count), generator=g).to(device)
    t = torch.tensor([1.0, 0.7, 0.0, 1.4])[torch.arange(count) % 4].to(device)
    return seeds, positions, t, *per_row(options, device).values()


@METHODS
@DTYPES
@ON_EVERY_BACKEND
def test_batch_invariant(backend, device, dtype, method):
    """Permuted, alone, the second half, at an odd address: with filters and temperatures of every kind."""
    if is_slow(backend, device) and (dtype, method) not in (
        (torch.float32, "grouped"),
        (torch.bfloat16, "gumbel"),
    ):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    if (backend, device) == ("reference", "cuda"):
        pytest.skip("the reference promises no bits on a GPU, where torch adds by the number of rows")
    for vocab in (333,) if is_slow(backend, device) else (37, 333, 9001):
        logits = probe(len(FEW), vocab, dtype, device)
        assert_batch_invariant(runner(backend, method), logits, *rows_for(logits, FEW))


@ON_EVERY_BACKEND
def test_batch_invariant_over_splits(backend, device):
    rows = 3 if is_slow(backend, device) else 17
    logits = probe(rows, 4096 + 70, torch.float32, device)
    names = FEW[2:5] if is_slow(backend, device) else tuple(FILTERS)
    assert_batch_invariant(runner(backend, "grouped", "joint"), logits, *rows_for(logits, names))


@ON_EVERY_BACKEND
def test_padding_rows_change_nothing(backend, device):
    """Greedy rows of NaN, of -inf and of zeros before, between and after."""
    logits = probe(5, 333, torch.float32, device)
    seeds, positions, t, *filters = rows_for(logits, FEW)
    run = runner(backend, "grouped")
    want = run(logits, seeds, positions, t, *filters)
    padding = torch.stack([torch.full((333,), x, device=device) for x in (torch.nan, -torch.inf, 0.0)])
    place = torch.tensor([1, 3, 4, 7, 9], device=device)
    wide = padding.repeat(4, 1)[:11]
    wide[place] = logits

    def spread(x):
        made = x[2].repeat(11)  # the greedy row's
        made[place] = x
        return made

    got = run(wide, *(spread(x) for x in (seeds, positions, t, *filters)))
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_equal(f"output {number}", a[place], b)


@METHODS
@ON_EVERY_BACKEND
def test_no_position_is_position_0(backend, device, method):
    """In rows whose draw stands and in filtered rows that draw once more; position 1 is another."""
    logits = probe(4, 333, torch.float32, device)
    seeds, _, t, *filters = rows_for(logits, ("none", "top_k", "top_p", "all"))
    run = runner(backend, method)
    t = torch.full_like(t, 2.0)
    got, want, other = (run(logits, seeds, at, t, *filters) for at in (None, 0 * seeds, 0 * seeds + 1))
    for number, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_equal(f"output {number}", a, b)
    assert not torch.equal(got[0], other[0])


@METHODS
@ON_EVERY_BACKEND
def test_same_bits_every_time(backend, device, method):
    if is_slow(backend, device) and method == "gumbel":
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    logits, filters, t = grid(333, is_slow(backend, device), torch.float32, device)
    options = {"temperature": t, "method": method, **per_row(filters, device), **everything(333)}
    first = sample(backend, logits, **options)
    for _ in range(1 if is_slow(backend, device) else 100 if backend == "native" else 10):
        for name, a, b in zip(first._fields, sample(backend, logits, **options), first, strict=True):
            assert_equal(name, a, b)


@ON_EVERY_BACKEND
def test_filters_leave_the_other_numbers_alone(backend, device):
    """raw, tempered, entropy and rank of a token have the same bits with and without filters, and of a row
    whose filter keeps everything also processed; so has the token if it is kept."""
    slow = is_slow(backend, device)
    logits = probe(2 if slow else 4, 333, torch.float32, device)
    plain = sample(backend, logits, temperature=0.8, **everything(333))
    mask = bitmask(torch.ones_like(logits, dtype=torch.bool))
    whole = [{"token_bitmask": mask}, {"min_p": 1e-30}, {"top_k": 333}, {"top_p": 1.0, "min_p": 0.0}]
    for options in whole[: 2 if slow else 4]:
        got = sample(backend, logits, temperature=0.8, **options, **everything(333))
        for name, a, b in zip(got._fields, got, plain, strict=True):
            assert_equal(f"{list(options)} {name}", a, b)
    skip_unless_sampling(backend, logits)
    with running(backend):
        for options in ({"top_k": 9, "top_p": 0.6}, {"top_n_sigma": 1.0}):
            asked = everything(333) | {"logprob_token_ids": None}
            got = rlkernel.score_tokens(logits, plain.token_ids, temperature=0.8, **options, **asked)
            for name in ("raw_logprobs", "tempered_logprobs", "entropy", "rank", "top_ids", "top_logprobs"):
                assert_equal(f"{options} {name}", getattr(got, name), getattr(plain, name))


@METHODS
@ON_EVERY_BACKEND
def test_a_winner_that_is_kept_stays(backend, device, method):
    rows = 12 if is_slow(backend, device) else 200
    logits = probe(1, 333, torch.float32, device).expand(rows, 333)
    plain = sample(backend, logits, method=method)
    out = sample(backend, logits, method=method, top_p=0.9, return_support=333)
    kept = torch.isin(plain.token_ids, out.support_ids[: out.support_offsets[1]])
    assert kept.any() and torch.equal(out.token_ids[kept], plain.token_ids[kept])


def test_same_bits_on_any_number_of_threads():
    logits = probe(33, 9001, torch.bfloat16, "cpu")
    rows, results = rows_for(logits, tuple(FILTERS)), []
    assert any(param.values == ("native", "cpu") for param in PAIRS)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(runner("native", "grouped")(logits, *rows))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        for number, (a, b) in enumerate(zip(other, results[0], strict=True)):
            assert_equal(f"output {number}", a, b)


def asked_for(logits, names):
    """What ``ops`` hands to a backend, for rows with filters of their own, with all outputs."""
    seeds, positions, t, top_k, top_p, min_p, top_n_sigma, *more = rows_for(logits, names)
    return request(
        logits, temperature=t, top_k=top_k, top_p=top_p, min_p=min_p, top_n_sigma=top_n_sigma, seeds=seeds,
        positions=positions, entropy=True, rank=True, support=64, thresholds=torch.stack(more, 1).float(),
    )._replace(softmax=True)  # fmt: skip


def in_tiles(impl, logits, tiles, asked, fill=torch.nan):
    """The statistics of every tile of the vocabulary by itself, and the results of all of them."""
    rows, vocab = logits.shape
    scratch = Scratch.of(rows, vocab, asked._replace(rank=True), logits.device)
    scratch.records.fill_(fill), scratch.group_max.fill_(fill)
    for start, end in zip([0, *tiles], [*tiles, vocab], strict=True):
        impl.tile_statistics(logits[:, start:end].clone(), None, start, asked, scratch)
    return scratch.records, impl.finish(logits, None, asked, scratch)


@ON_EVERY_BACKEND
def test_tiles_of_the_vocabulary(backend, device):
    """Tiles from multiples of 4096 on, as ``sample_linear`` takes them, are the whole row to the bit."""
    if backend == "reference":
        pytest.skip("the reference takes a row as a whole")
    logits = probe(3 if is_slow(backend, device) else len(FEW), 2 * 4096 + 70, torch.float32, device)
    asked = asked_for(logits, ("all", "top_p", "k of 1") if is_slow(backend, device) else FEW)
    skip_unless_sampling(backend, logits)
    with running(backend):
        impl = dispatch.pick("sampling", logits, sampling=asked, needs=frozenset({"logprobs"}))
        whole = impl.forward(SamplingCall(logits, None, asked))
        for tiles in ([4096], [4096, 8192]):
            _, stats = in_tiles(impl, logits, tiles, asked)
            for name, a, b in zip(whole._fields, stats, whole, strict=True):
                assert_equal(f"{tiles} {name}", a, b)


@ON_EVERY_BACKEND
def test_rows_to_skip_are_neither_read_nor_written(backend, device):
    if backend == "reference":
        pytest.skip("the reference takes all rows")
    logits = probe(4, 333, torch.float32, device)
    asked = asked_for(logits, FEW)
    skip = torch.tensor([False, True, False, True], device=device)
    skip_unless_sampling(backend, logits)
    with running(backend):
        impl = dispatch.pick("sampling", logits, sampling=asked, needs=frozenset({"logprobs"}))
        partials, stats = in_tiles(impl, logits, [], asked._replace(skip=skip), fill=-7.0)
        whole = impl.forward(SamplingCall(logits, None, asked))
    assert (partials[skip] == -7).all() and not (partials[~skip] == -7).any()
    assert stats.tempered_logprobs[skip].isnan().all(), "written; what is fresh holds NaN"
    for name, a, b in zip(whole._fields, stats, whole, strict=True):
        assert_equal(name, a[~skip], b[~skip])


@METHODS
def test_same_bits_on_warps_of_32_and_of_64(method):
    """NVIDIA's and AMD's: the sums of a group of 64 have one order."""
    assert any(param.values[0] == "emulated-warp32" for param in PAIRS)
    for vocab, dtype, seed in ((333, torch.float32, 0), (333, torch.bfloat16, 3), (4160, torch.float16, 5)):
        logits, filters, t = grid(vocab, True, dtype, seed=seed)
        t[2] = 0
        options = {"temperature": t, "method": method, **per_row(filters), **everything(vocab)}
        on_32, on_64 = (sample(f"emulated-warp{warp}", logits, **options) for warp in (32, 64))
        for name, a, b in zip(on_32._fields, on_32, on_64, strict=True):
            assert_equal(f"V={vocab} {name}", a, b)


# Mutants: what would make the tests above worthless if it passed


def test_a_stream_of_row_numbers_fails(monkeypatch):
    right = stream.bits

    def by_row(domain, seeds, *place):
        return right(domain, seeds + torch.arange(len(seeds))[:, None], *place)

    monkeypatch.setattr(stream, "bits", by_row)
    logits = probe(7, 333, torch.float32, "cpu")
    with pytest.raises(AssertionError, match="differ"):
        assert_batch_invariant(runner("reference", "grouped"), logits, *rows_for(logits, ("none",)))


def test_a_nucleus_of_float_sums_fails():
    """fp32 sums of as many pieces as there are rows, as a kernel that fills the GPU takes them: some token at
    the edge of a nucleus comes and goes with the batch.  The integer sums keep it."""
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(12, 2**16, generator=g) / 4
    p = 0.3 + 0.6 * torch.rand(12, generator=g)

    def kept_by_floats(x, p):
        weights = (x - x.amax(-1, keepdim=True)).exp().sort(-1, descending=True).values
        # numpy adds in fp32, one after another; torch on a CPU would add in fp64
        sums = weights.unflatten(-1, (2 ** (len(x).bit_length() - 1), -1)).numpy().cumsum(-1)
        sums[:, 1:] += sums[:, :-1, -1:].cumsum(1)
        sums = torch.from_numpy(sums).flatten(1)
        return ((sums - weights < p[:, None] * sums[:, -1:]).sum(-1),)

    def kept_by_integers(x, p):
        return (sample("reference", x, top_p=p).kept_count,)

    every_row = {"sizes": (1,), "rows": 12, "neighbours": ()}
    assert_invariant(kept_by_integers, (logits, p), **every_row)
    with pytest.raises(AssertionError, match="differ"):
        assert_invariant(kept_by_floats, (logits, p), **every_row)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ON_EVERY_BACKEND
def test_a_mask_that_allows_every_token_changes_no_bit(backend, device, dtype):
    """Of logits as models have them and far from zero, whose exponentials kernels compute in another way."""
    rows, vocab = 16, 700 if is_slow(backend, device) else 4200
    logits = (3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(5))).to(dtype).to(device)
    logits[-4:] -= 4e5
    options = everything(vocab) | {"temperature": torch.tensor([1.0, 0.7] * (rows // 2), device=device)}
    every = torch.full((rows, -(-vocab // 32)), -1, dtype=torch.int32, device=device)
    for ranking in ("tempered", "raw"):
        want = sample(backend, logits, **options, ranking=ranking)
        got = sample(backend, logits, **options, ranking=ranking, token_bitmask=every)
        for name, one, other in zip(got._fields, got, want, strict=True):
            assert_equal(name, one, other)
