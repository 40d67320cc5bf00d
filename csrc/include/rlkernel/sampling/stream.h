// The random numbers of sampling, so that a draw depends on what is drawn and never on its place in a batch: words of Philox,
// whose key is the seed and whose counter is the position, what the number is for, and which one it is. The noise of method
// gumbel is that of vLLM's runner instead, bit for bit: murmur3 of (seed, position, token).
//
// Plain functions for host and device. The words may be vectors of uint32_t where the compiler has them (csrc/cpu), the floats
// too. Static: the files for each instruction set must not share one copy.
#pragma once

#include "rlkernel/philox.h"

namespace rlkernel {

// What a number is for. Domain in rlkernel/calls/sampling.py has those that no kernel draws, too.
enum StreamDomain : uint32_t {
  kGroupDomain = 1,   // index: group; which group wins
  kMemberDomain = 2,  // which of its tokens; of one group in a row, so that all may look at the same number
  kKeptDomain = 3,    // which of the kept tokens
};

// 64 random bits.
struct StreamBits {
  uint32_t high, low;
};

// Two of them share a block: those of an even index have its first words.
RLKERNEL_HOST_DEVICE static constexpr StreamBits stream_bits(StreamDomain domain, int64_t seed, int64_t position,
                                                           uint32_t index = 0) {
  const uint64_t key = static_cast<uint64_t>(seed), place = static_cast<uint64_t>(position);
  const PhiloxBlock x = philox({index / 2, domain, static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32)},
                               static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  return index % 2 == 0 ? StreamBits{x.first, x.second} : StreamBits{x.third, x.fourth};
}

template <class Word>
RLKERNEL_HOST_DEVICE static inline Word stream_mix(Word h, Word key) {
  key *= 0xCC9E2D51u;
  key = (key << 15) | (key >> 17);
  key *= 0x1B873593u;
  h ^= key;
  h = (h << 13) | (h >> 19);
  return h * 5u + 0xE6546B64u;
}

// What all tokens of a row share.
RLKERNEL_HOST_DEVICE static inline uint32_t stream_prefix(int64_t seed, int64_t position) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  uint32_t h = stream_mix(0u, static_cast<uint32_t>(bits));
  h = stream_mix(h, static_cast<uint32_t>(bits >> 32));
  return stream_mix(h, static_cast<uint32_t>(static_cast<uint64_t>(position)));
}

template <class Word>
RLKERNEL_HOST_DEVICE static inline Word stream_word(Word prefix, Word token) {
  Word h = stream_mix(prefix, token);
  h ^= 16u;  // the bytes hashed
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// The uniforms are > 0 and keep the digits of a small one: the largest keys come from there. They may round to 1.

// (word + 1/2) / 2^32, from exact halves and one rounding.
RLKERNEL_HOST_DEVICE static inline float stream_uniform(uint32_t word) {
  const float high = static_cast<float>(static_cast<int32_t>(word >> 16));
  const float low = static_cast<float>(static_cast<int32_t>(word & 0xffffu));
  return high * 0x1p-16f + (low + 0.5f) * 0x1p-32f;
}

RLKERNEL_HOST_DEVICE static inline float stream_uniform(StreamBits bits) {
  return static_cast<float>(bits.high) * 0x1p-32f + (static_cast<float>(bits.low) + 0.5f) * 0x1p-64f;
}

// -log(1 - u) below 1/4, where 1 - u would lose the digits of u.
template <class Float>
RLKERNEL_HOST_DEVICE static inline Float stream_series(Float u) {
  Float p = u * (1.0f / 8.0f) + 1.0f / 7.0f;
  p = u * p + 1.0f / 6.0f;
  p = u * p + 1.0f / 5.0f;
  p = u * p + 1.0f / 4.0f;
  p = u * p + 1.0f / 3.0f;
  p = u * p + 1.0f / 2.0f;
  p = u * p + 1.0f;
  return u * p;
}

// An exponential of mean 1 from a uniform; `log` is the backend's logarithm of a float. Noise of Gumbel is -log of it.
template <class Log>
RLKERNEL_HOST_DEVICE static inline float stream_exponential(float u, Log log) {
  const float rest = 1.0f - u;
  return u < 0.25f ? stream_series(u) : -log(rest > 0x1p-24f ? rest : 0x1p-24f);
}

// A number of [0, total) with 53 random bits, for a search in running sums of integer masses.
RLKERNEL_HOST_DEVICE static inline int64_t stream_below(StreamBits bits, int64_t total) {
  const uint64_t whole = (static_cast<uint64_t>(bits.high) << 32 | bits.low) >> 11;
  const double r = (static_cast<double>(whole) + 0.5) * 0x1p-53;
  const int64_t t = static_cast<int64_t>(r * static_cast<double>(total));
  return t < total - 1 ? t : total - 1;
}

// The integer mass of a token from e = exp((z - max z) / T): sums of them are exact in any order.
RLKERNEL_HOST_DEVICE static inline int64_t stream_mass(float e) {
  // adding 2^52 leaves the nearest integer (ties to even) in the low bits
  const double shifted = static_cast<double>(e) * 0x1p40 + 0x1p52;
  return static_cast<int64_t>(__builtin_bit_cast(uint64_t, shifted) & 0xfffffffffffffull);
}

}  // namespace rlkernel
