// Elementary functions with one set of bits on every device. The compilers contract nothing (--fmad=false,
// -ffp-contract=off), so a fused multiply-add happens where the source says fmaf and nowhere else.
#pragma once

#include "rlkernel/device.h"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr float kLog2E = 1.44269504f;
constexpr float kLn2 = 0.693147181f;

__device__ __forceinline__ float from_bits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
__device__ __forceinline__ uint32_t to_bits(float x) { return __builtin_bit_cast(uint32_t, x); }
__device__ __forceinline__ float infinity() { return from_bits(0x7f800000u); }
__device__ __forceinline__ float nan() { return from_bits(0x7fc00000u); }
__device__ __forceinline__ bool is_finite(float x) { return fabsf(x) < infinity(); }

// The larger; NaN where either is NaN (fmaxf drops it).
__device__ __forceinline__ float max_or_nan(float a, float b) {
#if defined(__CUDA_ARCH__)
  float c;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
  return c;
#else
  return a >= b || a != a ? a : b;
#endif
}

// 2^x in one instruction of the special function unit, within 2 ulp; 0 where the result would be denormal.
// exp2f itself adds three instructions per element to get the denormals right, which no softmax can see.
__device__ __forceinline__ float exp2_fast(float x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#elif defined(__HIP_DEVICE_COMPILE__)
  return __builtin_amdgcn_exp2f(x);
#else
  return x < -126.0f ? 0.0f : exp2f(x);
#endif
}

// x / y within 2 ulp, for y in [2^-126, 2^126].
__device__ __forceinline__ float divide_fast(float x, float y) {
#if defined(__CUDA_ARCH__)
  float z;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
  return z;
#elif defined(__HIP_DEVICE_COMPILE__)
  return x * __builtin_amdgcn_rcpf(y);
#else
  return x / y;
#endif
}

// exp(x) - 1 for |x| <= ln(2) / 2, within 1 ulp.
__device__ __forceinline__ float expm1_small(float x) {
  float p = 1.991993e-4f;
  p = fmaf(p, x, 1.3945091e-3f);
  p = fmaf(p, x, 8.3332649e-3f);
  p = fmaf(p, x, 4.1666303e-2f);
  p = fmaf(p, x, 1.6666667e-1f);
  p = fmaf(p, x, 0.5f);
  return fmaf(p * x, x, x);
}

// exp(x) within 1 ulp, for what is computed once per row.
__device__ __forceinline__ float exp_exact(float x) {
  x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
  const float n = rintf(x * kLog2E);
  float r = fmaf(n, -0.693359375f, x);  // ln 2 in two parts: the product with the first is exact
  r = fmaf(n, 2.12194440e-4f, r);
  const float y = 1.0f + expm1_small(r);
  return y * from_bits(static_cast<uint32_t>(static_cast<int>(n) + 127) << 23);
}

// exp(x) - 1, which keeps its digits as x -> 0.
__device__ __forceinline__ float expm1_exact(float x) {
  return fabsf(x) <= 0.346f ? expm1_small(x) : exp_exact(x) - 1.0f;
}

// log(x) within 1 ulp for normal x > 0. One polynomial for all devices: their own logf differ.
__device__ __forceinline__ float log_of_normal(float x) {
  const uint32_t bits = to_bits(x) - 0x3f3504f3u;  // x = 2^n * (1 + f) with 1 + f in [sqrt(1/2), sqrt(2))
  const float n = static_cast<float>(static_cast<int32_t>(bits) >> 23);
  const float f = from_bits((bits & 0x007fffffu) + 0x3f3504f3u) - 1.0f;
  float p = 6.91799596e-2f;
  p = fmaf(p, f, -1.17796749e-1f);
  p = fmaf(p, f, 1.18660346e-1f);
  p = fmaf(p, f, -1.23857968e-1f);
  p = fmaf(p, f, 1.42199188e-1f);
  p = fmaf(p, f, -1.66691974e-1f);
  p = fmaf(p, f, 2.00021520e-1f);
  p = fmaf(p, f, -2.49999866e-1f);
  p = fmaf(p, f, 3.33333105e-1f);
  float tail = f * f * (f * p);
  tail = fmaf(n, -2.12194440e-4f, tail);
  tail = fmaf(f * f, -0.5f, tail);
  return fmaf(n, 0.693359375f, f + tail);
}

// The same, also for x that is 0, NaN or infinite.
__device__ __forceinline__ float log_exact(float x) {
  if (!(x > 0.0f) || !is_finite(x)) return x == 0.0f ? -infinity() : x;
  return log_of_normal(x);
}

// log(x) for a double, to the digits of a float: as x -> 1 too.
__device__ __forceinline__ float log_exact(double x) {
  const float high = static_cast<float>(x);
  const float log_high = log_exact(high);
  return is_finite(log_high) ? log_high + static_cast<float>(x - high) / high : log_high;
}

struct Tanh {
  float value, slope;  // slope = 1 - value^2, from the form that keeps its digits where value -> 1
};

__device__ __forceinline__ Tanh tanh_and_slope(float x) {
  const float a = fabsf(x);
  if (a < 0.625f) {
    const float z = x * x;
    float p = 2.12485506e-3f;
    p = fmaf(p, z, -8.15890450e-3f);
    p = fmaf(p, z, 2.16938406e-2f);
    p = fmaf(p, z, -5.39456457e-2f);
    p = fmaf(p, z, 1.33331984e-1f);
    p = fmaf(p, z, -3.33333313e-1f);
    const float value = fmaf(p * z, x, x);
    return {value, fmaf(-value, value, 1.0f)};
  }
  const float q = 2.0f / (exp2_fast(a * (2.0f * kLog2E)) + 1.0f);  // 1 - tanh(a)
  return {copysignf(1.0f - q, x), q * (2.0f - q)};
}

}  // namespace rlkernel::RLKERNEL_DEVICE
