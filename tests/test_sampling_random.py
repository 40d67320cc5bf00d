"""sampling: draws have the promised distribution, down to its tail, from the published stream."""

import math
import struct

import pytest
import torch
from backends import is_slow, running
from sampling_cases import FILTERS, PAIRS, bitmask, grid, per_row, sample, skip_unless_sampling, support

import rlkernel
from rlkernel.calls.sampling import Domain
from rlkernel.reference import sampling_stream as stream

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), PAIRS)
METHODS = pytest.mark.parametrize("method", ["grouped", "gumbel"])


def p_value(counts, probabilities):
    """Of a chi-square test; rare tokens are taken together, as many as give an expectation of 8."""
    expected = probabilities * counts.sum()
    order = expected.argsort(descending=True)
    counts, expected = counts[order].double(), expected[order]
    cells = [[0.0, 0.0]]
    for n, e in zip(counts.tolist(), expected.tolist(), strict=True):
        if cells[-1][1] >= 8:
            cells.append([0.0, 0.0])
        cells[-1][0] += n
        cells[-1][1] += e
    if cells[-1][1] < 8 and len(cells) > 1:
        n, e = cells.pop()
        cells[-1][0] += n
        cells[-1][1] += e
    if len(cells) == 1:
        return 1.0
    chi_square = sum((n - e) ** 2 / e for n, e in cells)
    half = torch.tensor([(len(cells) - 1) / 2, chi_square / 2], dtype=torch.float64)
    return torch.special.gammaincc(*half).item()


def check_draws(tokens, z, temperature, kept):
    """``tokens`` have the distribution of ``z`` [V] at T over the ids ``kept``."""
    probabilities = (z.double() / temperature).softmax(-1)
    inside = torch.zeros_like(z, dtype=torch.bool)
    inside[kept] = True
    probabilities = torch.where(inside, probabilities, 0)
    counts = torch.bincount(tokens, minlength=len(z))
    assert counts[~inside].sum() == 0
    p = p_value(counts, probabilities / probabilities.sum())
    assert p > 1e-4, f"p-value {p:.1e}"


# a group and a part; many groups, of which few matter; several splits
LOGITS = {
    "100": lambda: torch.linspace(-4, 0, 100).flip(0),
    "600": lambda: 2 * torch.randn(600, generator=torch.Generator().manual_seed(12)),
    "9000": lambda: torch.randn(9000, generator=torch.Generator().manual_seed(13)) * 3,
}


@pytest.mark.parametrize("filters", ["none", "top_k", "top_p", "min_p", "top_n_sigma", "all"])
@METHODS
@ON_EVERY_BACKEND
def test_distribution(backend, device, method, filters):
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    for name, rows in (("100", 3000), ("600", 2000), ("9000", 150)):
        z = LOGITS[name]()
        logits = z.expand(rows, len(z)).to(device)
        out = sample(
            backend, logits, temperature=0.8, method=method, return_support=len(z), **FILTERS[filters]
        )
        kept = support(out, 0) or range(len(z))
        check_draws(out.token_ids.cpu(), z, 0.8, kept)


@METHODS
@ON_EVERY_BACKEND
def test_distribution_over_positions_and_of_neighbouring_keys(backend, device, method):
    """Draws of one seed at successive positions, and pairs of draws of neighbouring keys, are independent."""
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    z = torch.randn(4, generator=torch.Generator().manual_seed(2))
    logits, count = z.expand(6000, 4).to(device), torch.arange(6000, device=device)
    for seeds, positions in ((5, count), (count, 2**40), (count * 2**32, 0), (-count, count)):
        tokens = sample(backend, logits, seeds=seeds, positions=positions, method=method).token_ids.cpu()
        check_draws(tokens, z, 1.0, range(4))
        pairs = tokens[:-1] * 4 + tokens[1:]
        p = z.double().softmax(-1)
        both = p_value(torch.bincount(pairs, minlength=16), (p[:, None] * p).flatten())
        assert both > 1e-4, f"{seeds} {positions}: p-value {both:.1e}"


@METHODS
@ON_EVERY_BACKEND
def test_same_tokens_as_the_reference(backend, device, method):
    """The stream is the same on every backend: fp32 against fp64 could differ in a token of a million."""
    logits, filters, t = grid(333, is_slow(backend, device), torch.float32, device, seed=3)
    options = {"temperature": t, "method": method, **per_row(filters, device)}
    g = torch.Generator().manual_seed(1)
    keys = torch.randint(-(2**63), 2**63 - 1, (2, len(logits)), generator=g).to(device)
    got = sample(backend, logits, seeds=keys[0], positions=keys[1], **options).token_ids
    with running("reference"):
        want = rlkernel.sample(logits.double(), seeds=keys[0], positions=keys[1], **options).token_ids
    assert torch.equal(got, want), f"rows {(got != want).nonzero().flatten().tolist()} differ"


@METHODS
@ON_EVERY_BACKEND
def test_distribution_under_a_bitmask(backend, device, method):
    if is_slow(backend, device):
        pytest.skip(f"{backend} on a CPU takes milliseconds a row")
    z = LOGITS["600"]()
    allowed = torch.rand(600, generator=torch.Generator().manual_seed(4)) < 0.4
    mask = bitmask(allowed[None]).to(device).expand(3000, -1)
    logits = z.expand(3000, 600).to(device)
    for filters in ({}, {"top_k": 12}):
        out = sample(backend, logits, token_bitmask=mask, method=method, return_support=600, **filters)
        assert bool(allowed[out.token_ids.cpu()].all())
        check_draws(out.token_ids.cpu(), z.masked_fill(~allowed, -torch.inf), 1.0, support(out, 0))


# The stream, bit by bit

# counter, key and words of Philox4x32-10, as Random123 publishes them
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_the_generator_is_philox(counter, key, want):
    words = [torch.tensor([int(w, 16) for w in x.split()]) for x in (counter, key, want)]
    assert torch.stack(stream.philox(tuple(words[0]), tuple(words[1]))).equal(words[2])


def philox(counter, key):
    """Philox4x32-10, written from its definition."""
    (a, b, c, d), (k, m) = counter, key
    for _ in range(10):
        p, q = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = q >> 32 ^ b ^ k, q & 0xFFFFFFFF, p >> 32 ^ d ^ m, p & 0xFFFFFFFF
        k, m = k + 0x9E3779B9 & 0xFFFFFFFF, m + 0xBB67AE85 & 0xFFFFFFFF
    return a, b, c, d


def bits(domain, seed, position, index=0):
    """The 64 bits of a draw, as an integer."""
    place, key = ((x & 0xFFFFFFFF, x >> 32 & 0xFFFFFFFF) for x in (position, seed))
    block = philox((index // 2, domain, *place), key)
    return block[2 * (index % 2)] << 32 | block[2 * (index % 2) + 1]


def test_bits_are_of_the_whole_key():
    keys = [(0, 0, 0), (1, 2, 3), (-1, 2**31, 151935), (2**62 + 12345, 2**40 + 7, 64), (-(2**63), -1, 2**31)]
    seeds, positions, indices = torch.tensor(keys, dtype=torch.int64).unbind(-1)
    for domain in (1, 9):
        high, low = stream.bits(domain, seeds, positions, indices)
        assert ((high << 32) | low).tolist() == [signed(bits(domain, *key)) for key in keys]
        uniform = [(bits(domain, *key[:2]) >> 11) * 2.0**-53 for key in keys]
        assert stream.row_uniform(domain, seeds, positions).tolist() == uniform


def signed(x):
    return x - 2**64 if x >= 2**63 else x


def inverse(words, key):
    """The counter that has these words under ``key``."""
    w = 0xFFFFFFFF
    (a, b, c, d), (k, m) = words, key
    for i in reversed(range(10)):
        low, high = k + i * 0x9E3779B9 & w, m + i * 0xBB67AE85 & w
        first, third = d * pow(0xD2511F53, -1, 2**32) & w, b * pow(0xCD9E8D57, -1, 2**32) & w
        a, b, c, d = first, third * 0xCD9E8D57 >> 32 ^ a ^ low, third, first * 0xD2511F53 >> 32 ^ c ^ high
    return a, b, c, d


def test_no_two_counters_of_a_seed_have_the_same_words():
    """The generator can be run backwards, so that a block's words tell its counter."""
    g = torch.Generator().manual_seed(20)
    counters = torch.randint(0, 2**32, (4, 500), generator=g)
    for key in ((0, 0), (2**32 - 1, 2**32 - 1), (123, 45678)):
        words = stream.philox(tuple(counters), tuple(torch.tensor(key)))
        for counter, block in zip(counters.T.tolist(), torch.stack(words, -1).tolist(), strict=True):
            assert list(inverse(block, key)) == counter


@ON_EVERY_BACKEND
def test_every_bit_of_seed_and_position_matters(backend, device):
    """Also the bits that MurmurHash3 of four words lets go: 0 and 4301219120936034648 had one stream."""
    slow = is_slow(backend, device)
    flips = [0, *(1 << i for i in range(0, 64, 9 if slow else 1)), 4301219120936034648]
    logits = torch.zeros(len(flips), 151 if slow else 15100, device=device)
    vocab = logits.shape[1]
    want = vocab * (1 - (1 - 1 / vocab) ** len(flips))  # distinct tokens expected of independent draws
    for seed in (0, 2**64 - 1):
        keys = torch.tensor([signed(seed ^ x) for x in flips], device=device)
        for arguments in ({"seeds": keys, "positions": 5}, {"seeds": 5, "positions": keys}):
            tokens = sample(backend, logits, **arguments).token_ids
            assert len(tokens.unique()) > want - 3


def lanes_of(bits):
    """[..., 16] 4-bit digits of the 64 random bits."""
    words = torch.stack(bits, -1)
    return ((words[..., None] >> torch.arange(0, 32, 4)) & 15).flatten(-2)


STEP = 0x9E3779B97F4A7C15 - 2**64  # like that of a key from round to round
STRIDES = [("indices", x) for x in (1, 2, 2**16)]
STRIDES += [(x, y) for x in ("seeds", "positions") for y in (1, 2, 64, 2**31, 2**32, 2**49, STEP)]


@pytest.mark.parametrize(("along", "stride"), STRIDES)
def test_numbers_are_even_and_uncorrelated(along, stride):
    """Along a progression of seeds, of positions or of groups: each digit is uniform, and so is each pair of
    digits of neighbours, of the two words and of the halves of a block."""
    steps = torch.arange(2**14) * stride
    key = {"seeds": torch.tensor(7), "positions": torch.tensor(3), "indices": torch.tensor(0), along: steps}
    digits = lanes_of(stream.bits(Domain.GROUP, **key))  # [count, 16]
    partner = lanes_of(stream.bits(Domain.GROUP, **{**key, "indices": key["indices"] + 1}))
    pairs = {
        "digit": (digits, digits * 0),
        "neighbours": (digits[1:], digits[:-1]),
        "far neighbours": (digits[16:], digits[:-16]),
        "words": (digits[:, :8], digits[:, 8:]),
        "halves of a block": (digits, partner),
    }
    for name, (a, b) in pairs.items():
        for lane in range(a.shape[1]):
            cells = torch.bincount(a[:, lane] * 16 + b[:, lane], minlength=256).double()
            cells = cells.view(16, 16)[:, :1] if name == "digit" else cells
            expected = cells.sum() / cells.numel()
            chi_square = ((cells - expected) ** 2 / expected).sum().item()
            freedom = cells.numel() - 1
            # of all the tables none should be this far off: six standard deviations, and some skew
            assert chi_square < freedom + 6 * math.sqrt(2 * freedom) + 12, (name, lane, chi_square)


def murmur3(data: bytes, seed: int) -> int:
    """MurmurHash3_x86_32 of whole words, written from its definition."""
    rotate = lambda x, n: ((x << n) | (x >> (32 - n))) & 0xFFFFFFFF  # noqa: E731
    h = seed
    for (word,) in struct.iter_unpack("<I", data):
        h ^= rotate(word * 0xCC9E2D51 & 0xFFFFFFFF, 15) * 0x1B873593 & 0xFFFFFFFF
        h = (rotate(h, 13) * 5 + 0xE6546B64) & 0xFFFFFFFF
    h ^= len(data)
    h = (h ^ h >> 16) * 0x85EBCA6B & 0xFFFFFFFF
    h = (h ^ h >> 13) * 0xC2B2AE35 & 0xFFFFFFFF
    return h ^ h >> 16


def word(seed, position, token):
    return murmur3(struct.pack("<qII", seed, position & 0xFFFFFFFF, token), 0)


def test_the_hash_is_murmur3():
    # published test vectors
    assert murmur3(b"test", 0) == 0xBA6BD213 and murmur3(b"aaaa", 0x9747B28C) == 0x5A97808A
    keys = [(0, 0, 0), (1, 2, 3), (-1, 2**31, 151935), (2**62 + 12345, 2**40 + 7, 64), (-(2**63), -1, 2**31)]
    columns = torch.tensor(keys, dtype=torch.int64).unbind(-1)
    assert stream.murmur3(*columns).tolist() == [word(*key) for key in keys]


@ON_EVERY_BACKEND
def test_gumbel_draws_are_those_of_the_published_stream(backend, device):
    """The token that ``argmax(z / T - log(-log1p(-u)))`` gives, u made from the hash in Python."""
    z = 2 * torch.randn(6, 70, generator=torch.Generator().manual_seed(5))
    seeds, positions = [0, 1, -5, 2**63 - 1, 2**33, 7], [0, 9, 2**31 + 3, 4, 5, 2**40]
    want = []
    for row, seed, position in zip(z.tolist(), seeds, positions, strict=True):
        uniforms = [(word(seed, position, i) + 0.5) * 2.0**-32 for i in range(70)]
        noisy = [x / 0.7 - math.log(-math.log1p(-u)) for x, u in zip(row, uniforms, strict=True)]
        want.append(noisy.index(max(noisy)))
    keys = {"seeds": torch.tensor(seeds, device=device), "positions": torch.tensor(positions, device=device)}
    out = sample(backend, z.to(device), temperature=0.7, method="gumbel", **keys)
    assert out.token_ids.tolist() == want


@ON_EVERY_BACKEND
def test_grouped_draws_are_those_of_the_stream(backend, device):
    """The best of ``log(mass) - log(-log1p(-v))`` over groups of 64, then a place in the group's mass."""
    z = torch.randn(6, 150, generator=torch.Generator().manual_seed(6))
    want = []
    for seed, row in enumerate(z.tolist()):
        weights, keys = [math.exp(x / 0.7) for x in row], []
        groups = [weights[i : i + 64] for i in range(0, 150, 64)]
        for g, members in enumerate(groups):
            u = (bits(Domain.GROUP, seed, 3, g) + 0.5) * 2.0**-64
            keys.append(math.log(math.fsum(members)) - math.log(-math.log1p(-u)))
        best = keys.index(max(keys))
        left = ((bits(Domain.INSIDE, seed, 3) >> 11) + 0.5) * 2.0**-53 * math.fsum(groups[best])
        token = 64 * best
        while left >= weights[token]:
            left -= weights[token]
            token += 1
        want.append(token)
    out = sample(backend, z.to(device), temperature=0.7, positions=3)
    assert out.token_ids.tolist() == want


# A token of probability 2^-26 beside one that is nearly certain: these keys draw it, by a uniform below 2^-26
RARE = 2.0**-26
TAIL = {
    "gumbel": {"seed": 185271255, "vocab": 300, "certain": 3, "rare": 200},
    "grouped, between groups": {"seed": 213379397, "vocab": 300, "certain": 3, "rare": 200},
    "grouped, inside a group": {"seed": 78055281, "vocab": 60, "certain": 3, "rare": 2},
}


def tail_logits(case, device):
    logits = torch.full((1, case["vocab"]), -torch.inf, device=device)
    logits[0, case["certain"]], logits[0, case["rare"]] = 0.0, math.log(RARE)
    return logits


def draw_tail(backend, device, name):
    case = TAIL[name]
    logits = tail_logits(case, device)
    return sample(backend, logits, seeds=case["seed"], method=name.split(",")[0]).token_ids.item()


@pytest.mark.parametrize("name", TAIL)
@ON_EVERY_BACKEND
def test_the_tail_is_reached(backend, device, name):
    assert draw_tail(backend, device, name) == TAIL[name]["rare"]


@pytest.mark.parametrize("name", TAIL)
def test_uniforms_of_24_bits_do_not_reach_it(name, monkeypatch):
    def coarse(function):
        return lambda *key: (function(*key) * 2**24).floor().add(0.5) * 2.0**-24

    for function in ("uniform32", "uniform64", "uniform53"):
        monkeypatch.setattr(stream, function, coarse(getattr(stream, function)))
    assert draw_tail("reference", "cpu", name) == TAIL[name]["certain"]


@ON_EVERY_BACKEND
def test_distinct_keys_draw_distinct_tokens(backend, device):
    """n > 1 samples of a prompt have seeds of their own; a sequence has its positions."""
    rows, vocab = (8, 130) if is_slow(backend, device) else (400, 640)
    logits, count = torch.zeros(rows, vocab, device=device), torch.arange(rows, device=device)
    want = vocab * (1 - (1 - 1 / vocab) ** rows)  # distinct tokens expected of independent draws
    for method in ("grouped", "gumbel"):
        for keys in ({"positions": count, "seeds": 1}, {"seeds": count}):
            tokens = sample(backend, logits, method=method, **keys).token_ids.tolist()
            assert abs(len(set(tokens)) - want) < 2 * math.sqrt(rows), (method, keys)
        one = sample(backend, logits, method=method, seeds=3, positions=4).token_ids
        assert (one == one[0]).all(), "one key is one draw"


@ON_EVERY_BACKEND
def test_seeds_of_torchs_generator(backend, device):
    logits = torch.zeros(12, 10**4 if not is_slow(backend, device) else 1000, device=device)
    skip_unless_sampling(backend, logits)
    draws = []
    with running(backend):
        for seed in (7, 7, 8):
            torch.manual_seed(seed)
            draws.append(rlkernel.sample(logits).token_ids)
        draws.append(rlkernel.sample(logits).token_ids)
    assert torch.equal(draws[0], draws[1])
    for a, b in ((0, 2), (2, 3)):
        assert (draws[a] == draws[b]).sum() < 3, "another seed, another call: other tokens"
    assert len(draws[0].unique()) > 9, "rows have seeds of their own"


MUTANTS = {
    # the filter's redraw takes the likeliest, the group is drawn evenly, the noise has half its variance
    "no redraw": ("uniform53", lambda u: u * 0, "top_k", "grouped"),
    "even groups": ("uniform64", lambda u: u**4, "none", "grouped"),
    "narrow noise": ("uniform32", lambda u: 0.25 + u / 2, "none", "gumbel"),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_wrong_draws_fail(mutant, monkeypatch):
    name, change, filters, method = MUTANTS[mutant]
    right = getattr(stream, name)
    monkeypatch.setattr(stream, name, lambda *key: change(right(*key)))
    with pytest.raises(AssertionError):
        test_distribution("reference", "cpu", method, filters)
