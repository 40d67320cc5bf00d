// Which tokens a filter keeps: the shortest prefix of the order (z descending, id ascending) whose number or mass reaches a
// target. Numbers and masses are integers, so the way to the prefix leaves no trace in it.
#pragma once

#include <algorithm>

#include "split.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

// Integer masses of a vector, not yet integers: the sum with 2^52 rounds to one in the low bits of the double.
struct Masses {
#if defined(__AVX512F__)
  __m512i low, high;
  explicit Masses(Floats e)
      : low(biased(_mm512_maskz_extractf32x8_ps(0xff, e, 0))), high(biased(_mm512_maskz_extractf32x8_ps(0xff, e, 1))) {}
  static __m512i biased(__m256 e) {
    const __m512d wide = _mm512_maskz_cvtps_pd(0xff, e);
    return _mm512_castpd_si512(_mm512_fmadd_pd(wide, _mm512_set1_pd(kScale), _mm512_set1_pd(kBias)));
  }
#elif defined(__AVX2__)
  __m256i low, high;
  explicit Masses(Floats e) : low(biased(_mm256_castps256_ps128(e))), high(biased(_mm256_extractf128_ps(e, 1))) {}
  static __m256i biased(__m128 e) {
    return _mm256_castpd_si256(_mm256_fmadd_pd(_mm256_cvtps_pd(e), _mm256_set1_pd(kScale), _mm256_set1_pd(kBias)));
  }
#else
  int64_t each[kWidth];
  explicit Masses(Floats e) {
    for (int i = 0; i < kWidth; ++i) each[i] = stream_mass(e[i]);
  }
#endif
  static constexpr double kScale = 0x1p40, kBias = 0x1p52;
  static constexpr uint64_t kBiasBits = 0x4330000000000000u;
};

// Exact, so in any order.
struct MassSum {
  int64_t count = 0;  // lanes that were added

#if defined(__AVX512F__)
  __m512i sum = _mm512_setzero_si512();
  void add(const Masses& m, Mask lanes) {
    sum = _mm512_mask_add_epi64(sum, static_cast<__mmask8>(lanes), sum, m.low);
    sum = _mm512_mask_add_epi64(sum, static_cast<__mmask8>(lanes >> 8), sum, m.high);
    count += __builtin_popcount(lanes);
  }
  void add(const Masses& m) {
    sum = _mm512_add_epi64(sum, _mm512_add_epi64(m.low, m.high));
    count += kWidth;
  }
  int64_t value() const { return unbiased<8>(&sum); }
#elif defined(__AVX2__)
  __m256i sum = _mm256_setzero_si256();
  void add(const Masses& m, Mask lanes) {
    const __m256i low = _mm256_cvtepi32_epi64(_mm256_castsi256_si128((__m256i)lanes));
    const __m256i high = _mm256_cvtepi32_epi64(_mm256_extracti128_si256((__m256i)lanes, 1));
    sum = _mm256_add_epi64(sum, _mm256_and_si256(m.low, low));
    sum = _mm256_add_epi64(sum, _mm256_and_si256(m.high, high));
    count += __builtin_popcount(bits_of(lanes));
  }
  void add(const Masses& m) {
    sum = _mm256_add_epi64(sum, _mm256_add_epi64(m.low, m.high));
    count += kWidth;
  }
  int64_t value() const { return unbiased<4>(&sum); }
#else
  int64_t sum = 0;
  void add(const Masses& m, Mask lanes) {
    for (int i = 0; i < kWidth; ++i) sum += m.each[i] & static_cast<int64_t>(lanes[i]);
    count += __builtin_popcount(bits_of(lanes));
  }
  void add(const Masses& m) {
    for (int i = 0; i < kWidth; ++i) sum += m.each[i];
    count += kWidth;
  }
  int64_t value() const { return sum; }
#endif

 private:
  template <int kLanes>
  int64_t unbiased(const void* sums) const {
    uint64_t lanes[kLanes], result = 0;
    std::memcpy(lanes, sums, sizeof lanes);
    for (const uint64_t lane : lanes) result += lane;
    return static_cast<int64_t>(result - static_cast<uint64_t>(count) * Masses::kBiasBits);
  }
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

// Memory that a thread keeps. std::vector would leave weak symbols, of which the linker keeps those of one instruction set
// for all.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { delete[] data_; }

  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }
  size_t size() const { return size_; }

  // What it held is gone.
  void renew(size_t size) {
    delete[] data_;
    data_ = nullptr;  // should the allocation throw
    size_ = 0;
    data_ = new T[size]();
    size_ = size;
  }

 private:
  T* data_ = nullptr;
  size_t size_ = 0;
};

struct Candidates {
  Buffer<float> z;
  Buffer<int32_t> ids;
  Buffer<int64_t> masses;
  int64_t n = 0;
  Buffer<uint32_t> keys, left_keys;  // left: what a selection still looks at
  Buffer<int32_t> left_ids;
  Buffer<int64_t> left_masses;
  Buffer<int32_t> groups;

  void reserve(int64_t tokens) {
    const size_t size = static_cast<size_t>(tokens) + 2 * kWidth;
    if (z.size() >= size) return;
    z.renew(size);
    ids.renew(size);
    masses.renew(size);
    keys.renew(size);
    left_keys.renew(size);
    left_ids.renew(size);
    left_masses.renew(size);
    groups.renew(size / kGroup + 2 * kWidth);
  }
};

constexpr int kFew = 16;  // candidates that are sorted

// The prefix among a few candidates.
template <bool kByMass>
Prefix walk(const uint32_t* key, const int32_t* id, const int64_t* mass, int n, Prefix prefix, int64_t target) {
  int order[kFew];
  for (int i = 0; i < n; ++i) {
    int j = i;
    for (; j > 0 && key[order[j - 1]] < key[i]; --j) order[j] = order[j - 1];
    order[j] = i;
  }
  for (int i = 0; i < n; ++i) {
    prefix.count += 1;
    prefix.mass += mass[order[i]];
    prefix.pivot = from_order_key(key[order[i]]);
    prefix.last = id[order[i]];
    if ((kByMass ? prefix.mass : prefix.count) >= target) break;
  }
  return prefix;
}

// The prefix that starts with what `before` counts and reaches the target inside the candidates, which stand in the order of
// their ids. There is one: the caller has compared the sums.
template <bool kByMass>
Prefix select(Candidates& c, Prefix before, int64_t target) {
  constexpr int kBins = 2048;
  int64_t counts[kBins], masses[kBins];
  for (int64_t i = 0; i < c.n; ++i) c.keys[i] = order_key(c.z[i]);
  const uint32_t* key = c.keys.data();
  const int32_t* id = c.ids.data();
  const int64_t* mass = c.masses.data();
  int64_t n = c.n;
  const auto have = [&](const Prefix& p) { return kByMass ? p.mass : p.count; };

  for (;;) {
    uint32_t low = key[0], high = key[0];
    for (int64_t i = 1; i < n; ++i) {
      low = std::min(low, key[i]);
      high = std::max(high, key[i]);
    }
    if (low == high) {  // ties: the lowest ids
      const int64_t missing = target - have(before), each = kByMass ? mass[0] : 1;
      const int64_t take = each > 0 ? (missing + each - 1) / each : n;
      return {from_order_key(low), id[take - 1], before.count + take, before.mass + take * mass[0]};
    }
    if (n <= kFew) return walk<kByMass>(key, id, mass, static_cast<int>(n), before, target);
    const int wanted = n > kBins ? 11 : 8, bits = 32 - __builtin_clz(high - low);
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
    // only this bin goes on; in place after the first time, behind what is read
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const uint32_t k = key[i];
      c.left_keys[kept] = k;
      c.left_ids[kept] = id[i];
      c.left_masses[kept] = mass[i];
      kept += (k - low) >> shift == bin;
    }
    n = kept;
    key = c.left_keys.data();
    id = c.left_ids.data();
    mass = c.left_masses.data();
  }
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
