#include "bf16_pairs.h"

#if defined(__x86_64__)
#include <cstdint>
#include <cstring>

#include <immintrin.h>

namespace rlkernel::cpu {
namespace {

constexpr int kLanes = 16;

struct Case {
  uint32_t sum[kLanes], a[kLanes], b[kLanes];  // fp32, and pairs of bf16 with the second in the upper half
};

__attribute__((target("avx512f,avx512bf16"))) void by_instruction(const Case& x, uint32_t (&out)[kLanes]) {
  const __m512 sum = _mm512_loadu_ps(x.sum);
  const __m512bh a = (__m512bh)_mm512_loadu_si512(x.a), b = (__m512bh)_mm512_loadu_si512(x.b);
  _mm512_storeu_ps(out, _mm512_dpbf16_ps(sum, a, b));
}

__attribute__((target("avx512f"))) void by_two_fmas(const Case& x, uint32_t (&out)[kLanes]) {
  const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  const __m512i a = _mm512_loadu_si512(x.a), b = _mm512_loadu_si512(x.b);
  const __m512 a1 = (__m512)_mm512_and_si512(a, upper), b1 = (__m512)_mm512_and_si512(b, upper);
  const __m512 a0 = (__m512)_mm512_maskz_slli_epi32(0xffff, a, 16), b0 = (__m512)_mm512_maskz_slli_epi32(0xffff, b, 16);
  const __m512 second = _mm512_fmadd_ps(a1, b1, _mm512_loadu_ps(x.sum));
  _mm512_storeu_ps(out, _mm512_fmadd_ps(a0, b0, second));
}

bool is_nan(uint32_t x) { return (x & 0x7fffffffu) > 0x7f800000u; }

class Draw {
 public:
  uint32_t bits() {  // xorshift: the same numbers in every process
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return static_cast<uint32_t>(state_ >> 16);
  }

  // fp32 whose exponent is one of `count` from `least` on.
  uint32_t fp32(uint32_t least, uint32_t count) { return (bits() & 0x807fffffu) | (least + bits() % count) << 23; }
  uint32_t pair(uint32_t least, uint32_t count) { return fp32(least, count) >> 16 | (fp32(least, count) & 0xffff0000u); }

 private:
  uint64_t state_ = 0x9e3779b97f4a7c15u;
};

}  // namespace

bool bf16_pairs_as_declared() {
  // exponents, biased, of the pairs and of the sum: products beside the sum, far below, below the normal range, beyond the
  // largest number; all that there are, with infinities, NaNs and denormals; and sums at the least normal number
  struct Range {
    uint32_t least, count, least_sum, count_sum;
  };
  const Range ranges[] = {{118, 16, 112, 32},  {124, 4, 134, 4}, {54, 18, 0, 24},
                          {180, 16, 238, 17}, {0, 256, 0, 256}, {46, 12, 1, 1}};
  constexpr int kRounds = 64;
  Draw draw;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);
  bool same = true;
  for (const Range& range : ranges)
    for (int round = 0; round < kRounds; ++round) {
      Case x;
      uint32_t got[kLanes], want[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        x.a[i] = draw.pair(range.least, range.count);
        x.b[i] = draw.pair(range.least, range.count);
        x.sum[i] = draw.fp32(range.least_sum, range.count_sum);
        if (range.count_sum == 1) x.sum[i] &= 0xff800003u;
        if (i % 4 == 0) {  // products that cancel but for their last digits
          x.a[i] = (x.a[i] & 0xffff0000u) | ((x.a[i] >> 16) ^ 0x8001u);
          x.b[i] = (x.b[i] & 0xffff0000u) | x.b[i] >> 16;
        }
      }
      by_instruction(x, got);
      by_two_fmas(x, want);
      for (int i = 0; i < kLanes; ++i) same = same && (got[i] == want[i] || (is_nan(got[i]) && is_nan(want[i])));
    }
  _mm_setcsr(before);
  return same;
}

}  // namespace rlkernel::cpu
#endif
