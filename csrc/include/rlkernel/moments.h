// Count, mean and sum of squared deviations of weighted numbers, and how those of parts become those of the whole. A sum of
// squares would lose the variance of rewards like 1000.1.
#pragma once

#include "rlkernel/kernel.h"

namespace rlkernel {

struct Moments {
  double count, mean, squares;
};

// `first` and what comes after it (Chan, Golub and LeVeque 1979). Equal means stay exactly what they are.
RLKERNEL_HOST_DEVICE static inline Moments merge(const Moments& first, const Moments& second) {
  if (second.count == 0) return first;
  if (first.count == 0) return second;
  const double count = first.count + second.count, share = second.count / count, apart = second.mean - first.mean;
  return {count, first.mean + apart * share, first.squares + second.squares + apart * apart * (first.count * share)};
}

// Never divided by less than this: of one element the variance is 0, not 0 / 0.
RLKERNEL_HOST_DEVICE static inline double variance_of(const Moments& m, bool unbiased) {
  const double freedom = unbiased ? m.count - 1 : m.count, least = 1.1920929e-7;
  return m.squares / (freedom > least ? freedom : least);
}

}  // namespace rlkernel
