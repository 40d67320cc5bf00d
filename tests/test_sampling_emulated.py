"""The sampling kernels that CUDA and HIP compile, run on the CPU: as the reference, with one set of bits."""

import faulthandler
import os
import random
import re
import signal
import warnings

import emulation
import pytest
import torch

from rlkernel import native
from rlkernel.calls.sampling import FILTER_ORDERS, Sampling, SamplingCall, Scratch
from rlkernel.native import sampling as kernels_of
from rlkernel.reference import sampling as reference

WARPS = (32, 64)
PLAIN = Sampling(raw=True, entropy=True, softmax=True)
# what a row may be filtered by; the vocabulary below has three splits and a part of a group
FILTERS = {
    "none": {},
    "top_k": {"top_k": 50},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "sigma": {"top_n_sigma": 1.5},
    "all": {"top_k": 300, "top_p": 0.8, "min_p": 1e-4, "top_n_sigma": 3.0},
    "joint": {"top_k": 300, "top_p": 0.8, "min_p": 1e-4, "order": "joint"},
    "thresholds": {"thresholds": torch.tensor([[0.01, 0.002, 0.1]]).repeat(3, 1), "top_p": 0.9},
    "band": {"band": torch.tensor([[0.6, 1.0], [1.0, 0.02], [0.9, 0.05]]), "top_p": 0.99},
    "top_k first": {"top_k": 300, "top_p": 0.8, "min_p": 2e-3, "order": "top_k_first"},
}


@pytest.fixture(params=WARPS)
def kernels(request):
    module = emulation.module(request.param)
    with native.emulated(module):
        yield module
    module.configure()


def request_of(rows, seed=0, **options):
    g = torch.Generator().manual_seed(seed)
    keys = {
        "seeds": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g),
        "positions": torch.randint(0, 2**40, (rows,), generator=g),
    }
    return PLAIN._replace(**(keys if "token_ids" not in options else {}), **options)


def logits_of(rows, vocab, dtype=torch.float32, scale=3.0, seed=0):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def random_case(seed):
    """Logits with ties, -inf, NaN and odd strides, and a request with anything on; T = 0 among the rows."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, vocab = 3, rng.choice([1, 65, 1000, 4097, 9001])
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    x = torch.randn(rows, vocab + 3, generator=g) * rng.choice([0.1, 1.0, 8.0])
    x = x.round() if rng.random() < 0.4 else x
    if rng.random() < 0.4:
        x = torch.where(torch.rand(x.shape, generator=g) < rng.choice([0.1, 0.9]), -torch.inf, x)
    x = x.to(dtype)[:, rng.choice([0, 3]) :][:, :vocab]
    if rng.random() < 0.3:
        x[1, rng.randrange(vocab)] = rng.choice([float("nan"), float("inf")])
    adjusted = x.float() + torch.randn(rows, vocab, generator=g) if rng.random() < 0.3 else None

    def on(probability):
        return rng.random() < probability

    def each(values, dtype=torch.float32):
        return (
            rng.choice(values)
            if on(0.5)
            else torch.tensor([rng.choice(values) for _ in range(rows)], dtype=dtype)
        )

    mask = None
    if on(0.3):
        mask = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), generator=g).to(torch.int32)
    options = {
        "temperature": each([1.0, 0.0, 0.7, 2.0]),
        "top_k": each([1, 5, 300, 0, vocab], torch.int64) if on(0.4) else 0,
        "top_p": each([0.1, 0.9, 0.999, 1.0]) if on(0.5) else 1.0,
        "min_p": each([0.0, 0.05, 1e-4, 1.0]) if on(0.3) else 0.0,
        "top_n_sigma": each([0.5, 2.0, float("inf")]) if on(0.3) else float("inf"),
        "thresholds": torch.tensor([[rng.choice([0, 1e-4, 0.02]) for _ in range(3)] for _ in range(rows)])
        if on(0.3) else None,
        "token_bitmask": mask, "order": rng.choice(FILTER_ORDERS), "gumbel": on(0.3), "raw": on(0.7),
        "entropy": on(0.5), "rank": on(0.5), "support": rng.choice([0, 7, 6000]),
    }  # fmt: skip
    if on(0.3):
        options["token_ids"] = torch.randint(-1, vocab + 1, (rows,), generator=g)
    if on(0.5):
        shares = [[rng.choice([0.05, 0.5, 0.95, 1.0]), rng.choice([0.001, 0.1, 1.0])] for _ in range(rows)]
        options["band"] = torch.tensor(shares)
    return x, adjusted, request_of(rows, seed, **options)


def assert_same(got, want, exact=True):
    for name, a, b in zip(want._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if b is None:
            continue
        if exact or not b.is_floating_point():
            assert torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)), (name, a, b)
        else:
            assert torch.allclose(a, b, rtol=3e-5, atol=3e-5, equal_nan=True), (name, a, b)


@pytest.mark.parametrize("seed", range(24))
def test_means_what_the_reference_does(seed):
    """Tokens and kept sets too: no draw of these seeds is so close that a rounding decides it."""
    kernels = emulation.module(WARPS[seed % 2])
    x, adjusted, request = random_case(seed)
    kernels.configure(seed % 3, (1 << 20, 2)[seed % 2])
    with native.emulated(kernels):
        got = kernels_of.forward(SamplingCall(x, adjusted, request))
    kernels.configure()
    assert_same(got, reference.forward(SamplingCall(x, adjusted, request)), exact=False)


@pytest.mark.parametrize("name", FILTERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_bits_do_not_depend_on_schedule_warp_or_alignment(name, dtype):
    """Whatever the order of threads and blocks, the size of a warp, and where a row starts."""
    x = logits_of(3, 9001, dtype)
    shifted = torch.empty(3, 9003, dtype=dtype)[:, 1:-1].copy_(x)
    request = request_of(3, temperature=0.8, rank=True, support=400, **FILTERS[name])
    runs = []
    for warp, schedule, logits in ((32, (0,), x), (32, (1, 2), shifted), (64, (2,), x)):
        kernels = emulation.module(warp)
        kernels.configure(*schedule)
        with native.emulated(kernels):
            runs.append(kernels_of.forward(SamplingCall(logits, None, request)))
        kernels.configure()
    for run in runs[1:]:
        assert_same(run, runs[0])


HALF = 0.7  # a block of half the threads a row, where two of three rows' blocks have room


def clustered(kernels, size, call, seed=0):
    """The results where the device has room for `size` blocks a row, and for no more."""
    kernels.configure(seed, room=int(size * len(call.logits)))
    with native.emulated(kernels):
        stats = kernels_of.forward(call)
    kernels.configure()
    return stats


@pytest.mark.parametrize("name", FILTERS)
def test_bits_do_not_depend_on_the_blocks_of_a_row(name):
    """A row is read by half a block, 1, 2, 4 or 8, in any schedule: tokens, sets, masses and all."""
    kernels = emulation.module(32)
    dtype, size = (
        (torch.bfloat16, torch.float32, torch.float16)[len(name) % 3],
        (8, 2, 4)[[*FILTERS].index(name) % 3],
    )
    options = {"temperature": 0.8, "rank": True, "support": 400, "gumbel": name in ("top_p", "all")}
    call = SamplingCall(logits_of(3, 5001, dtype), None, request_of(3, **options, **FILTERS[name]))
    alone = clustered(kernels, 1, call)
    assert_same(clustered(kernels, size, call, size), alone)
    assert_same(clustered(kernels, HALF, call, size), alone)


@pytest.mark.parametrize("seed", range(40, 46))
def test_rows_of_any_kind_are_shared_by_blocks(seed):
    """Ties, -inf, NaN, odd strides and T = 0; more blocks than groups of tokens too."""
    call = SamplingCall(*random_case(seed))
    kernels = emulation.module(32)
    alone, shared = clustered(kernels, 1, call), clustered(kernels, (2, 4, 8)[seed % 3], call, seed)
    assert_same(shared, alone)


def test_bits_do_not_depend_on_other_rows(kernels):
    """Alone, where nothing is filtered and the kernel is another, as in a batch whose other rows are."""
    x = logits_of(3, 5000, torch.float16)
    batch = request_of(3, top_p=torch.tensor([1.0, 0.9, 0.5]), temperature=torch.tensor([0.7, 1.0, 0.0]))
    together = kernels_of.forward(SamplingCall(x, None, batch))
    for r in range(3):
        row = slice(r, r + 1)
        alone = batch._replace(
            top_p=float(batch.top_p[r]), temperature=float(batch.temperature[r]), seeds=batch.seeds[row],
            positions=batch.positions[row],
        )  # fmt: skip
        got = kernels_of.forward(SamplingCall(x[row].clone(), None, alone))
        assert_same(got, type(together)(*(None if v is None else v[row] for v in together)))


def test_tiles_have_the_bits_of_the_whole(kernels):
    x = logits_of(2, 9001)
    request = request_of(2, top_p=0.9, temperature=1.3)
    scratch = Scratch.of(2, 9001, request, x.device)
    for start, stop in ((0, 4096), (4096, 9001)):
        tile = x[:, start:stop].contiguous()
        kernels_of.tile_statistics(tile, None, start, request, scratch)
    got = kernels_of.finish(x, None, request, scratch)
    assert_same(got, kernels_of.forward(SamplingCall(x, None, request)))


def test_skipped_rows_are_neither_read_nor_written(kernels):
    x = logits_of(3, 300)
    x[1] = torch.nan
    request = request_of(3, top_k=5, skip=torch.tensor([False, True, False]))
    scratch = Scratch.of(3, 300, request, x.device)
    _, partials, group_max = scratch
    partials.fill_(-5.0), group_max.fill_(-5.0)
    kernels_of.tile_statistics(x, None, 0, request, scratch)
    assert (partials[1] == -5).all() and (group_max[1] == -5).all() and not (partials[::2, 0, 0] == -5).any()
    got = kernels_of.finish(x, None, request, scratch)
    keys = {"seeds": request.seeds[::2].contiguous(), "positions": request.positions[::2].contiguous()}
    rest = kernels_of.forward(SamplingCall(x[::2], None, request._replace(skip=None, **keys)))
    assert torch.equal(got.token_ids[::2], rest.token_ids)


def test_a_tile_that_starts_within_a_split_is_refused(kernels):
    scratch = Scratch.of(1, 5000, request_of(1), torch.device("cpu"))
    with pytest.raises(ValueError, match="vocab_start must be a multiple of 4096 from 0 to 4936, got 64"):
        kernels_of.tile_statistics(logits_of(1, 64), None, 64, request_of(1), scratch)


# (largest logit, temperature): exp((z - max) / T) is one fused step from z; in the last two that is too far
FAR = [(1.0, 1.0), (-300.0, 1.0), (417.0, 0.7), (20000.0, 100.0), (60000.0, 300.0), (1e6, 5e3), (1e38, 1e36)]


def errors_far_from_zero(dtype, center, temperature):
    """Of log-probabilities: in a flat row relative to 1 + their size, in a row that has p -> 1 to theirs."""
    center = torch.tensor(center).to(dtype).double()
    step = center.abs() * 2.0 ** (-7 if dtype == torch.bfloat16 else -10)  # the next numbers are no nearer
    steps = torch.randint(0, 20, (64,), generator=torch.Generator().manual_seed(3)).sort().values
    flat = center - (step * steps)
    peaked = torch.full((64,), center) - step * torch.ceil(11 * temperature / step)
    peaked[0], peaked[1:8] = center, -torch.inf  # vectors of eight are summed in fp32
    x = torch.stack([flat, peaked]).to(dtype)
    worst = [0.0, 0.0]
    for token in (0, 9, 63):
        ids = torch.tensor([token, 0])
        got = kernels_of.forward(SamplingCall(x, None, request_of(2, token_ids=ids, temperature=temperature)))
        for lp, t in ((got.raw_logprobs, 1.0), (got.tempered_logprobs, temperature)):
            want = (x.double() / t).log_softmax(-1).gather(1, ids[:, None])[:, 0]
            # of a peak that is all there is, nothing is left
            error = (lp - want).abs() / (want.abs() + torch.tensor([1.0, 1e-9]))
            error = error.nan_to_num(torch.inf)
            worst = [max(a, float(b)) for a, b in zip(worst, error, strict=True)]
    return worst


@pytest.mark.parametrize(
    "dtype, center, temperature",
    [
        (dtype, *case)
        for dtype in (torch.bfloat16, torch.float16)
        for case in FAR
        if case[0] < torch.finfo(dtype).max
    ],
)
def test_logits_far_from_zero(kernels, dtype, center, temperature):
    flat, peaked = errors_far_from_zero(dtype, center, temperature)
    assert flat < 1e-6 and peaked < 1e-5, (flat, peaked)


def light_row(dtype):
    """A peak, three tokens near it, and thousands with less than 2**-18 of its mass each."""
    x = 7 - torch.randint(0, 2, (20003,), generator=torch.Generator().manual_seed(5)) / 2
    x[777], x[9000:9003] = 20, 16
    return x.to(dtype).expand(8, -1)


def kept_counts(x, **options):
    request = request_of(len(x), top_p=torch.linspace(0.9, 0.97, len(x)), **options)
    return [
        backend.forward(SamplingCall(x, None, request)).kept_count.tolist()
        for backend in (kernels_of, reference)
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_tokens_of_little_mass_decide_a_nucleus(dtype):
    """Counted exactly: those of groups without any larger token by a shorter way."""
    x = light_row(dtype)
    everything = torch.full((len(x), -(-x.shape[1] // 32)), -1, dtype=torch.int32)
    with native.emulated(emulation.module(32)):
        for options in ({}, {"order": "joint", "min_p": 1e-7}, {"token_bitmask": everything}):
            got, want = kept_counts(x, **options)
            assert got == want and len(set(want)) > 2, options


def threshold_row(dtype):
    """Tokens that a threshold keeps, each in a group whose others it drops but have more mass together."""
    x = torch.full((1, 20032), 5.0)
    x[0, ::64], x[0, 9000:9100], x[0, 777] = 7.0, 13.0, 20.0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_threshold_drops_is_in_no_share(dtype):
    call = SamplingCall(threshold_row(dtype), None, request_of(1, min_p=1e-6, top_p=0.95))
    with native.emulated(emulation.module(32)):
        counts = [backend.forward(call).kept_count.tolist() for backend in (kernels_of, reference)]
    assert counts == [[42], [42]]


def crowded_row(vocab=1 << 17):
    """Where nearly every vector has a kept token: more than a block's short lists hold."""
    return (torch.arange(vocab) * 7919 % 100 / 50).to(torch.bfloat16).expand(2, -1)


def crowded_call():
    return SamplingCall(crowded_row(), None, request_of(2, top_p=0.9, rank=True))


@pytest.mark.slow
@pytest.mark.parametrize("size", [0.5, 1, 8])
def test_a_row_with_too_many_kept_tokens_for_the_lists(size):
    """By half a block and by one they do not fit, by a cluster they do."""
    got = clustered(emulation.module(32), size, crowded_call())
    want = reference.forward(crowded_call())
    assert got.kept_count.tolist() == want.kept_count.tolist() and got.rank.tolist() == want.rank.tolist()


def far_logits_are_right():
    worst = [errors_far_from_zero(torch.bfloat16, *case) for case in FAR]
    return all(flat < 1e-6 and peaked < 1e-5 for flat, peaked in worst)


def light_mass_is_right():
    got, want = kept_counts(light_row(torch.bfloat16))
    return got == want


def lists_are_right():
    """Of rows one after the other, each of fewer tokens and likelier ones, and for ranks far below them."""
    x = logits_of(3, 5000, torch.bfloat16)
    x[2] += 8 * (torch.arange(5000) < 40)
    ids = torch.tensor([7, 1234, 4321])
    requests = [
        request_of(3, top_k=torch.tensor([70, 40, 5]), rank=True, token_ids=ids),
        request_of(3, top_p=0.95, rank=True, token_ids=ids),
        request_of(3, top_p=0.9, token_ids=ids, order="joint", top_k=1000, min_p=1e-9),
    ]
    for request in requests:
        call = SamplingCall(x, None, request)
        got, want = kernels_of.forward(call), reference.forward(call)
        same = torch.equal(got.kept_count, want.kept_count)
        if not same or (want.rank is not None and not torch.equal(got.rank, want.rank)):
            return False
    return True


IN_STATISTICS = far_logits_are_right, "sampling/statistics.cuh"
WALK, SEARCH, FILTER, KEPT = (f"sampling/{name}.cuh" for name in ("walk", "search", "filter", "kept"))
IN_SEARCH, IN_WALK = (light_mass_is_right, SEARCH), (light_mass_is_right, WALK)
LIGHT = "own += light_mass(floor, heavy);"
FAULTS = {
    "the factor of a fused step is forgotten":
        (*IN_STATISTICS, "sums[kSumOfZ] /= static_cast<double>(factors.of_z);", ""),
    "fused however far": (*IN_STATISTICS, "kWide || is_far(center, scale)", "kWide"),
    "light mass is left out": (*IN_SEARCH, LIGHT, ";"),
    "light mass is counted twice": (*IN_SEARCH, LIGHT, f"{LIGHT} {LIGHT}"),
    "a batch of light mass too few":
        (*IN_WALK, "if (base >= place.last)", "if (base + kGroups >= place.last)"),
    "the last tokens that wait are not weighed":
        (*IN_SEARCH, "if (lane < count) weigh(waiting(lane).z());", ";"),
    "a list that begins higher is read":
        (lists_are_right, WALK, "list.from[warp()]) <= lowest;", "list.from[warp()]) > -1e9f;"),
    "the list of the row before is read":
        (lists_are_right, KEPT, "Filter<T>::forget_list(shared);", ""),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name):
    is_right, header, *fault = FAULTS[name]
    broken = emulation.build_module(
        32, {header: tuple(fault)}, sources=r"sampling(_bf16)?$"
    )  # what is asked of each is of bf16
    for kernels, planted in ((emulation.module(32), False), (emulation.load(broken), True)):
        kernels.configure(1, 1)  # a row after the other
        with native.emulated(kernels):
            assert is_right() == (not planted)
        kernels.configure()


def in_a_process(found, *arguments):
    """Whether `found` finds a fault, or its process ends: a division by 0, a write anywhere, no end."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of a process that has threads: the child asks none of them
        child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(20)
        status = 1
        try:
            status = 0 if found(*arguments) else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 2


SOME_ROWS = {"top_p": torch.tensor([1.0, 0.9, 0.9])}
REDRAWN = {"temperature": 2.0, "top_p": 0.1}  # whose first token is not among the kept
BARRIERS = {
    "the warps' maxima are written": ("sampling/statistics.cuh", {}),
    "the warps' sums and winners are written": ("sampling/statistics.cuh", {}),
    "the warps' parts are written": (SEARCH, REDRAWN),
    "the blocks' parts are written": (SEARCH, REDRAWN),
    "the warps' sums are written": (SEARCH, {"min_p": 0.02}),
    "the blocks' sums are written": (SEARCH, {"min_p": 0.02}),
    "the warps' best are written": (SEARCH, {"gumbel": True, **REDRAWN}),
    "the blocks' best are written": (SEARCH, {"gumbel": True, **REDRAWN}),
    "the bins are empty": (SEARCH, {"top_p": 0.9}),
    "the bins are full": (SEARCH, {"top_p": 0.9}),
    "the cluster's bins are full": (SEARCH, {"top_p": 0.9}),
    "the last tie is written": (FILTER, {"top_k": 500, "support": 600}),
    "the lowest key is written": (FILTER, SOME_ROWS),
    "the change is written": (FILTER, {"top_p": 0.9}),
    "the token is written": (KEPT, REDRAWN),
    "the summary is written": (KEPT, {"top_p": 0.9}),
    "nobody reads of this row any more": (KEPT, {"top_p": 0.9}),
}


def test_every_barrier_has_its_fault():
    headers = sorted((emulation.CSRC / "include/rlkernel/sampling").glob("*.cuh"))
    found = [
        c for p in headers for c in re.findall(r"(?:syncthreads|barrier)\(\);  // ([^:\n]+)", p.read_text())
    ]
    assert sorted(found) == sorted(BARRIERS)


@pytest.mark.parametrize("barrier", BARRIERS)
def test_a_missing_barrier_is_found(barrier):
    """In some schedule: a row is another, blocks use what has left, or threads wait for ever."""
    header, options = BARRIERS[barrier]
    kernels = emulation.module(32)
    x = logits_of(3, 3000).round()
    x[2, 5] = torch.nan
    call = SamplingCall(x, None, request_of(3, **options))
    want = clustered(kernels, 1, call)

    def found(seed, size):
        # one cluster, which reads a row after the other
        kernels.configure(seed, 1, size * 3 if size > 1 else 0)
        try:
            with native.emulated(kernels):
                assert_same(kernels_of.forward(call), want)
        except (AssertionError, RuntimeError):
            return True
        return False

    with emulation.left_out(kernels, header, barrier):
        assert any(in_a_process(found, seed, size) for seed in range(1, 7) for size in (1, 2))
