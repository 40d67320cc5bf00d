// The random numbers of sampling: murmur3 of (domain, seed, position, token or group), so that a draw depends on what is drawn
// and never on its place in a batch. Domain 0 is the stream of vLLM's runner, bit for bit; the others are ours.
//
// Plain functions for host and device. The words may be vectors of uint32_t where the compiler has them (csrc/cpu), the floats
// too. Static: the files for each instruction set must not share one copy.
#pragma once

#include "rlkernel/philox.h"

namespace rlkernel {

// Where a number goes: two numbers of one draw come from different domains.
struct StreamDomain {
  uint32_t high, low;
};
constexpr uint32_t kGumbelDomain = 0;                           // offset: token
constexpr StreamDomain kGroupDomain{0x9E3779B9u, 0x7F4A7C15u};   // offset: group; which group wins
constexpr StreamDomain kMemberDomain{0xBF58476Du, 0x94D049BBu};  // offset: group; which of its tokens
constexpr StreamDomain kKeptDomain{0x2545F491u, 0x4F6CDD1Du};    // offset: 0; which of the kept tokens

constexpr uint32_t kXtcDomain = 9;  // whether a row's likeliest tokens are excluded

// 64 random bits.
struct StreamBits {
  uint32_t high, low;
};

// Two of them share a block: those of an even index have its first words.
RLKERNEL_HOST_DEVICE static constexpr StreamBits stream_bits(uint32_t domain, int64_t seed, int64_t position, uint32_t index = 0) {
  const uint64_t key = static_cast<uint64_t>(seed), place = static_cast<uint64_t>(position);
  const PhiloxBlock x = philox({index / 2, domain, static_cast<uint32_t>(place), static_cast<uint32_t>(place >> 32)},
                               static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32));
  return index % 2 == 0 ? StreamBits{x.first, x.second} : StreamBits{x.third, x.fourth};
}

// A multiple of 2^-53 in [0, 1), one for each row and domain: `u < p` has exactly the probability p, for 0 and 1 too.
RLKERNEL_HOST_DEVICE static constexpr double row_uniform(uint32_t domain, int64_t seed, int64_t position) {
  const StreamBits bits = stream_bits(domain, seed, position);
  return static_cast<double>((static_cast<uint64_t>(bits.high) << 32 | bits.low) >> 11) * 0x1p-53;
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

// What all offsets of a row share.
RLKERNEL_HOST_DEVICE static inline uint32_t stream_prefix(uint32_t domain, int64_t seed, int64_t position) {
  const uint64_t bits = static_cast<uint64_t>(seed);
  uint32_t h = stream_mix(domain, static_cast<uint32_t>(bits));
  h = stream_mix(h, static_cast<uint32_t>(bits >> 32));
  return stream_mix(h, static_cast<uint32_t>(static_cast<uint64_t>(position)));
}

template <class Word>
RLKERNEL_HOST_DEVICE static inline Word stream_word(Word prefix, Word offset) {
  Word h = stream_mix(prefix, offset);
  h ^= 16u;  // the bytes hashed
  h ^= h >> 16;
  h *= 0x85EBCA6Bu;
  h ^= h >> 13;
  h *= 0xC2B2AE35u;
  return h ^ (h >> 16);
}

RLKERNEL_HOST_DEVICE static inline uint32_t stream_word(uint32_t domain, int64_t seed, int64_t position, uint32_t offset) {
  return stream_word(stream_prefix(domain, seed, position), offset);
}

// The uniforms are > 0 and keep the digits of a small one: the largest keys come from there. They may round to 1.

// (word + 1/2) / 2^32, from exact halves and one rounding.
RLKERNEL_HOST_DEVICE static inline float stream_uniform(uint32_t word) {
  const float high = static_cast<float>(static_cast<int32_t>(word >> 16));
  const float low = static_cast<float>(static_cast<int32_t>(word & 0xffffu));
  return high * 0x1p-16f + (low + 0.5f) * 0x1p-32f;
}

RLKERNEL_HOST_DEVICE static inline float stream_uniform(uint32_t high, uint32_t low) {
  return static_cast<float>(high) * 0x1p-32f + (static_cast<float>(low) + 0.5f) * 0x1p-64f;
}

// stream_uniform(high, low()), which asks for the low word only where a digit of it is left: once in 128 draws.
template <class Low>
RLKERNEL_HOST_DEVICE static inline float stream_uniform_of(uint32_t high, Low low) {
  // from 2^25 on half a unit in the last place of `high` is 2, and what `low` adds at most 1
  return high < 1u << 25 ? stream_uniform(high, low()) : static_cast<float>(high) * 0x1p-32f;
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
RLKERNEL_HOST_DEVICE static inline int64_t stream_below(uint32_t high, uint32_t low, int64_t total) {
  const uint64_t bits = (static_cast<uint64_t>(high) << 32 | low) >> 11;
  const double r = (static_cast<double>(bits) + 0.5) * 0x1p-53;
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
