// Which tokens a filter keeps: the shortest prefix of the order (z descending, id ascending) whose number or mass reaches a
// target. Numbers and masses are integers, so the way to the prefix leaves no trace in it.
#pragma once

#include <algorithm>
#include <vector>

#include "sampling_split.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

// Sums of integer masses: the nearest integers of e * 2^40 come from the rounding of a double, and their bits are summed.
struct MassSum {
#if defined(__AVX512F__)
  __m512i sum = _mm512_setzero_si512();
  int64_t calls = 0;
  static __m512i biased(__m256 e) {
    const __m512d wide = _mm512_maskz_cvtps_pd(0xff, e);
    return _mm512_castpd_si512(_mm512_fmadd_pd(wide, _mm512_set1_pd(0x1p40), _mm512_set1_pd(0x1p52)));
  }
  void add(Floats e) {
    sum = _mm512_add_epi64(sum, biased(_mm512_maskz_extractf32x8_ps(0xff, e, 0)));
    sum = _mm512_add_epi64(sum, biased(_mm512_maskz_extractf32x8_ps(0xff, e, 1)));
    calls += 2;
  }
  int64_t value() const {
    uint64_t lanes[8], result = 0;
    std::memcpy(lanes, &sum, sizeof lanes);
    for (const uint64_t lane : lanes) result += lane;
    return static_cast<int64_t>(result - static_cast<uint64_t>(calls) * 8 * 0x4330000000000000u);
  }
#elif defined(__AVX2__)
  __m256i sum = _mm256_setzero_si256();
  int64_t calls = 0;
  static __m256i biased(__m128 e) {
    return _mm256_castpd_si256(
        _mm256_fmadd_pd(_mm256_cvtps_pd(e), _mm256_set1_pd(0x1p40), _mm256_set1_pd(0x1p52)));
  }
  void add(Floats e) {
    sum = _mm256_add_epi64(sum, biased(_mm256_castps256_ps128(e)));
    sum = _mm256_add_epi64(sum, biased(_mm256_extractf128_ps(e, 1)));
    calls += 2;
  }
  int64_t value() const {
    uint64_t lanes[4], result = 0;
    std::memcpy(lanes, &sum, sizeof lanes);
    for (const uint64_t lane : lanes) result += lane;
    return static_cast<int64_t>(result - static_cast<uint64_t>(calls) * 4 * 0x4330000000000000u);
  }
#else
  int64_t sum = 0;
  void add(Floats e) {
    for (int i = 0; i < kWidth; ++i) sum += stream_mass(e[i]);
  }
  int64_t value() const { return sum; }
#endif
};

// Appends the lanes of `mask`; up to kWidth - 1 elements behind the last one are overwritten.
inline void append(float* z, int32_t* ids, int64_t& n, Floats v, unsigned mask, int64_t first) {
#if defined(__AVX512F__)
  const __mmask16 lanes = static_cast<__mmask16>(mask);
  _mm512_storeu_ps(z + n, _mm512_maskz_compress_ps(lanes, v));
  _mm512_storeu_si512(ids + n, _mm512_maskz_compress_epi32(lanes, (__m512i)iota(static_cast<uint32_t>(first))));
  n += __builtin_popcount(mask);
#else
  for (; mask != 0; mask &= mask - 1) {
    const int lane = __builtin_ctz(mask);
    z[n] = v[lane];
    ids[n++] = static_cast<int32_t>(first + lane);
  }
#endif
}

// Ascends with z; -0 and 0 are one.
inline uint32_t order_key(float z) {
  const uint32_t bits = __builtin_bit_cast(uint32_t, z);
  if (bits == 0x80000000u) return 0x80000000u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline float from_order_key(uint32_t key) {
  return __builtin_bit_cast(float, key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct Prefix {
  float pivot = -std::numeric_limits<float>::max();
  int64_t last = std::numeric_limits<int64_t>::max();  // id of the last kept one among those at the pivot
  int64_t count = 0, mass = 0;
};

struct Candidates {
  std::vector<float> z;
  std::vector<int32_t> ids;
  std::vector<int64_t> masses;
  int64_t n = 0;
  std::vector<uint32_t> keys;  // what a selection still looks at
  std::vector<int32_t> left_ids;
  std::vector<int64_t> left_masses;
  std::vector<int32_t> groups;
  std::vector<float> samples;

  void reserve(int64_t tokens) {
    const size_t size = static_cast<size_t>(tokens) + 2 * kWidth;
    if (z.size() >= size) return;
    z.resize(size);
    ids.resize(size);
    masses.resize(size);
    keys.resize(size);
    left_ids.resize(size);
    left_masses.resize(size);
    groups.resize(size / kGroup + 2 * kWidth);
  }
};

// The prefix that starts with what `before` counts and reaches the target inside the candidates, which stand in the order of
// their ids. There is one: the caller has compared the sums.
template <bool kByMass>
Prefix select(Candidates& c, Prefix before, int64_t target) {
  constexpr int kBins = 2048;
  int64_t counts[kBins], masses[kBins];
  uint32_t* const key = c.keys.data();
  int32_t* const id = c.left_ids.data();
  int64_t* const mass = c.left_masses.data();
  int64_t n = c.n;
  for (int64_t i = 0; i < n; ++i) key[i] = order_key(c.z[i]);
  std::memcpy(id, c.ids.data(), n * sizeof *id);
  std::memcpy(mass, c.masses.data(), n * sizeof *mass);
  const auto have = [&](const Prefix& p) { return kByMass ? p.mass : p.count; };

  for (;;) {
    uint32_t low = key[0], high = key[0];
    for (int64_t i = 1; i < n; ++i) low = std::min(low, key[i]), high = std::max(high, key[i]);
    if (low == high) {  // ties: the lowest ids
      const int64_t missing = target - have(before), each = kByMass ? mass[0] : 1;
      const int64_t take = each > 0 ? (missing + each - 1) / each : n;
      return {from_order_key(low), id[take - 1], before.count + take, before.mass + take * mass[0]};
    }
    if (n <= 16) {
      int order[16];
      for (int i = 0; i < n; ++i) {
        int j = i;
        for (; j > 0 && key[order[j - 1]] < key[i]; --j) order[j] = order[j - 1];
        order[j] = i;
      }
      int i = 0;
      for (;; ++i) {
        before.count += 1;
        before.mass += mass[order[i]];
        if (have(before) >= target || i == n - 1) break;
      }
      return {from_order_key(key[order[i]]), id[order[i]], before.count, before.mass};
    }
    const int wanted = n > 2048 ? 11 : 8, bits = 32 - __builtin_clz(high - low);
    const int shift = bits > wanted ? bits - wanted : 0;
    const uint32_t bins = ((high - low) >> shift) + 1;
    std::fill(counts, counts + bins, 0);
    std::fill(masses, masses + bins, 0);
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t bin = (key[i] - low) >> shift;
      counts[bin] += 1;
      masses[bin] += mass[i];
    }
    uint32_t bin = bins - 1;
    for (; bin > 0; --bin) {
      const Prefix with{0, 0, before.count + counts[bin], before.mass + masses[bin]};
      if (have(with) >= target) break;
      before.count = with.count;
      before.mass = with.mass;
    }
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t k = key[i];
      const int32_t this_id = id[i];
      const int64_t this_mass = mass[i];
      key[kept] = k;
      id[kept] = this_id;
      mass[kept] = this_mass;
      kept += (k - low) >> shift == bin;
    }
    n = kept;
  }
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
