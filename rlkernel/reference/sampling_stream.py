"""The random stream of sampling: stateless numbers, keyed by (seed, position).

Words of Philox4x32-10: the key is the seed, the counter is the position, what a number is for, and which one
of those it is; for each key it is a bijection of the counters.  A row's place in the batch is no part of
either, so a request draws the same tokens alone, in any batch and in any order.  The noise of method "gumbel"
is that of vLLM's model runner: MurmurHash3 of four words.  Kernels have their own copies of this arithmetic;
here it is in int64 tensors, whose products wrap as theirs do.
"""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import Domain

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


def uniform64(domain: int, seeds: Tensor, positions: Tensor, indices: Tensor | None = None) -> Tensor:
    """In (0, 1), as small as 2**-65: the digits of a small number are those of both words; fp64."""
    high, low = bits(domain, seeds, positions, indices)
    return high.double() * 2.0**-32 + (low.double() + 0.5) * 2.0**-64


def uniform53(domain: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """Multiples of 2**-53, plus a half, in (0, 1): what picks a place in a sum of integers; fp64."""
    return row_uniform(domain, seeds, positions) + 2.0**-54


def seeds_of(domain: int, seeds: Tensor, positions: Tensor) -> Tensor:
    """A seed for a draw whose noise is its own; int64."""
    high, low = bits(domain, seeds, positions)
    return (high << 32) | low


def split(seeds: Tensor, samples: Tensor) -> Tensor:
    """A seed for each sample, by two rounds of a Feistel network: a bijection of the samples' numbers."""
    low = bits(Domain.SPLIT[0], seeds, samples)[0]
    high = bits(Domain.SPLIT[1], seeds, low)[0] ^ (samples & _WORD)
    return (high << 32) | low


def uniform32(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The published uniforms of method "gumbel": multiples of 2**-32, plus a half, in (0, 1); fp64."""
    return (murmur3(seeds, positions, tokens).double() + 0.5) * 2.0**-32


def murmur3(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """MurmurHash3 of the seed's two words, the position's low word and the token, as int64 in [0, 2**32)."""
    h = torch.zeros_like(seeds)
    h = _mix(_mix(h, seeds & _WORD), (seeds >> 32) & _WORD)
    h = _mix(_mix(h, positions & _WORD), tokens & _WORD) ^ 16
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _WORD
    return h ^ (h >> 16)


def _mix(h: Tensor, key: Tensor) -> Tensor:
    key = _rotate((key * 0xCC9E2D51) & _WORD, 15)
    h = _rotate(h ^ ((key * 0x1B873593) & _WORD), 13)
    return (h * 5 + 0xE6546B64) & _WORD


def _rotate(value: Tensor, count: int) -> Tensor:
    return ((value << count) | (value >> (32 - count))) & _WORD
