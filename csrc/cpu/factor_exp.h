// A number that a whole row has, times exp(d / T), as logprob and sampling take it. With fused multiply-adds 2^x is a number of a
// table of eight, which is one permutation, times a polynomial of degree 3: two thirds of the operations of simd.h's.
#pragma once

#include <cmath>

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

#if defined(__AVX2__)

// factor * exp(d / T) for d <= 0, within 1.2 ulp, and exactly the fp32 factor at 0. 0 at -inf, NaN at NaN. Below 2^-126 it is 0
// inside FlushDenormals, fast where that takes operands too; elsewhere a denormal may come out.
class FactorExp {
 public:
  static constexpr double kLeast = 0x1p-100, kMost = 0x1p100;  // of |factor|

  explicit FactorExp(double temperature, double factor = 1) {
    int exponent;
    const double fraction = 2 * std::frexp(factor, &exponent);  // of which the magnitude is in [1, 2)
    const double bias = 126 + exponent;                         // of the exponent of what is not scaled yet
    // as ScaledExp: -inf, cut to a finite difference, must give 0 at any temperature
    const double wanted = 1.4426950408889634 / temperature, least = bias / 3e38, scale = wanted > least ? wanted : least;
    const float high = static_cast<float>(scale);
    high_ = broadcast(high);
    low_ = broadcast(static_cast<float>(scale - high));
    lowest_ = broadcast(static_cast<float>(-bias / scale));
    magic_ = broadcast(static_cast<float>(0x1.8p20 + bias));
    static constexpr double eighths[8] = {1, 0x1.172b83c7d517bp+0, 0x1.306fe0a31b715p+0, 0x1.4bfdad5362a27p+0,
                                          0x1.6a09e667f3bcdp+0, 0x1.8ace5422aa0dbp+0, 0x1.ae89f995ad3adp+0,
                                          0x1.d5818dcfba487p+0};
    for (int i = 0; i < kWidth; ++i) {
      const float entry = static_cast<float>(fraction * eighths[i % 8]);
      table_[i] = __builtin_bit_cast(uint32_t, entry) - (127u << 23) - (static_cast<uint32_t>(i % 8) << 20);
    }
  }

  // Where exp is 0 the difference is cut to a finite one, so that 0 * d is 0 and not NaN. NaN stays.
  Floats cut(Floats d) const { return max(lowest_, d); }
  bool is_uncut(float d) const { return d >= lowest_[0]; }  // then so is any larger one

  Floats operator()(Floats cut_d) const {
    // Adding 1.5 * 2^20 rounds to eighths, which are the low bits; the bias beside it makes those above them the exponent.
    const Floats shifted = fma(cut_d, high_, magic_);
    const Floats n = shifted - magic_;
    const Floats r = fma(cut_d, low_, fma(cut_d, high_, -n));
    // 2^r - 1 on [-1/16, 1/16]: of 2^r the minimax of relative error 3e-8, exactly 0 at 0
    Floats p = broadcast(0x1.c6a004p-5f);
    p = fma(p, r, broadcast(0x1.ec0c32p-3f));
    p = fma(p, r, broadcast(0x1.62e432p-1f)) * r;
    const Floats power = (Floats)(eighth(shifted) + ((Bits)shifted << 20));
    return fma(power, p, power);
  }

 private:
  // The entry that the lowest three bits name.
  Bits eighth(Floats shifted) const {
#if defined(__AVX512F__)
    return (Bits)_mm512_maskz_permutexvar_epi32(kAll, (__m512i)shifted, (__m512i)table_);
#else
    return (Bits)_mm256_permutevar8x32_epi32((__m256i)table_, (__m256i)shifted);
#endif
  }

  Floats high_, low_, lowest_, magic_;
  Bits table_;
};

#else

// The same by simd.h's exponential: there is no permutation by a variable, nor a fused multiply-add.
class FactorExp {
 public:
  static constexpr double kLeast = 0x1p-100, kMost = 0x1p100;

  explicit FactorExp(double temperature, double factor = 1)
      : exp_(temperature), factor_(broadcast(static_cast<float>(factor))) {}
  Floats cut(Floats d) const { return exp_.cut(d); }
  bool is_uncut(float d) const { return d >= exp_.lowest[0]; }
  Floats operator()(Floats cut_d) const { return exp_(cut_d) * factor_; }

 private:
  ScaledExp exp_;
  Floats factor_;
};

#endif

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
