"""What only the Triton kernels of sampling promise: no layout, dtype, tile or buffer decides a bit."""

import pytest
import torch
from backends import NO_INTERPRETER, TRITON_DEVICES
from bitwise import assert_equal

triton = pytest.importorskip("triton", reason="Triton is not installed")
if not TRITON_DEVICES:
    pytest.skip(NO_INTERPRETER, allow_module_level=True)
import triton.language as tl  # noqa: E402

from rlkernel.calls.sampling import FILTER_ORDERS, Domain, Sampling, SamplingCall, Scratch  # noqa: E402
from rlkernel.reference import sampling as reference  # noqa: E402
from rlkernel.reference import sampling_stream as stream  # noqa: E402
from rlkernel.triton_ops import sampling, sampling_kernels, sampling_random  # noqa: E402

ON_EVERY_DEVICE = pytest.mark.parametrize("device", TRITON_DEVICES)
INF = float("inf")


def request(rows, device, **options):
    g = torch.Generator().manual_seed(rows)
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=g).to(device)
    values = {
        "seeds": seeds, "positions": torch.arange(rows, device=device), "raw": True, "entropy": True,
        "rank": True, "support": 64, "softmax": True,
    }  # fmt: skip
    return Sampling(**values | options)


def mixed(rows, device, **options):
    """Rows of every kind: whole, greedy, and under each filter."""
    cycle = torch.arange(rows) % 6
    values = {
        "temperature": torch.tensor([1.0, 0.0, 0.7, 1.5, 1.0, 0.9])[cycle],
        "top_k": torch.tensor([0, 5, 40, 0, 2500, 0])[cycle],
        "top_p": torch.tensor([1.0, 0.5, 0.9, 0.8, 0.999, 1.0])[cycle],
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.0, 0.0, 0.02])[cycle],
        "top_n_sigma": torch.tensor([INF, 1.0, INF, 2.5, INF, INF])[cycle],
    }
    return request(rows, device, **{name: x.to(device) for name, x in values.items()}, **options)


def check_same(got, want, unless=()):
    for name, a, b in zip(want._fields, got, want, strict=True):
        if b is not None and name not in unless:
            assert_equal(name, a, b)


def check_close(got, want):
    """Sets, counts and tokens are equal, floats within the rounding of fp32."""
    for name, a, b in zip(want._fields, got, want, strict=True):
        if b is None or not b.is_floating_point():
            assert (a is None) == (b is None) and (b is None or torch.equal(a, b)), (name, a, b)
        else:
            torch.testing.assert_close(
                a, b, rtol=1e-5, atol=3e-6, equal_nan=True, msg=lambda m, n=name: n + m
            )


@ON_EVERY_DEVICE
def test_layout_and_dtype_change_no_bit(device):
    """Rows at any address, loaded 16 bytes at a time or entry by entry, in bf16 or as the same fp32."""
    rows, vocab = 6, 4128
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(3)) * 2).to(device)
    logits = logits.to(torch.bfloat16)
    words = torch.arange(rows * 129, device=device).view(rows, 129) * 123456789
    asked = mixed(rows, device, token_bitmask=(words & 0x7FFFFFFF).to(torch.int32))
    want = sampling.forward(SamplingCall(logits, None, asked))
    check_same(sampling.forward(SamplingCall(logits.float(), None, asked)), want)
    buffer = torch.full((rows, vocab + 9), float("nan"), dtype=logits.dtype, device=device)
    check_same(sampling.forward(SamplingCall(buffer[:, 3 : 3 + vocab].copy_(logits), None, asked)), want)
    # z is the same, given apart and at another alignment
    buffer = torch.full((rows, vocab + 5), float("nan"), device=device)
    adjusted = buffer[:, 1 : 1 + vocab].copy_(logits)
    check_same(sampling.forward(SamplingCall(logits, adjusted, asked)), want)


@ON_EVERY_DEVICE
def test_tiles_leave_the_records_of_the_whole(device):
    rows, vocab = 3, 8200
    logits = (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(4)) * 3).to(device)
    forced = torch.tensor([0, 4100, 8199], device=device)
    for asked in (
        mixed(rows, device),
        mixed(rows, device, gumbel=True)._replace(rank=False),
        mixed(rows, device)._replace(seeds=None, positions=None, token_ids=forced),
    ):
        whole, tiled = (Scratch.of(rows, vocab, asked._replace(rank=True), logits.device) for _ in range(2))
        for x in (*whole[1:], *tiled[1:]):
            x.fill_(torch.nan)
        sampling.tile_statistics(logits, None, 0, asked, whole)
        for start in (4096, 0):
            tile = logits[:, start : start + 4096] if start == 0 else logits[:, start:].clone()
            sampling.tile_statistics(tile, None, start, asked, tiled)
        assert_equal("records", tiled.records, whole.records)
        assert_equal("group maxima", tiled.group_max, whole.group_max)
        assert not whole.records.isnan().any() and not whole.group_max.isnan().any()


# top_k, top_p, joint -> how many of the tokens 65, 3, 10, 40, whose masses are 1, 1/2, 1/4 and 1/4
EXACT = [
    (0, 0.5, False, 1), (0, 0.75, False, 2), (0, 0.75001, False, 3), (0, 0.875, False, 3),
    (0, 0.8751, False, 4), (1, 1.0, False, 1), (2, 1.0, True, 2), (3, 1.0, False, 3), (4, 1.0, False, 4),
    (2, 0.6, False, 1), (2, 0.6, True, 2), (3, 0.9, False, 3), (3, 0.75, False, 2), (4, 0.5, True, 1),
]  # fmt: skip


@ON_EVERY_DEVICE
@pytest.mark.parametrize("room", [sampling.ROOM, 2])
def test_sets_whose_masses_are_powers_of_two(device, room, monkeypatch):
    """A nucleus ends where the mass before a token is the bound, not where it exceeds it; ties end by id."""
    monkeypatch.setattr(sampling, "ROOM", room)
    logits = torch.full((len(EXACT), 4130), -60.0)
    logits[:, [65, 3, 10, 40]] = torch.tensor([0.0, -1.0, -2.0, -2.0])
    k, p, joint, want = (torch.tensor(column) for column in zip(*EXACT, strict=True))
    for order in (False, True):
        rows = joint == order
        asked = request(
            int(rows.sum()), device, temperature=1.4426950408889634, top_k=k[rows].to(device),
            top_p=p[rows].to(device), order="joint" if order else "sequential", support=5,
        )  # fmt: skip
        stats = sampling.forward(SamplingCall(logits[rows].to(device), None, asked))
        assert stats.kept_count.tolist() == want[rows].tolist()
        sets = [sorted([65, 3, 10, 40][:n]) + [-1] * (5 - n) for n in want[rows].tolist()]
        assert stats.support.tolist() == sets
        total = torch.tensor([0.0, 0.5, 0.75, 0.875, 1.0])[want[rows]]
        torch.testing.assert_close(stats.kept_mass.cpu(), total, rtol=1e-6, atol=0)


@ON_EVERY_DEVICE
def test_a_small_buffer_of_candidates_changes_nothing(device, monkeypatch):
    """More candidates than the registers hold: survivors are read again and again, with the same result."""
    vocab = 4500
    g = torch.Generator().manual_seed(6)
    logits = torch.randn(4, vocab, generator=g) * 0.5
    logits[2] = (logits[2] * 4).round()  # thousands of ties at few values
    logits[3] = 0.0
    asked = request(
        4, device, support=0, top_k=torch.tensor([0, 3000, 2222, 4000], device=device),
        top_p=torch.tensor([0.9, 0.5, 0.9, 0.25], device=device),
    )  # fmt: skip
    want = sampling.forward(SamplingCall(logits.to(device), None, asked))
    check_close(want, reference.forward(SamplingCall(logits.to(device), None, asked)))
    monkeypatch.setattr(sampling, "ROOM", 64)
    check_same(sampling.forward(SamplingCall(logits.to(device), None, asked)), want)


@ON_EVERY_DEVICE
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_the_reference_agrees(device, order):
    g = torch.Generator().manual_seed(8)
    for vocab, dtype, scale in (
        (1, torch.float32, 1.0),
        (70, torch.float16, 9.0),
        (4200, torch.bfloat16, 3.0),
    ):
        rows = 12
        logits = (torch.randn(rows, vocab, generator=g) * scale).to(dtype)
        if vocab > 1:
            logits[3, ::2] = -INF
            logits[7, 1:] = -INF
            logits[8, vocab // 2] = float("nan")
            logits[9] = -INF
            logits[10, -1] = INF
        logits = logits.to(device)
        adjusted = None if dtype == torch.float16 else logits.float() * 0.5
        mask = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab // 32)), generator=g).to(torch.int32)
        for options in (
            {"order": order, "gumbel": order != "joint"},
            {"order": order, "token_bitmask": mask.to(device), "support": vocab},
        ):
            asked = mixed(rows, device, **options)
            check_close(
                sampling.forward(SamplingCall(logits, adjusted, asked)),
                reference.forward(SamplingCall(logits, adjusted, asked)),
            )
        forced = torch.randint(-1, vocab + 1, (rows,), generator=g).to(device)
        asked = mixed(rows, device, order=order)._replace(seeds=None, positions=None, token_ids=forced)
        check_close(
            sampling.forward(SamplingCall(logits, adjusted, asked)),
            reference.forward(SamplingCall(logits, adjusted, asked)),
        )


@ON_EVERY_DEVICE
def test_rows_to_skip_are_neither_read_nor_written(device, poison):
    logits = torch.randn(4, 200, generator=torch.Generator().manual_seed(9)).to(device)
    want = sampling.forward(SamplingCall(logits, None, mixed(4, device)))
    skip = torch.tensor([False, True, True, False], device=device)
    holes = logits.masked_fill(skip[:, None], float("nan"))
    got = sampling.forward(SamplingCall(holes, None, mixed(4, device, skip=skip)))
    check_same(type(got)(*(x[~skip] for x in got)), type(want)(*(x[~skip] for x in want)))
    for name, x in zip(got._fields, got, strict=True):
        if x.is_floating_point():
            assert x[skip].isnan().all(), f"{name} of a row to skip was written"


@ON_EVERY_DEVICE
def test_no_logits_are_needed_where_nothing_is_read_again(device):
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(10)).to(device)
    asked = request(3, device, rank=False, support=0)
    scratch = Scratch.of(3, 5000, asked, logits.device)
    sampling.tile_statistics(logits, None, 0, asked, scratch)
    check_same(
        sampling.finish(None, None, asked, scratch), sampling.forward(SamplingCall(logits, None, asked))
    )


@triton.jit
def bits_kernel(seeds, positions, indices, out, uniform, DOMAIN: tl.constexpr, N: tl.constexpr):
    i = tl.arange(0, N)
    seed, position = sampling_random.key_of(seeds, positions, 1)
    high, low = sampling_random.random_words(DOMAIN, seed, position, tl.load(indices + i))
    tl.store(out + i, high.to(tl.int64))
    tl.store(out + N + i, low.to(tl.int64))
    tl.store(uniform, sampling_random.row_uniform(DOMAIN, seed, position))


@ON_EVERY_DEVICE
@pytest.mark.parametrize("domain", [Domain.GROUP, Domain.XTC, 2**31 + 5])
def test_bits_are_those_of_the_stream(device, domain):
    g = torch.Generator().manual_seed(11)
    seeds, positions = torch.randint(-(2**63), 2**63 - 1, (2, 2), generator=g).to(device)
    indices = torch.randint(0, 2**31 - 1, (256,), generator=g).to(device)
    out = torch.empty(2, 256, dtype=torch.int64, device=device)
    uniform = torch.empty(1, dtype=torch.float64, device=device)
    bits_kernel[(1,)](seeds, positions, indices, out, uniform, DOMAIN=domain, N=256)
    assert torch.equal(out, torch.stack(stream.bits(domain, seeds[1:], positions[1:], indices)))
    assert torch.equal(uniform, stream.row_uniform(domain, seeds[1:], positions[1:]))


@triton.jit
def words_kernel(seeds, positions, tokens, out, N: tl.constexpr):
    i = tl.arange(0, N)
    seed, position = sampling_random.key_of(seeds, positions, 1)
    words = sampling_random.murmur3(seed, position, tl.load(tokens + i))
    tl.store(out + i, words.to(tl.int64))


@ON_EVERY_DEVICE
def test_words_are_those_of_the_stream(device):
    g = torch.Generator().manual_seed(11)
    seeds = torch.randint(-(2**63), 2**63 - 1, (2,), generator=g).to(device)
    positions = torch.randint(0, 2**40, (2,), generator=g).to(device)
    tokens = torch.randint(0, 2**31 - 1, (256,), generator=g).to(device)
    out = torch.empty_like(tokens)
    words_kernel[(1,)](seeds, positions, tokens, out, N=256)
    assert torch.equal(out, stream.murmur3(seeds[1:], positions[1:], tokens))


@triton.jit
def masses_kernel(e, out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, sampling_kernels.masses(tl.load(e + i)))


@ON_EVERY_DEVICE
def test_masses_are_the_nearest_integers(device):
    """Also where 2**40 e is a half, or too large to add a half in fp32."""
    g = torch.Generator().manual_seed(12)
    e = torch.exp2(-44 * torch.rand(4096, generator=g))
    halves = (torch.arange(1024) * 8191 + 0.5) * 2.0**-40
    e = torch.cat([e[:3070], halves, torch.tensor([0.0, 1.0])]).to(device)
    out = torch.empty(4096, dtype=torch.int64, device=device)
    masses_kernel[(1,)](e, out, N=4096, enable_fp_fusion=False)
    assert torch.equal(out, (e.double() * 2.0**40).round().to(torch.int64))
