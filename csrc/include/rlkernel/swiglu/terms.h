// The activations and their derivatives, once for every device, a float or a vector of floats at a time: each operation is
// rounded as IEEE says, so that an element has the same bits on all of them.
//
// `M` has F, the floats; W, unsigned words as many and as wide; of(float) and fma(F, F, F).
#pragma once
#include "rlkernel/kernel.h"
#include "rlkernel/swiglu/arguments.h"

#define RLKERNEL_TERM template <class M> RLKERNEL_HOST_DEVICE static inline

namespace rlkernel::swiglu {

// exp(x) within 1 ulp; infinite above the range of fp32, 0 below that of normal numbers, NaN at NaN.
RLKERNEL_TERM typename M::F exp_of(typename M::F x) {
  using F = typename M::F;
  using W = typename M::W;
  x = x > M::of(89.0f) ? M::of(89.0f) : x;
  x = x < M::of(-87.5f) ? M::of(-87.5f) : x;
  const F magic = M::of(12582912.0f + 126.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const F shifted = M::fma(x, M::of(1.44269504f), magic), n = shifted - magic;
  F r = M::fma(n, M::of(-0.693359375f), x);  // ln 2 in two parts: the product with the first is exact
  r = M::fma(n, M::of(2.12194440e-4f), r);
  F p = M::of(1.991993e-4f);
  p = M::fma(p, r, M::of(1.3945091e-3f));
  p = M::fma(p, r, M::of(8.3332649e-3f));
  p = M::fma(p, r, M::of(4.1666303e-2f));
  p = M::fma(p, r, M::of(1.6666667e-1f));
  p = M::fma(p, r, M::of(0.5f));
  p = M::fma(p * r, r, r) + M::of(1.0f);
  // n + 126 as a biased exponent is 2^(n - 1), for n reaches 128
  const F half = __builtin_bit_cast(F, static_cast<W>(__builtin_bit_cast(W, shifted) << 23));
  return p * half * M::of(2.0f);
}

template <class F>
struct Activated {
  F value, slope;
};

// x / (1 + exp(-z)): z is x for silu. The tangent's gelu is of this form too: 1 + tanh(y) = 2 / (1 + exp(-2 y)).
RLKERNEL_TERM Activated<typename M::F> sigmoid_gated(typename M::F x, typename M::F z, typename M::F slope_of_z) {
  using F = typename M::F;
  const F one = M::of(1.0f), zero = M::of(0.0f), e = exp_of<M>(-z), s = one / (one + e);
  const F rest = z > zero ? e * s : one - s;  // 1 - s, whose digits are in e where s is nearly 1
  return {x / (one + e), s * (one + (x * rest) * slope_of_z)};
}

RLKERNEL_TERM Activated<typename M::F> silu(typename M::F x) { return sigmoid_gated<M>(x, x, M::of(1.0f)); }

RLKERNEL_TERM Activated<typename M::F> gelu_tanh(typename M::F x) {
  using F = typename M::F;
  const F scale = M::of(1.59576912f), square = x * x;  // 2 sqrt(2 / pi)
  const F few = square > M::of(100.0f) ? M::of(100.0f) : square;  // beyond it the slope is 0 or 1, and not 0 * infinity
  return sigmoid_gated<M>(x, x * M::fma(square, M::of(0.0713548163f), scale), M::fma(few, M::of(0.214064449f), scale));
}

// max(x, 0) - t Q(t) with t = |x|, where Q(t) = exp(-t^2 / 2) P(t) is the tail of the normal distribution: no difference of
// equals on either side. P is a polynomial of 1 / (1 + 0.35 t), of relative error 3.2e-8 up to where Q is 0.
RLKERNEL_TERM Activated<typename M::F> gelu(typename M::F x) {
  using F = typename M::F;
  const F zero = M::of(0.0f), one = M::of(1.0f), most = M::of(13.5f), positive = x > zero ? x : -x;
  const F t = positive > most ? most : positive;
  const F w = exp_of<M>(M::of(-0.5f) * (t * t)), v = one / M::fma(t, M::of(0.35f), one);
  F p = M::of(-0.0291269943f);
  p = M::fma(p, v, M::of(0.143877581f));
  p = M::fma(p, v, M::of(-0.255515218f));
  p = M::fma(p, v, M::of(0.158940971f));
  p = M::fma(p, v, M::of(-0.0229447745f));
  p = M::fma(p, v, M::of(0.105435975f));
  p = M::fma(p, v, M::of(0.119851723f));
  p = M::fma(p, v, M::of(0.13985917f));
  p = M::fma(p, v, M::of(0.139621571f));
  const F tail = w * (p * v), density = (x > zero ? t : -t) * (w * M::of(0.398942280f));
  return {(x > zero ? x : zero) - t * tail, (x > zero ? one - tail : tail) + density};
}

}  // namespace rlkernel::swiglu

#undef RLKERNEL_TERM
