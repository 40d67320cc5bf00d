// Between which numbers those of 16 bits lie, by their bits: the largest of those that are not negative is the largest integer with
// a sign, the least of those that are negative the largest without one. A third of the operations that it takes in fp32.
#pragma once

#include <limits>

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

struct Range {
  float least, most;  // `least` may be lower than the least number
};

#if defined(__AVX2__)

constexpr uint16_t infinity_of(fp16) { return 0x7c00; }
constexpr uint16_t infinity_of(bf16) { return 0x7f80; }

class HalfRange {
 public:
#if defined(__AVX512F__)
  typedef __m512i Vector;
  static Vector read(const void* p) { return _mm512_loadu_si512(p); }
  static Vector spread(int16_t x) { return _mm512_set1_epi16(x); }
  static Vector signed_max(Vector a, Vector b) { return _mm512_maskz_max_epi16(0xffffffff, a, b); }
  static Vector unsigned_max(Vector a, Vector b) { return _mm512_maskz_max_epu16(0xffffffff, a, b); }
#else
  typedef __m256i Vector;
  static Vector read(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  static Vector spread(int16_t x) { return _mm256_set1_epi16(x); }
  static Vector signed_max(Vector a, Vector b) { return _mm256_max_epi16(a, b); }
  static Vector unsigned_max(Vector a, Vector b) { return _mm256_max_epu16(a, b); }
#endif
  static constexpr int kElements = sizeof(Vector) / 2;

  void look(Vector x) {
    largest_ = signed_max(largest_, x);
    lowest_ = unsigned_max(lowest_, x);
  }
  void look(const HalfRange& other) {
    largest_ = signed_max(largest_, other.largest_);
    lowest_ = unsigned_max(lowest_, other.lowest_);
  }

  // False where a NaN was seen, or only negative numbers.
  template <class T>
  bool find(Range& range) const {
    constexpr uint16_t kSign = 0x8000, inf = infinity_of(T{});
    const uint16_t largest = least_of(folded(largest_, [](__m128i a, __m128i b) { return _mm_max_epi16(a, b); }), 0x7fff);
    const uint16_t lowest = least_of(folded(lowest_, [](__m128i a, __m128i b) { return _mm_max_epu16(a, b); }), 0xffff);
    if (largest > inf || lowest > (kSign | inf)) return false;
    range = {lowest < kSign ? 0 : widened<T>(lowest), widened<T>(largest)};
    return true;
  }

 private:
  template <class Combine>
  static __m128i folded(Vector x, Combine combine) {
    __m128i parts[sizeof(Vector) / 16];
    std::memcpy(parts, &x, sizeof x);
    for (unsigned i = 1; i < sizeof(Vector) / 16; ++i) parts[0] = combine(parts[0], parts[i]);
    return parts[0];
  }
  // Of eight: with all bits turned, or all but the sign, the largest is the least without a sign, which one instruction finds.
  static uint16_t least_of(__m128i x, uint16_t turned) {
    const __m128i found = _mm_minpos_epu16(_mm_xor_si128(x, _mm_set1_epi16(static_cast<int16_t>(turned))));
    return static_cast<uint16_t>(_mm_cvtsi128_si32(found)) ^ turned;
  }
  template <class T>
  static float widened(uint16_t bits) {
    const T number{bits};
    return load_part(&number, 1)[0];
  }

  Vector largest_ = spread(-0x8000), lowest_ = {};
};

#endif

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
