// Pass A of sampling: one split of a row, that is 4096 tokens. The first look takes the maxima and brings the tokens into the
// L1 cache, the second one their exp. The sums run in an order that follows from the place in the row alone.
#pragma once

#include <cmath>
#include <limits>

#include <type_traits>

#include "rlkernel/sampling/arguments.h"
#include "rlkernel/sampling/stream.h"
#include "../factor_exp.h"
#include "../shuffles.h"
#include "../philox.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr int kGroup = static_cast<int>(kSamplingGroup);
constexpr int kGroups = static_cast<int>(kSamplingSplit / kSamplingGroup);  // of a split
constexpr int kVectors = kGroup / kWidth;                                   // of a group

inline float minus_infinity(float) { return -kInf; }
inline fp16 minus_infinity(fp16) { return {0xfc00}; }
inline bf16 minus_infinity(bf16) { return {0xff80}; }

template <class T>
inline float widen_one(T value) { return load_part(&value, 1)[0]; }
inline float widen_one(float value) { return value; }

// Up to a split of tokens as whole groups: a last one that is not whole is padded with -inf.
template <class T>
struct Groups {
  const T* begin;
  int whole, count;
  alignas(64) T last[kGroup];

  Groups(const T* x, int tokens) : begin(x), whole(tokens / kGroup), count((tokens + kGroup - 1) / kGroup) {
    if (whole == count) return;
    for (int i = 0; i < kGroup; ++i) {
      const int token = whole * kGroup + i;
      last[i] = token < tokens ? x[token] : minus_infinity(T{});
    }
  }

  const T* operator[](int g) const { return g < whole ? begin + g * kGroup : last; }
};

// The tokens of a group, in the order that is cheapest; put_in_order() then makes of what was computed of the lanes of two vectors, an
// even one and the next, what it would be in the order of the tokens. A sum needs that: the same tokens as fp32 have its bits.
template <class T>
inline void load_group(const T* group, Floats (&v)[kVectors]) {
  for (int i = 0; i < kVectors; ++i) v[i] = load(group + i * kWidth);
}
template <class T>
inline void put_in_order(Floats&, Floats&) {}
#if defined(__AVX512F__)
inline void load_group(const bf16* group, Floats (&v)[kVectors]) {
  const __m512i zero = _mm512_setzero_si512();
  for (int i = 0; i < kVectors; i += 2) {
    const __m512i both = _mm512_loadu_si512(group + i * kWidth);
    v[i] = (Floats)_mm512_maskz_unpacklo_epi16(0xffffffff, zero, both);  // four tokens of each eight
    v[i + 1] = (Floats)_mm512_maskz_unpackhi_epi16(0xffffffff, zero, both);
  }
}
template <>
inline void put_in_order<bf16>(Floats& a, Floats& b) {
  const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const Floats first = _mm512_maskz_permutex2var_ps(kAll, a, low, b);
  b = _mm512_maskz_permutex2var_ps(kAll, a, _mm512_add_epi32(low, _mm512_set1_epi32(8)), b);
  a = first;
}
#elif defined(__AVX2__)
inline void load_group(const bf16* group, Floats (&v)[kVectors]) {
  const __m256i zero = _mm256_setzero_si256();
  for (int i = 0; i < kVectors; i += 2) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(group + i * kWidth));
    v[i] = (Floats)_mm256_unpacklo_epi16(zero, both);  // tokens 0 to 3 and 8 to 11
    v[i + 1] = (Floats)_mm256_unpackhi_epi16(zero, both);
  }
}
template <>
inline void put_in_order<bf16>(Floats& a, Floats& b) {
  const Floats first = _mm256_permute2f128_ps(a, b, 0x20);
  b = _mm256_permute2f128_ps(a, b, 0x31);
  a = first;
}
#endif

// Lane i of the result combines the lanes of v[i]: kWidth groups at a time become one number each.
template <int kStep = 1, class Combine>
inline Floats across(const Floats* v, Combine combine) {
  if constexpr (kStep == kWidth) {
    return v[0];
  } else {
    Floats half[kWidth / kStep / 2];
    for (int j = 0; j < kWidth / kStep / 2; ++j)
      half[j] = combine(AllLanes::own<kStep>(v[2 * j], v[2 * j + 1]), AllLanes::other<kStep>(v[2 * j], v[2 * j + 1]));
    return across<kStep * 2>(half, combine);
  }
}

// A number for each group of a split, in `count` groups of which the rest holds `filler`.
struct alignas(64) PerGroup {
  Floats v[kGroups / kWidth];

  PerGroup() = default;
  template <class Combine>
  PerGroup(const Floats* parts, Combine combine) {
    for (int j = 0; j < kGroups / kWidth; ++j) v[j] = across(parts + j * kWidth, combine);
  }
  const float* values() const { return reinterpret_cast<const float*>(v); }
  float largest() const {
    Floats top = v[0];
    for (int j = 1; j < kGroups / kWidth; ++j) top = max(v[j], top);
    return largest_lane(top);
  }
  // The first group that has the value; 0 where none has.
  int find(float value) const {
    for (int j = 0; j < kGroups / kWidth; ++j)
      if (const unsigned lanes = bits_of(equal(v[j], broadcast(value)))) return j * kWidth + __builtin_ctz(lanes);
    return 0;
  }
};

template <class T>
inline int find_in_group(const T* group, float value) {
  for (int i = 0; i < kVectors; ++i)
    if (const unsigned lanes = bits_of(equal(load(group + i * kWidth), broadcast(value))))
      return i * kWidth + __builtin_ctz(lanes);
  return 0;  // of a NaN
}

struct Peaks {
  PerGroup groups;
  float largest;
  float least;  // of the whole groups
};

// NaN is passed over: the sum reports it.
template <class T>
inline Peaks peaks_of(const Groups<T>& z) {
  Floats parts[kGroups], least[kVectors];  // one would wait for itself
  for (Floats& each : least) each = broadcast(kInf);
  const auto one = [&](int g, const T* group) {
    Floats v[kVectors], top = broadcast(-kInf);
    load_group(group, v);
    for (int i = 0; i < kVectors; ++i) {
      top = max(v[i], top);
      if (g < z.whole) least[i] = min(v[i], least[i]);
    }
    parts[g] = top;
  };
  for (int g = 0; g < z.whole; ++g) one(g, z.begin + g * kGroup);
  if (z.whole < z.count) one(z.whole, z.last);
  for (int g = z.count; g < kGroups; ++g) parts[g] = broadcast(-kInf);
  const PerGroup groups(parts, [](Floats a, Floats b) { return max(a, b); });
  for (int i = 1; i < kVectors; ++i) least[0] = min(least[i], least[0]);
  return {groups, groups.largest(), folded(least[0], [](Floats a, Floats b) { return min(a, b); })};
}

template <class T>
inline bool has_nan(const Groups<T>& z) {
  Bits nan{};
  for (int g = 0; g < z.count; ++g)
    for (int i = 0; i < kVectors; ++i) {
      const Floats v = load(z[g] + i * kWidth);
      nan |= (Bits)(v != v);
    }
  return any(nan);
}

template <class T>
inline int finite_count(const Groups<T>& z) {
  int count = 0;
  for (int g = 0; g < z.count; ++g)
    for (int i = 0; i < kVectors; ++i)
      count += __builtin_popcount(bits_of(above(load(z[g] + i * kWidth), broadcast(-kInf))));
  return count;
}

// Masses of the groups relative to the split's maximum, and the sum of e * d.
template <class T, bool kEntropy>
inline PerGroup masses_of(const Groups<T>& z, const Peaks& peaks, const FactorExp& exp, int64_t ahead, double& weighted) {
  const Floats top_z = broadcast(peaks.largest);
  Floats parts[kGroups], products[kVectors] = {};
  const auto one = [&](int g, const T* group, auto cuts) {
    Floats e[kVectors];
    load_group(group, e);
    for (int i = 0; i < kVectors; ++i) {
      Floats d = e[i] - top_z;
      if constexpr (cuts) d = exp.cut(d);
      e[i] = exp(d);
      if constexpr (kEntropy) products[i] = fma(e[i], d, products[i]);
    }
    for (int half = kVectors / 2; half > 1; half /= 2)
      for (int i = 0; i < half; ++i) e[i] += e[i + half];
    put_in_order<T>(e[0], e[1]);
    parts[g] = e[0] + e[1];
  };
  const auto whole_groups = [&](auto cuts) {
    for (int g = 0; g < z.whole; ++g) {
      // the next split streams in while this one is computed
      for (unsigned line = 0; line < kGroup * sizeof(T); line += 64)
        prefetch(reinterpret_cast<const char*>(z.begin + g * kGroup + ahead) + line);
      one(g, z.begin + g * kGroup, cuts);
    }
  };
  if (exp.is_uncut(peaks.least - peaks.largest)) whole_groups(std::false_type{});
  else whole_groups(std::true_type{});
  if (z.whole < z.count) one(z.whole, z.last, std::true_type{});
  for (int g = z.count; g < kGroups; ++g) parts[g] = Floats{};
  if constexpr (kEntropy) {
    for (int half = kVectors / 2; half > 1; half /= 2)
      for (int i = 0; i < half; ++i) products[i] += products[i + half];
    put_in_order<T>(products[0], products[1]);
    weighted = total(products[0] + products[1]);
  }
  return PerGroup(parts, [](Floats a, Floats b) { return a + b; });
}

inline double sum_of(const PerGroup& masses) {
  double sum = 0;
  for (int j = 0; j < kGroups / kWidth; ++j) sum += total(masses.v[j]);
  return sum;
}

// Of values whose squares are no floats.
template <class T>
inline void wide_moments_of(const Groups<T>& z, int count, double& mean, double& squares) {
  const auto each = [&](auto body) {
    for (int g = 0; g < z.count; ++g)
      for (int i = 0; i < kGroup; ++i)
        if (const float v = widen_one(z[g][i]); v > -kInf) body(static_cast<double>(v));
  };
  squares = mean = 0;
  each([&](double v) { mean += v / count; });
  each([&](double v) { squares += (v - mean) * (v - mean); });
}

// Mean of the finite values and the sum of their squared deviations, in two looks.
template <class T>
inline void moments_of(const Groups<T>& z, int count, double& mean, double& squares) {
  double sum = 0;
  squares = mean = 0;
  if (count == 0) return;
  for (int g = 0; g < z.count; ++g) {
    Floats part = {};
    for (int i = 0; i < kVectors; ++i) {
      const Floats v = load(z[g] + i * kWidth);
      part += v > broadcast(-kInf) ? v : Floats{};
    }
    sum += total(part);
  }
  mean = sum / count;
  const Floats middle = broadcast(static_cast<float>(mean));
  double off = 0;
  for (int g = 0; g < z.count; ++g) {
    Floats part = {}, deviation = {};
    for (int i = 0; i < kVectors; ++i) {
      const Floats v = load(z[g] + i * kWidth), d = v > broadcast(-kInf) ? v - middle : Floats{};
      deviation += d;
      part = fma(d, d, part);
    }
    squares += total(part);
    off += total(deviation);
  }
  mean = static_cast<double>(middle[0]) + off / count;  // what rounding the middle left out
  squares -= off * off / count;
  if (!(squares > 1e-20 && squares < 1e37)) wide_moments_of(z, count, mean, squares);
}

struct RowKey {
  int64_t seed, position;
};

inline Bits iota(uint32_t first) {
  static const uint32_t places[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  Bits b;
  std::memcpy(&b, places, sizeof b);
  return b + first;
}
inline Bits broadcast_bits(uint32_t x) { return x - Bits{}; }

inline Floats exponential(Floats u) {
  const Floats far = -log(max(1.0f - u, broadcast(0x1p-24f)));
  return u < broadcast(0.25f) ? stream_series(u) : far;
}

// The winner among tokens so far by d / T + noise, the noise being a Gumbel variable of each token.
struct Gumbel {
  uint32_t prefix;
  float temperature, best = -kInf;
  Floats bound = broadcast(kInf);
  int64_t token = -1;

  Gumbel(uint32_t stream, float t) : prefix(stream), temperature(t) {}

  // Of tokens from `first` on, those whose e = exp(d / T) is not 0. Taking logarithms only where u <= e / exp(best), with some
  // room for rounding, drops none that could win: -log(1 - u) >= u.
  void look(Floats d, Floats e, int64_t first) {
    const Bits word = stream_word(broadcast_bits(prefix), iota(static_cast<uint32_t>(first)));
    const Floats high = __builtin_convertvector((Ints)(word >> 16), Floats);
    const Floats low = __builtin_convertvector((Ints)(word & 0xffffu), Floats);
    const Floats u = high * 0x1p-16f + (low + 0.5f) * 0x1p-32f;
    unsigned lanes = bits_of(at_least(e * bound, u));
    if (lanes == 0) return;
    const Floats key = d / broadcast(temperature) - log(exponential(u));
    bool better = false;
    for (; lanes != 0; lanes &= lanes - 1) {
      const int lane = __builtin_ctz(lanes);
      if (key[lane] > best) {
        best = key[lane];
        token = first + lane;
        better = true;
      }
    }
    if (better) bound = broadcast(std::exp(-best) * 1.001f);
  }
};

struct Draw {
  double key = -std::numeric_limits<double>::infinity();
  int token = -1;  // in the split
};

template <class T>
inline Draw draw_gumbel(const Groups<T>& z, float top, const FactorExp& exp, float temperature, RowKey key,
                        int64_t first) {
  Gumbel winner(stream_prefix(key.seed, key.position), temperature);
  const Floats top_z = broadcast(top);
  for (int g = 0; g < z.count; ++g)
    for (int i = 0; i < kVectors; ++i) {
      const Floats d = exp.cut(load(z[g] + i * kWidth) - top_z);
      winner.look(d, exp(d), first + g * kGroup + i * kWidth);
    }
  if (winner.token < 0) return {};
  return {winner.best, static_cast<int>(winner.token - first)};
}

// The uniforms of the groups from an even one on: stream_uniform(stream_bits(kGroupDomain, ...)).
struct GroupUniforms {
  RowKey key;

  Floats operator()(uint32_t first_group) const {
    const uint64_t seed = static_cast<uint64_t>(key.seed), position = static_cast<uint64_t>(key.position);
    const PhiloxBlocks x = philox({wide_iota(first_group / 2), wide(kGroupDomain), wide(position), wide(position >> 32)},
                                  static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
    const Floats u = __builtin_convertvector(pairs(x.first, x.third), Floats) * 0x1p-32f;
    // from 2^-7 on half a unit in the last place is 2^-31, and what the low word adds less than 2^-32
    if (bits_of(above(broadcast(0x1p-7f), u)) == 0) return u;
    return u + (__builtin_convertvector(pairs(x.second, x.fourth), Floats) + 0.5f) * 0x1p-64f;
  }

 private:
  static Wide wide(uint64_t x) { return x - Wide{}; }
  static Wide wide_iota(uint64_t first) {
    static const uint64_t places[8] = {0, 1, 2, 3, 4, 5, 6, 7};
    Wide x;
    std::memcpy(&x, places, sizeof x);
    return x + first;
  }
  // The words of an even and an odd group side by side.
  static Bits pairs(Wide even, Wide odd) { return (Bits)AllLanes::own<1>((Floats)even, (Floats)(odd << 32)); }
};

// One exponential for each group: its best noisy logit is log(mass / exponential). Then one integer draw inside.
template <class T>
inline Draw draw_grouped(const Groups<T>& z, const PerGroup& group_max, const PerGroup& masses, const FactorExp& exp,
                         RowKey key, uint32_t first_group) {
  // E = -log(1 - u) is from u to u / (1 - u), which tells most groups that they lose without a logarithm
  const GroupUniforms uniform{key};
  PerGroup uniforms, most, keys;
  Floats least = {};
  for (int j = 0; j < kGroups / kWidth; ++j) {
    uniforms.v[j] = uniform(first_group + static_cast<uint32_t>(j * kWidth));
    most.v[j] = masses.v[j] / uniforms.v[j];
    least = max(most.v[j] - masses.v[j], least);
  }
  const Floats bound = broadcast(largest_lane(least) * 0.9999f);
  for (int j = 0; j < kGroups / kWidth; ++j)
    keys.v[j] = bits_of(at_least(most.v[j], bound)) != 0 ? log(masses.v[j] / exponential(uniforms.v[j])) : broadcast(-kInf);
  const float best = keys.largest();
  const int group = keys.find(best);

  alignas(64) float e[kGroup];
  alignas(64) int64_t mass[kGroup];
  const Floats top = broadcast(group_max.values()[group]);
  for (int i = 0; i < kVectors; ++i) store(e + i * kWidth, exp(exp.cut(load(z[group] + i * kWidth) - top)));
  constexpr int kPart = 8;
  int64_t parts[kGroup / kPart] = {}, sum = 0;
  for (int i = 0; i < kGroup; ++i) mass[i] = stream_mass(e[i]);
  for (int i = 0; i < kGroup / kPart; ++i) {
    for (int j = 0; j < kPart; ++j) parts[i] += mass[i * kPart + j];
    sum += parts[i];
  }
  int64_t left = stream_below(stream_bits(kMemberDomain, key.seed, key.position), sum);
  int part = 0;
  while (part < kGroup / kPart - 1 && left >= parts[part]) left -= parts[part++];
  int token = part * kPart;
  while (token < kGroup - 1 && left >= mass[token]) left -= mass[token++];
  return {best, group * kGroup + token};
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
