// How sums of parts become those of the whole, for all devices.
#pragma once

#include "rlkernel/value_loss/arguments.h"

namespace rlkernel {

// `first` and what comes after it (Chan, Golub and LeVeque 1979).
RLKERNEL_HOST_DEVICE static inline ValueSums merge(const ValueSums& first, const ValueSums& second) {
  const double count = first.count + second.count;
  if (second.count == 0) return first;
  if (first.count == 0) return second;
  const double share = second.count / count, weight = first.count * share;
  const double returns = second.return_mean - first.return_mean, errors = second.error_mean - first.error_mean;
  return {count,
          first.loss + second.loss,
          first.nonfinite + second.nonfinite,
          first.clipped + second.clipped,
          first.return_mean + returns * share,
          first.return_squares + second.return_squares + returns * returns * weight,
          first.error_mean + errors * share,
          first.error_squares + second.error_squares + errors * errors * weight};
}

// The batch: its sums, and those of the units that the loss is made of.
struct ValueTotal {
  ValueSums sums;
  double objective, sequences;
};

RLKERNEL_HOST_DEVICE static inline void add_sequence(ValueTotal& total, const ValueSums& row, Unit unit) {
  if (row.count == 0) return;
  total.sums = merge(total.sums, row);
  total.objective += unit == Unit::mean ? row.loss / row.count : row.loss;
  total.sequences += 1;
}

// What a unit counts in the loss; 0 where there is none, so that an empty batch gives 0.
RLKERNEL_HOST_DEVICE static inline double weight_of(const ValueLossForward& f, const ValueTotal& total) {
  if (total.sums.count == 0) return 0;
  const double own = f.unit == Unit::token ? total.sums.count : total.sequences;
  return f.factor / (f.items != nullptr ? *f.items : f.item_count != 0 ? f.item_count : own);
}

RLKERNEL_HOST_DEVICE static inline void write_results(const ValueLossForward& f, const ValueTotal& total) {
  const ValueSums& s = total.sums;
  const double least = s.count > 0 ? s.count : 1, zero = 0;
  *f.loss = static_cast<float>(weight_of(f, total) * total.objective);
  f.metrics[0] = static_cast<float>(s.count);
  f.metrics[1] = static_cast<float>(s.nonfinite);
  f.metrics[2] = static_cast<float>(s.clipped / least);
  f.metrics[3] = static_cast<float>(s.return_mean - s.error_mean);
  f.metrics[4] = static_cast<float>(s.return_mean);
  f.metrics[5] = static_cast<float>(s.return_squares / least);
  f.metrics[6] = static_cast<float>(s.error_mean);
  f.metrics[7] = static_cast<float>(s.error_squares / least);
  f.metrics[8] = static_cast<float>(s.return_squares > 0 ? 1 - s.error_squares / s.return_squares : zero / zero);
}

// The gradient's factor of a sequence with `count` tokens.
RLKERNEL_HOST_DEVICE static inline float scale_of(double weight, double count, Unit unit) {
  if (count == 0) return 0;
  return static_cast<float>(unit == Unit::mean ? weight / count : weight);
}

}  // namespace rlkernel
