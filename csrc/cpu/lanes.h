// Sums whose bits are promised: eight virtual lanes, the same on every instruction set. A lane is a chain of fused
// multiply-adds or of additions in fp32; what a processor's vectors hold more or less than eight of changes nothing.
#pragma once

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

constexpr int kLanes = 8;

typedef float Lanes __attribute__((vector_size(kLanes * 4)));
typedef uint32_t LaneBits __attribute__((vector_size(kLanes * 4)));
typedef uint16_t LaneHalves __attribute__((vector_size(kLanes * 2)));

// a * b + c rounded once, also where the processor has no such instruction: simd.h's fma rounds twice there.
inline Lanes fused(Lanes a, Lanes b, Lanes c) {
#if defined(__AVX2__)
  return _mm256_fmadd_ps(a, b, c);
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

// The lanes' sum: i and i + 4, then i and i + 2, then the last two.
inline float sum_of(Lanes x) {
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

inline Lanes load_lanes(const float* p) {
  Lanes x;
  std::memcpy(&x, p, sizeof x);
  return x;
}

inline Lanes load_lanes(const bf16* p) {
  LaneHalves h;
  std::memcpy(&h, p, sizeof h);
#if defined(__AVX2__)
  return (Lanes)((LaneBits)_mm256_cvtepu16_epi32((__m128i)h) << 16);
#else
  return (Lanes)(__builtin_convertvector(h, LaneBits) << 16);
#endif
}

inline Lanes load_lanes(const fp16* p) {
#if defined(__AVX2__)
  LaneHalves h;
  std::memcpy(&h, p, sizeof h);
  return _mm256_cvtph_ps((__m128i)h);
#else
  Lanes x;
  for (int i = 0; i < kLanes; i += kWidth) {
    const Floats part = load(p + i);
    std::memcpy(reinterpret_cast<float*>(&x) + i, &part, sizeof part);
  }
  return x;
#endif
}

// The first `count` elements; 0 in the other lanes.
template <class T>
inline Lanes load_lanes(const T* p, int count) {
  T buffer[kLanes] = {};
  std::memcpy(buffer, p, count * sizeof(T));
  return load_lanes(buffer);
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
