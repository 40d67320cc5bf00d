// Philox of several blocks at a time. A word stands in the low half of a lane of 64 bits, where a product is made of it without
// a shuffle; what a product or a xor leaves above it is read by none.
#pragma once

#include "rlkernel/philox.h"
#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

typedef uint64_t Wide __attribute__((vector_size(kWidth * 4)));

inline Wide product_of_words(Wide a, uint32_t b) {
#if defined(__AVX512F__)
  return (Wide)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));
#elif defined(__AVX2__)
  return (Wide)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (Wide)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & 0xffffffffu) * b;
#endif
}

struct PhiloxBlocks {
  Wide first, second, third, fourth;
};

inline PhiloxBlocks philox(PhiloxBlocks x, uint32_t low_key, uint32_t high_key) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const Wide p = product_of_words(x.first, kPhiloxFirst), q = product_of_words(x.third, kPhiloxSecond);
    x = {(q >> 32) ^ x.second ^ uint64_t{low_key}, q, (p >> 32) ^ x.fourth ^ uint64_t{high_key}, p};
    low_key += kPhiloxLowStep;
    high_key += kPhiloxHighStep;
  }
  return x;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
