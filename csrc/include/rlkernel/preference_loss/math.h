// Elementary functions of fp64 with one set of bits on every device, for the few numbers of a sequence. Nothing is
// contracted (--fmad=false, -ffp-contract=off).
#pragma once
#include "rlkernel/kernel.h"

#define RLKERNEL_BOTH RLKERNEL_HOST_DEVICE static inline

namespace rlkernel::preference {

RLKERNEL_BOTH double infinite() { return __builtin_huge_val(); }

// 2^n for n in the range of normal numbers.
RLKERNEL_BOTH double power_of_two(double n) {
  return __builtin_bit_cast(double, static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52);
}

struct Exponential {
  double exp, minus_one;  // minus_one keeps its digits as x -> 0
};

// Within 2 ulp; infinite above the range, 0 below that of normal numbers, NaN at NaN.
RLKERNEL_BOTH Exponential exponential(double x) {
  if (x != x) return {x, x};
  if (x > 709.78) return {infinite(), infinite()};
  if (x < -708.0) return {0.0, -1.0};
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double n = (x * 1.4426950408889634 + magic) - magic;
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double q = 1.0 / 6227020800.0;
  q = q * r + 1.0 / 479001600.0;
  q = q * r + 1.0 / 39916800.0;
  q = q * r + 1.0 / 3628800.0;
  q = q * r + 1.0 / 362880.0;
  q = q * r + 1.0 / 40320.0;
  q = q * r + 1.0 / 5040.0;
  q = q * r + 1.0 / 720.0;
  q = q * r + 1.0 / 120.0;
  q = q * r + 1.0 / 24.0;
  q = q * r + 1.0 / 6.0;
  q = q * r + 0.5;
  q = q * r * r + r;
  const double half = power_of_two(n - 1.0);  // n reaches 1024
  return {(half + half * q) * 2.0, (half * q + (half - 0.5)) * 2.0};
}

RLKERNEL_BOTH double exp_of(double x) { return exponential(x).exp; }
RLKERNEL_BOTH double expm1_of(double x) { return exponential(x).minus_one; }

// Within 2 ulp for normal x; -infinity at 0, NaN below.
RLKERNEL_BOTH double log_of(double x) {
  if (!(x > 0.0)) return x == 0.0 ? -infinite() : x - x + (0.0 * infinite());
  if (x == infinite()) return x;
  const uint64_t bits = __builtin_bit_cast(uint64_t, x) - 0x3fe6a09e667f3bcdull;  // x = 2^n m, m in [sqrt(1/2), sqrt(2))
  const double n = static_cast<double>(static_cast<int64_t>(bits) >> 52);
  const double m = __builtin_bit_cast(double, (bits & 0x000fffffffffffffull) + 0x3fe6a09e667f3bcdull);
  const double f = m - 1.0, s = f / (2.0 + f), z = s * s;  // log m = 2 atanh s
  double p = 2.0 / 23.0;
  p = p * z + 2.0 / 21.0;
  p = p * z + 2.0 / 19.0;
  p = p * z + 2.0 / 17.0;
  p = p * z + 2.0 / 15.0;
  p = p * z + 2.0 / 13.0;
  p = p * z + 2.0 / 11.0;
  p = p * z + 2.0 / 9.0;
  p = p * z + 2.0 / 7.0;
  p = p * z + 2.0 / 5.0;
  p = p * z + 2.0 / 3.0;
  const double half_square = 0.5 * f * f;  // log m = f - (f^2 / 2 - s (f^2 / 2 + z p))
  const double tail = s * (half_square + z * p);
  return n * 6.93147180369123816490e-01 - ((half_square - (tail + n * 1.90821492927058770002e-10)) - f);
}

RLKERNEL_BOTH double log1p_of(double x) {
  const double u = 1.0 + x;
  return u == 1.0 ? x : log_of(u) + (x - (u - 1.0)) / u;
}

// log(1 - exp(x)) for x <= 0, in the form that keeps its digits.
RLKERNEL_BOTH double log1mexp_of(double x) {
  return x < -0.6931471805599453 ? log1p_of(-exp_of(x)) : log_of(-expm1_of(x));
}

// -logsigmoid(-x) = log(1 + exp(x))
RLKERNEL_BOTH double softplus(double x) {
  const double tail = log1p_of(exp_of(x > 0 ? -x : x));
  return x > 0 ? x + tail : tail;
}

RLKERNEL_BOTH double sigmoid(double x) {
  const double e = exp_of(x > 0 ? -x : x), inverse = 1.0 / (1.0 + e);
  return x > 0 ? inverse : e * inverse;
}

}  // namespace rlkernel::preference
