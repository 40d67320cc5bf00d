"""The random stream of ``sampling``, and its uniforms: Philox4x32-10, and vLLM's hash for method "gumbel".

Integers and plain fp32 alone: no generator of Triton's, whose smallest number is 4.7e-10, and no log1p of a
vendor's library, so that all GPUs draw the same.
"""

import triton
import triton.language as tl

from rlkernel.calls.sampling import Domain

GROUP = tl.constexpr(Domain.GROUP)
INSIDE = tl.constexpr(Domain.INSIDE)
REDRAW = tl.constexpr(Domain.REDRAW)


@triton.jit
def philox(first, second, third, fourth, low_key, high_key):
    """Philox4x32-10 of a counter of four words and a key of two, all uint32: four random words."""
    for _ in tl.static_range(10):
        p = first.to(tl.uint64) * 0xD2511F53
        q = third.to(tl.uint64) * 0xCD9E8D57
        first = (q >> 32).to(tl.uint32) ^ second ^ low_key
        third = (p >> 32).to(tl.uint32) ^ fourth ^ high_key
        second = q.to(tl.uint32)
        fourth = p.to(tl.uint32)
        low_key += 0x9E3779B9
        high_key += 0xBB67AE85
    return first, second, third, fourth


@triton.jit
def two_words(x):
    """The low and the high word of an int64."""
    return (x & 0xFFFFFFFF).to(tl.uint32), ((x >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def random_words(DOMAIN: tl.constexpr, seed, position, indices):
    """64 random bits for each index, the high word and the low one; two indices share a block."""
    indices = indices.to(tl.uint32)
    blocks = indices >> 1
    low_key, high_key = two_words(seed)
    low, high = two_words(position)
    domain = tl.full((), DOMAIN, tl.uint32)
    first, second, third, fourth = philox(blocks, domain, low, high, low_key, high_key)
    odd = (indices & 1) != 0
    return tl.where(odd, third, first), tl.where(odd, fourth, second)


@triton.jit
def row_uniform(DOMAIN: tl.constexpr, seed, position):
    """A multiple of 2**-53 in [0, 1): ``u < p`` has exactly the probability p, for 0 and 1 too; fp64."""
    high, low = random_words(DOMAIN, seed, position, tl.full((), 0, tl.uint32))
    return (((high.to(tl.uint64) << 32) | low.to(tl.uint64)) >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def rotate(x, LEFT: tl.constexpr):
    return (x << LEFT) | (x >> (32 - LEFT))


@triton.jit
def scramble(word):
    return rotate(word.to(tl.uint32) * 0xCC9E2D51, 15) * 0x1B873593


@triton.jit
def absorb(h, scrambled):
    return rotate(h ^ scrambled, 13) * 5 + 0xE6546B64


@triton.jit
def finalised(h):
    """murmur3's end: a bijection of uint32 in which every input bit changes every output bit."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def key_of(seeds, positions, row):
    """``(seed, position)`` of a row."""
    position = tl.full((), 0, tl.int64)
    if positions is not None:
        position = tl.load(positions + row)
    return tl.load(seeds + row), position


@triton.jit
def murmur3(seed, position, tokens):
    """vLLM's 32 bits for each token; all but its own mix is done once, for scalars."""
    h = tl.full((), 0, tl.uint32)
    h = absorb(absorb(h, scramble(seed & 0xFFFFFFFF)), scramble((seed >> 32) & 0xFFFFFFFF))
    return finalised(absorb(absorb(h, scramble(position & 0xFFFFFFFF)), scramble(tokens)) ^ 16)


@triton.jit
def exponential(v):
    """``-log1p(-v)``: a series where 1 - v would lose the digits of v, and those decide who wins."""
    p = tl.fma(v, 0.125, 0.14285714285714285)
    p = tl.fma(p, v, 0.16666666666666666)
    p = tl.fma(p, v, 0.2)
    p = tl.fma(p, v, 0.25)
    p = tl.fma(p, v, 0.3333333333333333)
    p = tl.fma(p, v, 0.5)
    p = tl.fma(p, v, 1.0)
    return tl.where(v < 0.25, v * p, -tl.log(tl.maximum(1.0 - v, 5.960464477539063e-08)))


@triton.jit
def gumbel_noise(seed, position, tokens):
    """Standard Gumbel noise of each token, of one 32-bit uniform: vLLM's."""
    h = murmur3(seed, position, tokens)
    high, low = (h >> 16).to(tl.int32).to(tl.float32), (h & 0xFFFF).to(tl.int32).to(tl.float32)
    u = high * 1.52587890625e-05 + (low + 0.5) * 2.3283064365386963e-10
    return -tl.log(exponential(u))


@triton.jit
def group_noise(seed, position, groups):
    """Standard Gumbel noise of each group, of a 64-bit uniform: its tail reaches 2**-65."""
    high, low = random_words(GROUP, seed, position, groups)
    high, low = high.to(tl.float32), low.to(tl.float32)
    return -tl.log(exponential(high * 2.3283064365386963e-10 + (low + 0.5) * 5.421010862427522e-20))


@triton.jit
def draw_below(total, DOMAIN: tl.constexpr, seed, position):
    """A uniform integer of [0, total), of 53 random bits."""
    r = row_uniform(DOMAIN, seed, position) + 5.551115123125783e-17
    return tl.minimum((r * total.to(tl.float64)).to(tl.int64), total - 1)
