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
  // One for each lane.
  void store_to(int64_t* p) const {
#if defined(__AVX512F__)
    _mm512_storeu_si512(p, (__m512i)((Wide)low & kMassBits));
    _mm512_storeu_si512(p + 8, (__m512i)((Wide)high & kMassBits));
#elif defined(__AVX2__)
    const __m256i bits = _mm256_set1_epi64x(kMassBits);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_and_si256(low, bits));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 4), _mm256_and_si256(high, bits));
#else
    std::memcpy(p, each, sizeof each);
#endif
  }
  static constexpr int64_t kMassBits = 0xfffffffffffff;
  static constexpr double kScale = 0x1p40, kBias = 0x1p52;
  static constexpr uint64_t kBiasBits = 0x4330000000000000u;
};

// The sum of the integer masses of e = exp(d / T), exact, so in any order. A mass is taken apart in floats: the multiple of 2^-20
// that is nearest to e, and of what is left the nearest multiple of 2^-40. Both are integers in the low bits of a sum with 1.5
// times a power of two, and those bits are summed in 32 bits, modulo 2^32, for as long as the sums themselves fit.
class MassSum {
 public:
  static constexpr int kMost = 1024;  // vectors between two calls of flush(): a high part is up to 2^20

  void add(Floats e) {
    const Floats high = e + broadcast(kHigh), low = (e - (high - broadcast(kHigh))) + broadcast(kLow);
    high_ += (Ints)high;
    low_ += (Ints)low;
    whole_ += 1;
  }
  // Of the lanes of a mask; `rest` takes all of them.
  void add(Floats e, Mask lanes, MassSum& rest) {
    const Floats high = e + broadcast(kHigh), low = (e - (high - broadcast(kHigh))) + broadcast(kLow);
    rest.high_ += (Ints)high;
    rest.low_ += (Ints)low;
    rest.whole_ += 1;
    high_ += (Ints)where(lanes, high);
    low_ += (Ints)where(lanes, low);
#if defined(__AVX512F__)
    lanes_ = (Ints)_mm512_mask_sub_epi32((__m512i)lanes_, lanes, (__m512i)lanes_, _mm512_set1_epi32(-1));
#else
    lanes_ -= lanes;
#endif
  }
  void add(Floats e, Mask lanes) {
    MassSum unused;
    add(e, lanes, unused);
  }
  void flush() {
    lanes_ += whole_;
    const Ints high = high_ - lanes_ * __builtin_bit_cast(int32_t, kHigh), low = low_ - lanes_ * __builtin_bit_cast(int32_t, kLow);
    for (int i = 0; i < kWidth; ++i) {
      count_ += lanes_[i];
      sum_ += static_cast<int64_t>(static_cast<uint32_t>(high[i])) * (1 << 20) + low[i];
    }
    high_ = low_ = lanes_ = Ints{};
    whole_ = 0;
  }
  int64_t count() const { return count_; }  // lanes that were added, both as of the last flush()
  int64_t value() const { return sum_; }

 private:
  static constexpr float kHigh = 0x1.8p3f, kLow = 0x1.8p-17f;

  Ints high_ = {}, low_ = {}, lanes_ = {};
  int32_t whole_ = 0;  // vectors that were added with all their lanes
  int64_t count_ = 0, sum_ = 0;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each mask of eight lanes the places of those that it has, which AVX2 has no instruction to move together.
struct Places {
  uint8_t of[256][8] = {};

  constexpr Places() {
    for (int mask = 0; mask < 256; ++mask)
      for (int lane = 0, n = 0; lane < 8; ++lane)
        if (mask >> lane & 1) of[mask][n++] = static_cast<uint8_t>(lane);
  }
};
constexpr Places kPlaces;

inline __m256i places_of(unsigned mask) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPlaces.of[mask])));
}
#endif

// Appends the lanes of `mask`, counted from `first`; up to kWidth - 1 elements behind the last one are overwritten.
inline void append_ids(int32_t* ids, int64_t& n, unsigned mask, int64_t first) {
#if defined(__AVX512F__)
  const __m512i all = (__m512i)iota(static_cast<uint32_t>(first));
  _mm512_storeu_si512(ids + n, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), all));
  n += __builtin_popcount(mask);
#elif defined(__AVX2__)
  const Ints kept = (Ints)places_of(mask) + static_cast<int32_t>(first);
  std::memcpy(ids + n, &kept, sizeof kept);
  n += __builtin_popcount(mask);
#else
  for (; mask != 0; mask &= mask - 1) ids[n++] = static_cast<int32_t>(first + __builtin_ctz(mask));
#endif
}

// The same, and what stands in these lanes.
inline void append(float* z, int32_t* ids, int64_t& n, Floats v, unsigned mask, int64_t first) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(z + n, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), v));
#elif defined(__AVX2__)
  store(z + n, _mm256_permutevar8x32_ps(v, places_of(mask)));
#else
  int64_t end = n;
  for (unsigned left = mask; left != 0; left &= left - 1) z[end++] = v[__builtin_ctz(left)];
#endif
  append_ids(ids, n, mask, first);
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
