// Arguments of the value loss kernels.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"
#include "rlkernel/names.h"
#include "rlkernel/sequences.h"

namespace rlkernel {

// What a chunk, a sequence or the batch holds, over the tokens that the mask keeps. Means and sums of squared deviations
// from them: a sum of squares loses the variance of returns like 1000.1.
struct ValueSums {
  double count, loss, nonfinite, clipped;
  double return_mean, return_squares, error_mean, error_squares;
};

constexpr int kValueMetrics = 9;  // calls.value_loss.VALUE_METRICS

RLKERNEL_ENUM(Unit, token, sum, mean)  // types.Aggregation

struct ValueLossForward {
  const void *values, *returns, *old_values;  // old_values is null: nothing is clipped
  Dtype dtype, other_dtype;                   // other_dtype is dtype, or f32
  const uint8_t* mask;
  int64_t values_stride, returns_stride, old_stride, mask_stride;  // of padded rows, in elements
  Sequences sequences;
  float cliprange, huber_delta;  // huber_delta 0: squared error
  Unit unit;
  const float* items;            // what the sum of units is divided by; null: `item_count`, or where that is 0 the batch's own
  double item_count, factor;
  float* slope;                  // [tokens], dense: derivative of each token's loss; or null
  ValueSums* partials;           // [slots]
  float* scale;                  // [rows]
  float *loss, *metrics;         // [1], [kValueMetrics]
};

struct ValueLossBackward {
  const float *grad_loss, *slope, *scale;
  Sequences sequences;
  void* out;  // dense
  Dtype out_dtype;
};

RLKERNEL_KERNEL(value_loss_forward, const ValueLossForward&)
RLKERNEL_KERNEL(value_loss_backward, const ValueLossBackward&)

}  // namespace rlkernel
