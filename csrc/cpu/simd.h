// Vectors of floats for the files that are compiled once per instruction set: load and store of fp32, fp16 and bf16,
// exp and tanh. Everything lives in the namespace of the instruction set, or the linker would keep one copy of an inline
// function for all of them.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "rlkernel/dtype.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
#if defined(RLKERNEL_FUSED)  // by a file whose bits are those of every instruction set, so these are functions of its own
inline namespace fused {
#endif

#if defined(__AVX512F__)
constexpr int kWidth = 16;
constexpr __mmask16 kAll = 0xffff;  // GCC 12 warns of its own unmasked forms
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Floats __attribute__((vector_size(kWidth * 4)));
typedef int32_t Ints __attribute__((vector_size(kWidth * 4)));
typedef uint32_t Bits __attribute__((vector_size(kWidth * 4)));
typedef uint16_t Halves __attribute__((vector_size(kWidth * 2)));

struct fp16 { uint16_t bits; };
struct bf16 { uint16_t bits; };

// Calls body with a value of the type that `dtype` names.
template <class Body>
void with_type(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f32: return body(float{});
    case Dtype::f16: return body(fp16{});
    case Dtype::bf16: return body(bf16{});
  }
}

inline Floats broadcast(float x) { return x - Floats{}; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(a, b, c);
#elif defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#elif defined(RLKERNEL_FUSED)
  for (int i = 0; i < kWidth; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);  // a call where there is no such instruction
  return c;
#else
  return a * b + c;
#endif
}

// b where either is NaN, which is what the x86 instruction does.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_max_ps(kAll, a, b);
#elif defined(__AVX2__)
  return _mm256_max_ps(a, b);
#elif defined(__SSE2__)
  return _mm_max_ps(a, b);
#else
  return a > b ? a : b;
#endif
}

// As max: b where either is NaN.
inline Floats min(Floats a, Floats b) {
#if defined(__AVX512F__)
  return _mm512_maskz_min_ps(kAll, a, b);
#elif defined(__AVX2__)
  return _mm256_min_ps(a, b);
#elif defined(__SSE2__)
  return _mm_min_ps(a, b);
#else
  return a < b ? a : b;
#endif
}

inline Floats abs(Floats x) { return (Floats)((Bits)x & 0x7fffffffu); }
inline Floats copy_sign(Floats magnitude, Floats sign) { return (Floats)((Bits)magnitude | ((Bits)sign & 0x80000000u)); }

inline float largest(Floats x) {
  float result = x[0];
  for (int i = 1; i < kWidth; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

// Pairwise in fp64, so that a sum of many blocks loses nothing.
inline double total(Floats x) {
  double lane[kWidth];
  for (int i = 0; i < kWidth; ++i) lane[i] = x[i];
  for (int half = kWidth / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
  return lane[0];
}

inline bool any(Bits mask) {
  uint32_t result = 0;
  for (int i = 0; i < kWidth; ++i) result |= mask[i];
  return result != 0;
}

// Some of the lanes: what comparisons give. Masks combine with & and |.
#if defined(__AVX512F__)
typedef __mmask16 Mask;
inline Mask at_least(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline Mask above(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline Mask equal(Floats a, Floats b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
inline unsigned bits_of(Mask mask) { return mask; }
inline Floats where(Mask mask, Floats x) { return _mm512_maskz_mov_ps(mask, x); }
inline Mask without(Mask a, Mask b) { return static_cast<Mask>(a & ~b); }
#else
typedef Ints Mask;
inline Mask at_least(Floats a, Floats b) { return a >= b; }
inline Mask above(Floats a, Floats b) { return a > b; }
inline Mask equal(Floats a, Floats b) { return a == b; }
inline unsigned bits_of(Mask mask) {
#if defined(__AVX2__)
  return static_cast<unsigned>(_mm256_movemask_ps((__m256)mask));
#elif defined(__SSE2__)
  return static_cast<unsigned>(_mm_movemask_ps((__m128)mask));
#else
  unsigned bits = 0;
  for (int i = 0; i < kWidth; ++i) bits |= static_cast<unsigned>(mask[i] != 0) << i;
  return bits;
#endif
}
inline Floats where(Mask mask, Floats x) { return (Floats)((Ints)x & mask); }
inline Mask without(Mask a, Mask b) { return a & ~b; }
#endif

// Lanes from `count` on become `filler`.
inline Floats fill_tail(Floats x, int count, float filler) {
  for (int i = count; i < kWidth; ++i) x[i] = filler;
  return x;
}

inline Halves load_halves(const void* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
  return h;
}

inline Floats load(const float* p) {
  Floats x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Bits widen(Halves h) {
#if defined(__AVX512F__)
  return (Bits)_mm512_maskz_cvtepu16_epi32(kAll, (__m256i)h);
#elif defined(__AVX2__)
  return (Bits)_mm256_cvtepu16_epi32((__m128i)h);
#else
  return __builtin_convertvector(h, Bits);
#endif
}

inline Halves low_halves(Bits b) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtepi32_epi16(kAll, (__m512i)b);
#elif defined(__AVX2__)
  const __m256i packed = _mm256_packus_epi32((__m256i)(b & 0xffffu), _mm256_setzero_si256());
  return (Halves)_mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
#else
  return __builtin_convertvector(b, Halves);
#endif
}

inline Floats load(const bf16* p) { return (Floats)(widen(load_halves(p)) << 16); }

// Twice kWidth numbers, the even ones and the odd ones: two operations, where widening in order takes four, two of them across
// lanes.
inline void load_pairs(const bf16* p, Floats& even, Floats& odd) {
  Bits pairs;
  std::memcpy(&pairs, p, sizeof pairs);
  even = (Floats)(pairs << 16);
  odd = (Floats)(pairs & 0xffff0000u);
}

inline Floats load(const fp16* p) {
#if defined(__AVX512F__)
  return _mm512_maskz_cvtph_ps(kAll, (__m256i)load_halves(p));
#elif defined(__AVX2__)
  return _mm256_cvtph_ps((__m128i)load_halves(p));
#else
  const Bits h = widen(load_halves(p));
  const Bits magnitude = h & 0x7fffu;
  const Floats two_112 = broadcast(0x1p112f);  // moves the exponent bias from 15 to 127, denormals included
  const Bits scaled = (Bits)((Floats)(magnitude << 13) * two_112);
  const Bits special = (Bits)(magnitude >= 0x7c00u) & 0x7f800000u;
  return (Floats)(scaled | special | ((h & 0x8000u) << 16));
#endif
}

// Round to nearest even; NaN stays NaN.
inline Halves round_to(bf16, Floats x) {
  const Bits b = (Bits)x;
  const Bits rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const Bits quiet = (b >> 16) | 0x40u;
  return low_halves((Bits)(x != x ? (Ints)quiet : (Ints)rounded));
}

inline Halves round_to(fp16, Floats x) {
#if defined(__AVX512F__)
  return (Halves)_mm512_maskz_cvtps_ph(kAll, x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (Halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
#else
  const Bits b = (Bits)x, magnitude = b & 0x7fffffffu;
  const Bits normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;  // bias 127 -> 15, and half a unit
  // adding 0.5 makes the hardware round at the last place of an fp16 denormal
  const Bits denormal = (Bits)((Floats)magnitude + broadcast(0.5f)) - 0x3f000000u;
  const Bits special = ((Bits)(magnitude > 0x7f800000u) & 0x0200u) | 0x7c00u;
  const Bits small = (Bits)(magnitude < 0x38800000u), big = (Bits)(magnitude >= 0x47800000u);
  const Bits result = (small & denormal) | (big & special) | (~small & ~big & normal);
  return low_halves(result | ((b >> 16) & 0x8000u));
#endif
}

inline void store(float* p, Floats x) { std::memcpy(p, &x, sizeof x); }

template <class T>
inline void store(T* p, Floats x) {
  const Halves h = round_to(T{}, x);
  std::memcpy(p, &h, sizeof h);
}

// Past the caches, for results that are larger than these: a usual store reads the line first. `p` must be aligned to the
// vector that is written; finish_streams() orders these stores before what follows.
template <class T>
inline void stream(T* p, Floats x) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4)
    _mm512_stream_ps(reinterpret_cast<float*>(p), x);
  else
    _mm256_stream_si256(reinterpret_cast<__m256i*>(p), (__m256i)round_to(T{}, x));
#elif defined(__AVX2__)
  if constexpr (sizeof(T) == 4)
    _mm256_stream_ps(reinterpret_cast<float*>(p), x);
  else
    _mm_stream_si128(reinterpret_cast<__m128i*>(p), (__m128i)round_to(T{}, x));
#elif defined(__SSE2__)
  if constexpr (sizeof(T) == 4)
    _mm_stream_ps(reinterpret_cast<float*>(p), x);
  else
    store(p, x);
#else
  store(p, x);
#endif
}

inline void finish_streams() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

template <class T>
inline Floats load_part(const T* p, int count) {
  T buffer[kWidth] = {};
  std::memcpy(buffer, p, count * sizeof(T));
  return load(buffer);
}

template <class T>
inline void store_part(T* p, Floats x, int count) {
  T buffer[kWidth];
  store(buffer, x);
  std::memcpy(p, buffer, count * sizeof(T));
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }  // to L2: L1 has too few outstanding misses

// exp(d / T) for d <= 0 as 2^(d * log2(e) / T), without a division and without an intermediate rounding: log2(e) / T is
// kept in two floats. About 1 ulp. Exactly 1 at 0, exactly 0 below 2^-126 and at -inf, NaN at NaN.
struct ScaledExp {
  Floats high, low, lowest;

  explicit ScaledExp(double temperature) {
    // Beyond T = 3.4e36 no finite difference is far enough below for exp to be 0, and -inf, cut to one, must be: what
    // such a T leaves of exp(d / T) is 1 for every d that is not itself near the end of fp32.
    const double wanted = 1.4426950408889634 / temperature, least = 127.0 / 3e38, scale = wanted > least ? wanted : least;
    const float h = static_cast<float>(scale);
    high = broadcast(h);
    low = broadcast(static_cast<float>(scale - h));
    lowest = broadcast(static_cast<float>(-127.0 / scale));
  }

  // Where exp is 0 the difference is cut to a finite one, so that 0 * d is 0 and not NaN. NaN stays.
  Floats cut(Floats d) const { return max(lowest, d); }

  Floats operator()(Floats cut_d) const {
    // Adding 1.5 * 2^23 rounds to an integer in the low bits; the 127 beside it makes those bits the biased exponent.
    const Floats magic = broadcast(12582912.0f + 127.0f);
    const Floats shifted = fma(cut_d, high, magic);
    const Floats n = shifted - magic;
    const Floats r = fma(cut_d, low, fma(cut_d, high, -n));
    // 2^r on [-1/2, 1/2]: minimax of relative error 2e-9, exactly 1 at 0
    Floats p = broadcast(0x1.448fa4p-13f);
    p = fma(p, r, broadcast(0x1.5f4774p-10f));
    p = fma(p, r, broadcast(0x1.3b29aap-7f));
    p = fma(p, r, broadcast(0x1.c6aed0p-5f));
    p = fma(p, r, broadcast(0x1.ebfbe0p-3f));
    p = fma(p, r, broadcast(0x1.62e430p-1f));
    p = fma(p, r, broadcast(1.0f));
    return p * (Floats)((Bits)shifted << 23);
  }
};

// log(x) within 1 ulp for x that is 0 or normal; NaN where x is.
inline Floats log(Floats x) {
  const Bits bits = (Bits)x - 0x3f3504f3u;  // x = 2^n * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
  const Floats n = __builtin_convertvector((Ints)bits >> 23, Floats);
  const Floats f = (Floats)((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  Floats p = broadcast(6.91799596e-2f);
  p = fma(p, f, broadcast(-1.17796749e-1f));
  p = fma(p, f, broadcast(1.18660346e-1f));
  p = fma(p, f, broadcast(-1.23857968e-1f));
  p = fma(p, f, broadcast(1.42199188e-1f));
  p = fma(p, f, broadcast(-1.66691974e-1f));
  p = fma(p, f, broadcast(2.00021520e-1f));
  p = fma(p, f, broadcast(-2.49999866e-1f));
  p = fma(p, f, broadcast(3.33333105e-1f));
  Floats tail = f * f * (f * p);
  tail = fma(n, broadcast(-2.12194440e-4f), tail);
  tail = fma(f * f, broadcast(-0.5f), tail);
  const Floats result = fma(n, broadcast(0.693359375f), f + tail);
  return x > 0.0f ? result : (x == 0.0f ? broadcast(-__builtin_inff()) : broadcast(__builtin_nanf("")));
}

// tanh(x) and its derivative 1 - tanh(x)^2, each to a few ulp, from one exp: with E = exp(-2|x|),
// tanh|x| = (1 - E) / (1 + E), an odd polynomial where that cancels, and the derivative is 4E / (1 + E)^2.
struct Tanh {
  Floats value, slope;

  explicit Tanh(Floats x) {
    const ScaledExp exp_twice(0.5);
    const Floats a = abs(x), one = broadcast(1.0f);
    const Floats e = exp_twice(exp_twice.cut(-a));
    const Floats inverse = one / (one + e);
    const Floats square = a * a;
    Floats p = broadcast(-0.0066589838825166225f);
    p = fma(p, square, broadcast(0.021305203437805176f));
    p = fma(p, square, broadcast(-0.053900767117738724f));
    p = fma(p, square, broadcast(0.13332977890968323f));
    p = fma(p, square, broadcast(-0.333333283662796f));
    const Floats near_zero = fma(p * square, a, a);
    const Floats far = (one - e) * inverse;
    value = copy_sign(a < broadcast(0.5f) ? near_zero : far, x);
    slope = broadcast(4.0f) * e * inverse * inverse;
  }
};

// Results below the normal range become 0 inside the scope, and operands too where that is asked for: on x86 each of them would
// cost about 150 cycles, and peaked distributions are full of them.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  enum What : unsigned { results = 0x8000, operands = 0x8040 };
  explicit FlushDenormals(What what = results) : before_(_mm_getcsr()) { _mm_setcsr(before_ | what); }
  ~FlushDenormals() { _mm_setcsr(before_); }

 private:
  unsigned before_;
#else
  enum What { results, operands };
  explicit FlushDenormals(What = results) {}
#endif
};

#if defined(RLKERNEL_FUSED)
}  // namespace fused
#endif
}  // namespace rlkernel::cpu::RLKERNEL_ISA
