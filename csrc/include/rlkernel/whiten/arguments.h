// Arguments of the whitening kernels, which also serve the running normalisation and the estimators that whiten the batch.
//
//   m = states[0] merged with the others in their order, and with the moments of x where `update` is set
//   out = (x - m.mean) / sqrt(var + eps)       or / (sqrt(var) + eps)
#pragma once
#include "rlkernel/kernel.h"
#include "rlkernel/moments.h"
#include "rlkernel/sequences.h"

namespace rlkernel {

struct Whiten {
  const void* x;         // [n] of float, or of double where `wide`
  bool wide;
  const uint8_t* mask;   // [n], or null: every element counts
  const float* weights;  // [n], or null: 1 each
  int64_t n;
  const Moments* states; // [state_count]: what came before
  int64_t state_count;
  bool update;           // x takes part
  bool identity;         // running: the scale is 1 until two elements were seen
  bool shift_mean, unbiased, eps_in_std;
  double eps, clip;      // results beyond +-clip are cut, NaN is not; infinite where not used
  Moments* partials;     // [chunks_of(n)], where x takes part
  float* out;            // [n], or null: only the state is wanted
  Moments* state;        // [1], what `m` is, or null
};

struct Scaling {
  double mean, scale, back;  // (x - mean) * scale + back
};

RLKERNEL_HOST_DEVICE static inline double root_of(double x) {
#if defined(__CUDA_ARCH__) || defined(__HIP_DEVICE_COMPILE__)
  return sqrt(x);
#else
  return __builtin_sqrt(x);
#endif
}

RLKERNEL_HOST_DEVICE static inline Scaling scaling_of(const Whiten& w, const Moments& m) {
  const double variance = w.identity && m.count < 2 ? 1 : variance_of(m, w.unbiased);
  const double scale = w.eps_in_std ? root_of(variance) + w.eps : root_of(variance + w.eps);
  return {m.mean, 1 / scale, w.shift_mean ? 0 : m.mean};
}

// Elements that are the mean give 0 whatever the variance: of equal ones it is 0, and so may be eps.
RLKERNEL_HOST_DEVICE static inline float scaled(const Scaling& s, double x, double clip) {
  const double centred = x - s.mean;
  const double y = (centred == 0 ? 0 : centred * s.scale) + s.back;
  return static_cast<float>(y > clip ? clip : y < -clip ? -clip : y);
}

RLKERNEL_KERNEL(whiten, const Whiten&)

}  // namespace rlkernel
