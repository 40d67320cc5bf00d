"""The random stream of sampling: stateless 32-bit words, keyed by (seed, position, token or group).

MurmurHash3 of four 32-bit words, as vLLM's model runner publishes it: a row's place in the batch is no part
of the key, so a request draws the same tokens alone, in any batch and in any order.  Kernels have their own
copy of this arithmetic; here it is in int64 tensors, whose products wrap as theirs do.  The state between two
mixes has 32 bits, and each seed has a twin with the same words: docs/ops/sampling.md says what that means.
"""

from typing import Any

import torch
from torch import Tensor

# What a word is for: words of different domains are independent.  0 is vLLM's, one word a token.
TOKEN = 0
GROUP = (0x9E3779B9, 0x7F4A7C15)  # high and low word of a 64-bit uniform, one for each group of 64 tokens
INSIDE = (0xBF58476D, 0x94D049BB)  # the draw inside the winning group
REDRAW = (0x2545F491, 0x4F6CDD1D)  # of a row whose first draw was filtered out
ACCEPT = (0xD6E8FEB8, 0x94C849D5)  # whether a drafted token is accepted
RESIDUAL = (0xA0761D64, 0xE7037ED1)  # the token in the place of one that was not
BONUS = (0x3C6EF372, 0xA54FF53A)  # the seed of the token where a draft of a known distribution is missing
SPLIT = (0x8EBC6AF0, 0x589965CC)  # seeds of the samples of one request
EXCLUDE = (0x1D8E4E27, 0xC47D124F)  # whether XTC drops tokens of a row

XTC = 9  # whether a row's likeliest tokens are excluded

_WORD = 0xFFFFFFFF

Words = tuple[Tensor | int, Tensor | int, Tensor | int, Tensor | int]


def philox(counter: Words, key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four random words of the broadcast counters and keys, all int64 in [0, 2**32).

    For each key a bijection of the counters (Salmon et al., SC 2011).
    """
    x: Any = counter
    low, high = key
    for _ in range(10):
        p, q = x[0] * 0xD2511F53, x[2] * 0xCD9E8D57
        x = (q >> 32 & _WORD) ^ x[1] ^ low, q & _WORD, (p >> 32 & _WORD) ^ x[3] ^ high, p & _WORD
        low, high = low + 0x9E3779B9 & _WORD, high + 0xBB67AE85 & _WORD
    words: tuple[Tensor, Tensor, Tensor, Tensor] = x
    return words


def bits(
    domain: int, seeds: Tensor, positions: Tensor, indices: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Two random words for each broadcast (seed, position, index), as int64 in [0, 2**32); None: index 0.

    The key is the seed; the counter is (index // 2, domain, low word, high word of the position).  An even
    index has the first two words of its block, an odd one the others.
    """
    block = 0 if indices is None else indices // 2
    words = philox(
        (block, domain, positions & _WORD, positions >> 32 & _WORD), (seeds & _WORD, seeds >> 32 & _WORD)
    )
    if indices is None:
        return words[:2]
    odd = indices % 2 == 1
    return torch.where(odd, words[2], words[0]), torch.where(odd, words[3], words[1])


def row_uniform(domain: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """Multiples of 2**-53 in [0, 1): ``u < p`` has exactly the probability p, for 0 and 1 too; fp64."""
    high, low = bits(domain, seeds, positions)
    return ((high << 21) | (low >> 11)).double() * 2.0**-53


def _rotate(value: Tensor, bits: int) -> Tensor:
    return ((value << bits) | (value >> (32 - bits))) & _WORD


def _mix(h: Tensor, key: Tensor) -> Tensor:
    key = _rotate((key * 0xCC9E2D51) & _WORD, 15)
    h = _rotate(h ^ ((key * 0x1B873593) & _WORD), 13)
    return (h * 5 + 0xE6546B64) & _WORD


def words(domain: int, seeds: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """32 random bits for each broadcast (seed, position, offset), as int64 in [0, 2**32)."""
    h = torch.full_like(seeds, domain)
    h = _mix(_mix(h, seeds & _WORD), (seeds >> 32) & _WORD)
    h = _mix(_mix(h, positions & _WORD), offsets & _WORD) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def uniform32(domain: int, seeds: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Multiples of 2**-32, plus a half, in (0, 1); fp64."""
    return (words(domain, seeds, positions, offsets).double() + 0.5) * 2.0**-32


def uniform64(domain: tuple[int, int], seeds: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """In (0, 1), as small as 2**-65: the digits of a small number are those of both words; fp64."""
    high, low = (words(d, seeds, positions, offsets).double() for d in domain)
    return high * 2.0**-32 + (low + 0.5) * 2.0**-64


def uniform53(domain: tuple[int, int], seeds: Tensor, positions: Tensor, offsets: Tensor) -> Tensor:
    """Multiples of 2**-53, plus a half, in (0, 1): what picks a place in a sum of integers; fp64."""
    high, low = (words(d, seeds, positions, offsets) for d in domain)
    return (((high << 21) | (low >> 11)).double() + 0.5) * 2.0**-53


def seeds_of(domain: tuple[int, int], seeds: Tensor, positions: Tensor) -> Tensor:
    """A seed made of both words, for a draw whose noise is its own; int64."""
    high, low = (words(d, seeds, positions, torch.zeros_like(positions)) for d in domain)
    return (high << 32) | low
