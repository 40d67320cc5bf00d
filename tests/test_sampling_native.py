"""What is special to sampling's CPU kernels: threads, tiles, instruction sets, rows that are left out, and
the ways in which they find a nucleus without sorting."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from bitwise import assert_equal

from rlkernel import native
from rlkernel.calls.sampling import FILTER_ORDERS, SampleStats, Sampling, SamplingCall, Scratch
from rlkernel.native import sampling as kernel
from rlkernel.reference import sampling as reference

pytestmark = pytest.mark.usefixtures("poison")

INF = float("inf")
PLAIN = Sampling(raw=True, entropy=True, rank=True, support=64, softmax=True)
FILTERS = {
    "plain": {},
    "tempered": {"temperature": 0.7},
    "top_p": {"top_p": 0.95},
    "top_k": {"top_k": 50},
    "both": {"top_p": 0.9, "top_k": 50, "temperature": 0.8},
    "joint": {"top_p": 0.9, "top_k": 50, "order": "joint"},
    "min_p": {"min_p": 0.05},
    "sigma": {"top_n_sigma": 1.0},
    "gumbel": {"gumbel": True, "top_p": 0.5},
}


def request(rows: int, seed: int = 0, **options) -> Sampling:
    g = torch.Generator().manual_seed(seed)
    seeds, positions = (torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g) for _ in range(2))
    return PLAIN._replace(seeds=seeds, positions=positions, **options)


def logits(rows: int, vocab: int, scale: float = 3.0, seed: int = 0, dtype=torch.float32) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=g) * scale).to(dtype)


def assert_same(got: SampleStats, want: SampleStats, rows=slice(None)) -> None:
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is not None and b is not None:
            assert_equal(name, a[rows], b[rows])


def check(x: torch.Tensor, z: torch.Tensor | None, sampling: Sampling) -> SampleStats:
    """Tokens, sets and ranks are the reference's, numbers nearly."""
    got, want = kernel.forward(SamplingCall(x, z, sampling)), reference.forward(SamplingCall(x, z, sampling))
    for name, a, b in zip(got._fields, got, want, strict=True):
        assert (a is None) == (b is None), name
        if a is None or b is None:
            continue
        if a.dtype.is_floating_point:
            # torch's own fp32 log_softmax loses digits in rows of this length
            torch.testing.assert_close(
                a, b, rtol=2e-5, atol=2e-4, equal_nan=True, msg=lambda m, n=name: f"{n}: {m}"
            )
        else:
            assert_equal(name, a, b)
    return got


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", FILTERS)
def test_threads_do_not_change_bits(name, rows, threads):
    x, sampling = logits(rows, 33_000), request(rows, **FILTERS[name])
    threads(1)
    want = kernel.forward(SamplingCall(x, None, sampling))
    threads(4)
    assert_same(kernel.forward(SamplingCall(x, None, sampling)), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "both"])
def test_tiles_have_the_bits_of_the_whole(name, dtype):
    rows, vocab = 3, 4096 * 4 + 77
    x, sampling = logits(rows, vocab, dtype=dtype), request(rows, **FILTERS[name])
    scratch = Scratch.of(rows, vocab, sampling._replace(rank=True), x.device)
    for start, end in ((8192, vocab), (0, 4096), (4096, 8192)):
        kernel.tile_statistics(x[:, start:end], None, start, sampling, scratch)
    assert_equal(
        "group_max",
        scratch.group_max[:, :-1],
        x[:, : vocab // 64 * 64].float().unflatten(-1, (-1, 64)).amax(-1),
    )
    got = kernel.finish(x, None, sampling, scratch)
    assert_same(got, kernel.forward(SamplingCall(x, None, sampling)))


def test_unfiltered_rows_need_no_logits():
    x, sampling = logits(4, 9000), request(4, rank=False, support=0, temperature=torch.tensor([1, 0.5, 0, 2]))
    scratch = Scratch.of(4, 9000, sampling, x.device)
    assert scratch.group_max is None
    kernel.tile_statistics(x, None, 0, sampling, scratch)
    assert_same(kernel.finish(None, None, sampling, scratch), kernel.forward(SamplingCall(x, None, sampling)))


def test_bits_do_not_depend_on_strides():
    wide = logits(4, 5100)
    x, sampling = wide[:, 3:5003], request(4, **FILTERS["both"])
    assert_same(
        kernel.forward(SamplingCall(x, None, sampling)),
        kernel.forward(SamplingCall(x.contiguous(), None, sampling)),
    )
    z = logits(4, 5050, seed=1)[:, 7:5007]
    assert_same(
        kernel.forward(SamplingCall(x, z, sampling)),
        kernel.forward(SamplingCall(x, z.contiguous(), sampling)),
    )


def test_skipped_rows_are_neither_read_nor_written():
    x = logits(4, 5000)
    skip = torch.tensor([False, True, False, True])
    sampling = request(4, **FILTERS["both"])
    scratch = Scratch.of(4, 5000, sampling, x.device)
    _, partials, group_max = scratch
    partials.fill_(torch.nan), group_max.fill_(torch.nan)
    kernel.tile_statistics(x, None, 0, sampling._replace(skip=skip), scratch)
    assert partials[skip].isnan().all() and group_max[skip].isnan().all()
    got = kernel.finish(x, None, sampling._replace(skip=skip), scratch)
    assert_same(got, kernel.forward(SamplingCall(x, None, sampling)), rows=~skip)
    assert got.tempered_logprobs[skip].isnan().all()  # as the poison left it


@pytest.mark.parametrize("vocab", [1, 2, 63, 64, 65, 4095, 4097, 20_000])
def test_agrees_with_the_reference(vocab):
    """Every option at random, with ties, -inf, NaN, greedy rows, forced tokens and a bitmask."""
    for seed in range(6):
        r, rows = random.Random(vocab * 100 + seed), 5
        x = logits(
            rows,
            vocab,
            r.choice([0.1, 1, 3, 30]),
            seed,
            r.choice([torch.float32, torch.bfloat16, torch.float16]),
        )
        if r.random() < 0.4:
            x = (x * 2).round() / 2
        if r.random() < 0.4:
            x = x.masked_fill(logits(rows, vocab, seed=seed + 99) > 1, -INF)
        if r.random() < 0.3:
            x[1, r.randrange(vocab)] = r.choice([torch.nan, INF])
            x[2] = -INF
        z = x.float() + logits(rows, vocab, 1, seed + 7) if r.random() < 0.3 else None

        def each(*values, dtype=torch.float32, r=r, rows=rows):
            return r.choice(
                [
                    values[0],
                    r.choice(values),
                    torch.tensor([r.choice(values) for _ in range(rows)], dtype=dtype),
                ]
            )

        options = {
            "temperature": each(1.0, 0.0, 0.7, 30.0),
            "top_k": each(0, 1, 2, 50, vocab - 1, vocab, max(1, vocab // 3), dtype=torch.int64),
            "top_p": each(1.0, 0.95, 0.5, 1e-6, 0.9999999),
            "min_p": each(0.0, 0.0, 0.05, 1.0),
            "top_n_sigma": each(INF, INF, 1.0, 0.1),
            "thresholds": torch.tensor(
                [[r.choice([0, 0, 1e-3, 0.3]) for _ in range(3)] for _ in range(rows)]
            ),
            "order": r.choice(FILTER_ORDERS),
            "gumbel": r.random() < 0.3,
            "support": r.choice([0, 1, 64, vocab]),
        }
        sampling = request(rows, seed, **options)
        if r.random() < 0.3:
            g = torch.Generator().manual_seed(seed)
            words = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=g)
            sampling = sampling._replace(token_bitmask=words.to(torch.int32))
        if r.random() < 0.3:
            ids = torch.tensor([r.randrange(vocab) for _ in range(rows - 1)] + [r.choice([-1, vocab])])
            sampling = sampling._replace(token_ids=ids, seeds=None, positions=None)
        if r.random() < 0.5:
            shares = [[r.choice([0.05, 0.5, 0.95, 1.0]), r.choice([1e-3, 0.1, 1.0])] for _ in range(rows)]
            sampling = sampling._replace(band=torch.tensor(shares))
        check(x, z, sampling)


def misleading(vocab: int, high: bool) -> torch.Tensor:
    """A row whose sampled tokens say nothing of the others: the guess where its nucleus ends is far off."""
    x = logits(2, vocab, 1.0)
    groups = -(-vocab // 64)
    for place, group in enumerate(range(0, groups, groups // 256)):
        start = 64 * group + 16 * (place % 4)
        x[:, start : start + 16] += 6 if high else -6
    return x


@pytest.mark.parametrize(
    "case",
    {
        "normal": lambda v: logits(2, v),
        "flat": lambda v: logits(2, v, 0.3),
        "equal": lambda v: torch.zeros(2, v),
        "ascending": lambda v: logits(2, v).sort(-1).values,
        "few values": lambda v: logits(2, v).round(),
        "sample too high": lambda v: misleading(v, True),
        "sample too low": lambda v: misleading(v, False),
        "bfloat16": lambda v: logits(2, v, dtype=torch.bfloat16),
    }.items(),
    ids=lambda case: case[0],
)
def test_nucleus_of_many(case):
    """Rows that are too flat for their tokens to become candidates one and all."""
    x = case[1](40_000)
    for p in (0.5, 0.95, 0.9999999):
        check(x, None, request(2, top_p=p, support=0))


def test_zeros_of_both_signs_are_ties():
    """They are one value, so the lower id comes first."""
    for count in (30, 600):  # candidates that are sorted, and counted
        x = torch.full((1, 4200), -20.0)
        x[0, 7 : 7 + count] = torch.tensor([-0.0, 0.0]).repeat(count // 2)
        x[0, 3000] = 1.0
        for keep in (2, 3, 12, count - 1):
            got = check(x, None, request(1, top_k=keep, support=1024))
            assert got.support[0, : keep - 1].tolist() == list(range(7, 6 + keep))
            check(x, None, request(1, top_p=keep / count))


def test_nan_in_a_split_without_a_finite_logit():
    x = logits(3, 13_000)
    x[:, 4096:8192] = -INF
    x[1, 5000] = torch.nan
    assert check(x, None, request(3)).valid.tolist() == [True, False, True]
    mask = torch.full((3, -(-13_000 // 32)), -1, dtype=torch.int32)
    mask[:, 4096 // 32 : 8192 // 32] = 0  # hides the NaN, which counts all the same
    assert check(x, None, request(3, token_bitmask=mask)).valid.tolist() == [True, False, True]


def test_sum_that_is_too_rough_for_the_nucleus():
    """Equal tokens: a last one that stands just at the bound is decided by the exact mass."""
    x = torch.full((1, 640), -30.0)
    for count in (3, 10, 100):
        x[0, :count] = 0.0
        for kept in (1, count // 2, count - 1):
            for p in (kept / count, kept / count * (1 + 1e-6), kept / count * (1 - 1e-6)):
                check(x, None, request(1, top_p=p))


def results() -> list[torch.Tensor]:
    """What no instruction set may change."""
    kept = []
    for place, options in enumerate(FILTERS.values()):
        for dtype in native.DTYPES:
            got = kernel.forward(
                SamplingCall(logits(3, 20_011, dtype=dtype), None, request(3, seed=place, **options))
            )
            kept += [got.token_ids, got.kept_count, got.rank, got.support, got.valid]
    return kept


@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_instruction_sets_agree(isa, tmp_path):
    if isa not in native.extension().built()["cpu"]:
        pytest.skip("this processor's kernels are baseline only")
    code = "import torch, test_sampling_native as t; torch.save(t.results(), 'results.pt')"
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(native.__file__).parents[2])])
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"RLKERNEL_CPU_ISA": isa, "PYTHONPATH": paths},
        cwd=tmp_path,
        check=True,
    )
    for k, (a, b) in enumerate(zip(torch.load(tmp_path / "results.pt"), results(), strict=True)):
        assert_equal(f"{isa}, result {k}", a, b)
