// exp, log and selection for the policy loss, once for every device: F is a float on a GPU and a vector of floats on a CPU.
// The includer names its namespace RLKERNEL_SPACE and provides for F: fused(a, b, c) = a * b + c, power_of_two(n),
// magnitude(x), keep(mask, x) = x where the mask is set, else 0, and bits_of(x), floats_of(bits) and as_float(integers).
// Conditions are combined with & and |, negated with `not_`, and select with ?:, which vectors and scalars share.
#pragma once
#include "rlkernel/policy_loss/arguments.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define RLKERNEL_INLINE __device__ __forceinline__
#else
#define RLKERNEL_INLINE inline __attribute__((always_inline))
#endif

namespace RLKERNEL_SPACE {

template <class F>
using MaskOf = decltype(F{} < F{});

template <class F>
RLKERNEL_INLINE F spread(float x) { return F{} + x; }

template <class M>
RLKERNEL_INLINE M not_(M mask) { return mask == M{}; }

// Of bools, & and | make an int, which braces refuse.
template <class M>
RLKERNEL_INLINE M both(M a, M b) { return a & b; }

template <class M>
RLKERNEL_INLINE M either(M a, M b) { return a | b; }

template <class F>
RLKERNEL_INLINE F smaller(F a, F b) { return a < b ? a : b; }  // b where either is NaN

template <class F>
RLKERNEL_INLINE F larger(F a, F b) { return a > b ? a : b; }

// NaN stays NaN.
template <class F>
RLKERNEL_INLINE F clamped(F x, float low, float high) { return larger(spread<F>(low), smaller(spread<F>(high), x)); }

template <class F>
RLKERNEL_INLINE MaskOf<F> outside(F x, float low, float high) { return (x < low) | (x > high); }  // NaN is not

// Whether a log-probability is not -inf; NaN is not.
template <class F>
RLKERNEL_INLINE MaskOf<F> in_support(F logprob) { return logprob != spread<F>(-__builtin_huge_valf()); }

template <class F>
struct Exp {
  F exp, minus_one;  // exp(x) and exp(x) - 1, which keeps its digits as x -> 0
};

// Within 2 ulp; infinity above the range, exactly 0 below 2^-125, NaN at NaN: where 2^n leaves the range, so does the result.
template <class F>
RLKERNEL_INLINE Exp<F> exp_of(F x) {
  const F c = clamped(x, -87.5f, 89.0f);
  const F magic = spread<F>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F n = fused(c, spread<F>(1.44269504f), magic) - magic;
  F r = fused(n, spread<F>(-0.693359375f), c);
  r = fused(n, spread<F>(2.12194440e-4f), r);
  F q = fused(spread<F>(1.991993e-4f), r, spread<F>(1.3945091e-3f));
  q = fused(q, r, spread<F>(8.3332649e-3f));
  q = fused(q, r, spread<F>(4.1666303e-2f));
  q = fused(q, r, spread<F>(1.6666667e-1f));
  q = fused(q, r, spread<F>(0.5f));
  q = fused(q * r, r, r);
  const F half = power_of_two(n - 1.0f);  // n reaches 128, and -126, where it is 0
  return {fused(half, q, half) * 2.0f, fused(half, q, half - 0.5f) * 2.0f};
}

// Within 2 ulp, for normal numbers > 0.
template <class F>
RLKERNEL_INLINE F log_of(F x) {
  const auto above_root = bits_of(x) - 0x3f3504f3;  // of the bits of sqrt(1/2)
  const auto exponent = above_root >> 23;
  const F n = as_float(exponent), f = floats_of(bits_of(x) - exponent * (1 << 23)) - 1.0f;
  F p = fused(spread<F>(7.0376836292e-2f), f, spread<F>(-1.1514610310e-1f));
  p = fused(p, f, spread<F>(1.1676998740e-1f));
  p = fused(p, f, spread<F>(-1.2420140846e-1f));
  p = fused(p, f, spread<F>(1.4249322787e-1f));
  p = fused(p, f, spread<F>(-1.6668057665e-1f));
  p = fused(p, f, spread<F>(2.0000714765e-1f));
  p = fused(p, f, spread<F>(-2.4999993993e-1f));
  p = fused(p, f, spread<F>(3.3333331174e-1f));
  const F square = f * f;
  p = fused(n, spread<F>(-2.12194440e-4f), p * f * square);
  p = fused(square, spread<F>(-0.5f), p);
  return fused(n, spread<F>(0.693359375f), p + f);
}

}  // namespace RLKERNEL_SPACE
