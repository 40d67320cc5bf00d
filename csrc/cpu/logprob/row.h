// A row of a tile: vector by vector with what maps its logits, or as they are, in the same lanes on every instruction set.
#pragma once

#include <limits>

#include "../simd.h"
#include "rlkernel/logprob/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// One row of a tile as fp32: y = softcap * tanh(u / softcap), u = (x + bias) * logit_scale. Not kMapped: y = x.
template <class T, bool kMapped>
struct Row {
  struct Value {
    Floats y, slope;  // slope = dy / du
  };

  const T* x;
  const float* bias;
  float logit_scale, softcap;

  Row(const LogprobTile& tile, int64_t r)
      : x(static_cast<const T*>(tile.logits) + r / tile.inner * tile.outer_stride + r % tile.inner * tile.inner_stride),
        bias(tile.bias), logit_scale(tile.logit_scale), softcap(tile.softcap) {}

  Value map(Floats v, const float* b, int count) const {
    if constexpr (kMapped) {
      if (bias != nullptr) v += count == kWidth ? load(b) : load_part(b, count);
      v *= broadcast(logit_scale);
      if (softcap != 0) {
        const Tanh tanh(v / broadcast(softcap));
        return {broadcast(softcap) * tanh.value, tanh.slope};
      }
    }
    return {v, broadcast(1.0f)};
  }

  Value at(int64_t i) const { return map(load(x + i), bias + i, kWidth); }
  Value part(int64_t i, int count) const { return map(load_part(x + i, count), bias + i, count); }
  float y(int64_t i) const { return part(i, 1).y[0]; }
};

// Sixteen logits that join the sixteen lanes of a sum, in one vector or in several: logit i of a block belongs to lane i % 16, of
// whatever dtype it is, so that equal logits have equal sums. place(i) is the lane of the i-th number of the vectors.
constexpr int kLanes = 16, kParts = kLanes / kWidth;

template <class T>
struct Lanes {
  static constexpr int place(int i) { return i; }

  Floats v[kParts];

  explicit Lanes(const T* p) {
    for (int k = 0; k < kParts; ++k) v[k] = load(p + k * kWidth);
  }
};

#if defined(__AVX2__) && !defined(__AVX512F__)
// With zeros below them they are fp32 after one operation for a vector, which stays in halves of 128 bits; a load that widens takes
// two and crosses them.
template <>
struct Lanes<bf16> {
  static constexpr int place(int i) { return (i & 3) | (i & 4) << 1 | (i & 8) >> 1; }

  Floats v[kParts];

  explicit Lanes(const bf16* p) {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), zero = _mm256_setzero_si256();
    v[0] = (Floats)_mm256_unpacklo_epi16(zero, all);
    v[1] = (Floats)_mm256_unpackhi_epi16(zero, all);
  }
};
#endif

// What is computed for each logit alone, and in no sum: of bf16 twice as many, the even ones and the odd ones of a vector, which are
// numbers of 32 bits after one operation each.
template <class T>
struct Step {
  static constexpr int kElements = kLanes, kVectors = kParts;

  Floats v[kVectors];

  explicit Step(const T* p) {
    for (int k = 0; k < kVectors; ++k) v[k] = load(p + k * kWidth);
  }
  Step() = default;
  void store_to(T* p) const {
    for (int k = 0; k < kVectors; ++k) store(p + k * kWidth, v[k]);
  }
  void stream_to(T* p) const {
    for (int k = 0; k < kVectors; ++k) stream(p + k * kWidth, v[k]);
  }
};

template <>
struct Step<bf16> {
  static constexpr int kElements = 2 * kLanes, kVectors = 2 * kParts;

  Floats v[kVectors];  // the even ones, then the odd ones

  explicit Step(const bf16* p) {
    for (int k = 0; k < kParts; ++k) load_pairs(p + 2 * k * kWidth, v[k], v[k + kParts]);
  }
  Step() = default;
  void store_to(bf16* p) const {
    for (int k = 0; k < kParts; ++k) {
      const Bits pairs = rounded(v[k], v[k + kParts]);
      std::memcpy(p + 2 * k * kWidth, &pairs, sizeof pairs);
    }
  }
  void stream_to(bf16* p) const {
    for (int k = 0; k < kParts; ++k)
      stream(reinterpret_cast<float*>(p + 2 * k * kWidth), (Floats)rounded(v[k], v[k + kParts]));
  }

 private:
  // To nearest even, both at once in halves of 16 bits. A NaN stays one, unless the bits behind its upper half are all ones.
  static Bits rounded(Floats even, Floats odd) {
#if defined(__AVX512F__)
    constexpr __mmask32 kOdd = 0xaaaaaaaa;
    const __m512i a = (__m512i)even, b = (__m512i)odd, one = _mm512_set1_epi16(1);
    const __m512i high = _mm512_mask_blend_epi16(kOdd, (__m512i)((Bits)even >> 16), b);
    __m512i low = _mm512_mask_blend_epi16(kOdd, a, (__m512i)((Bits)odd << 16));
    low = _mm512_subs_epu16(low, (__m512i)(~(Bits)high & (Bits)one));  // a tie stays below a half where the upper half is even
    return (Bits)_mm512_add_epi16(high, _mm512_srli_epi16(low, 15));
#elif defined(__AVX2__)
    const __m256i a = (__m256i)even, b = (__m256i)odd, one = _mm256_set1_epi16(1);
    const __m256i high = _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
    __m256i low = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
    low = _mm256_subs_epu16(low, _mm256_andnot_si256(high, one));
    return (Bits)_mm256_add_epi16(high, _mm256_srli_epi16(low, 15));
#else
    const Bits a = (Bits)even, b = (Bits)odd;
    const Bits below = (a + 0x7fffu + ((a >> 16) & 1u)) >> 16, above = b + 0x7fffu + ((b >> 16) & 1u);
    return below | (above & 0xffff0000u);
#endif
  }
};

inline float minus_infinity(float) { return -kInf; }
inline fp16 minus_infinity(fp16) { return {0xfc00}; }
inline bf16 minus_infinity(bf16) { return {0xff80}; }

// Fewer than sixteen logits, which -inf makes as many.
template <class T>
struct Padded {
  T logits[kLanes];

  Padded(const T* p, int64_t count) {
    for (T& logit : logits) logit = minus_infinity(T{});
    std::memcpy(logits, p, count * sizeof(T));
  }
};

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
