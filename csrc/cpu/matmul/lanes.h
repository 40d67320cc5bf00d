// Chains of eight lanes, the accumulators of the matrix product: as many in a register as it is wide.
#pragma once

#include "rlkernel/matmul/arguments.h"

#include "../simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

constexpr int kLanes = kChainLanes;

#if defined(__AVX512F__)
constexpr int kChains = 2;  // of a register: two rows of the product, one column
#else
constexpr int kChains = 1;
#endif

typedef float Eight __attribute__((vector_size(kLanes * 4)));
typedef float Register __attribute__((vector_size(kChains * kLanes * 4)));

// Eight elements as fp32, which is exact.
#if defined(__AVX2__)
inline Eight eight(const float* p) { return _mm256_loadu_ps(p); }
inline __m128i halves_of(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline Eight eight(const bf16* p) { return (Eight)_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves_of(p)), 16); }
inline Eight eight(const fp16* p) { return _mm256_cvtph_ps(halves_of(p)); }
#else
template <class T>
inline Eight eight(const T* p) {
  float x[kLanes];
  for (int i = 0; i < kLanes; i += kWidth) store(x + i, load(p + i));
  Eight result;
  std::memcpy(&result, x, sizeof x);
  return result;
}
#endif

// Dword i is p[i] and q[i].
inline Eight interleaved(const bf16* p, const bf16* q) {
#if defined(__AVX2__)
  const __m128i x = halves_of(p), y = halves_of(q);
  return (Eight)_mm256_setr_m128i(_mm_unpacklo_epi16(x, y), _mm_unpackhi_epi16(x, y));
#else
  uint32_t pairs[kLanes];
  for (int i = 0; i < kLanes; ++i) pairs[i] = p[i].bits | static_cast<uint32_t>(q[i].bits) << 16;
  Eight result;
  std::memcpy(&result, pairs, sizeof pairs);
  return result;
#endif
}

inline void put(float* p, Eight x) { std::memcpy(p, &x, sizeof x); }

inline Register packed(const float* p) {
  Register x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

// The same eight elements for every chain of a register.
#if defined(__AVX512F__)
inline Register spread(const float* p) { return _mm512_maskz_broadcast_f32x8(kAll, _mm256_loadu_ps(p)); }
inline Register spread(const bf16* p) {
  const __m256i both = _mm256_broadcastsi128_si256(halves_of(p));
  return (Register)((Bits)_mm512_maskz_cvtepu16_epi32(kAll, both) << 16);
}
inline Register spread(const fp16* p) { return _mm512_maskz_cvtph_ps(kAll, _mm256_broadcastsi128_si256(halves_of(p))); }
#else
template <class T>
inline Register spread(const T* p) { return eight(p); }
#endif

// One rounding, on every machine: the baseline of x86 has no such instruction and asks the C library.
template <class Vector>
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX2__)
  return fma(a, b, c);
#else
  for (size_t i = 0; i < sizeof(Vector) / 4; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// The sums of the chains of four columns, of x and then of y: results[c * 4 + n] is chain c of column n.
inline void total(const Register (&x)[4], const Register (&y)[4], float (&results)[2 * kChains * 4]) {
#if defined(__AVX512F__)
  const auto fold = [](__m512 a, __m512 b) {  // lane i and i + 4, of both chains of a and then of b
    return _mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88) + _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xdd);
  };
  const auto halved = [&](const Register(&l)[4]) {
    const __m512 s = fold(l[0], l[1]), t = fold(l[2], l[3]);
    return _mm512_maskz_shuffle_ps(kAll, s, t, 0x44) + _mm512_maskz_shuffle_ps(kAll, s, t, 0xee);
  };
  const __m512 u = halved(x), v = halved(y);
  const __m512 w = _mm512_maskz_shuffle_ps(kAll, u, v, 0x88) + _mm512_maskz_shuffle_ps(kAll, u, v, 0xdd);
  const __m512i order = _mm512_setr_epi32(0, 8, 1, 9, 4, 12, 5, 13, 2, 10, 3, 11, 6, 14, 7, 15);
  _mm512_storeu_ps(results, _mm512_maskz_permutexvar_ps(kAll, order, w));
#elif defined(__AVX2__)
  const auto fold = [](__m256 a, __m256 b) { return _mm256_permute2f128_ps(a, b, 0x20) + _mm256_permute2f128_ps(a, b, 0x31); };
  const auto halved = [&](const Register(&l)[4]) {
    const __m256 s = fold(l[0], l[1]), t = fold(l[2], l[3]);
    return _mm256_shuffle_ps(s, t, 0x44) + _mm256_shuffle_ps(s, t, 0xee);
  };
  const __m256 u = halved(x), v = halved(y);
  const __m256 w = _mm256_shuffle_ps(u, v, 0x88) + _mm256_shuffle_ps(u, v, 0xdd);
  _mm256_storeu_ps(results, _mm256_permutevar8x32_ps(w, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
#else
  for (int n = 0; n < 8; ++n) {
    const Register& l = n < 4 ? x[n] : y[n - 4];
    results[n] = ((l[0] + l[4]) + (l[2] + l[6])) + ((l[1] + l[5]) + (l[3] + l[7]));
  }
#endif
}

// Column i of the rows becomes row i.
inline void transpose(Eight (&x)[kLanes]) {
  Eight y[kLanes], z[kLanes];
  for (int i = 0; i < kLanes; i += 2) {
    y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 2; ++j) {
      z[i + 2 * j] = __builtin_shufflevector(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      z[i + 2 * j + 1] = __builtin_shufflevector(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; ++i) {
    x[i] = __builtin_shufflevector(z[i], z[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    x[i + 4] = __builtin_shufflevector(z[i], z[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
