// Arguments of the LayerNorm kernels.
//
//   mean = sum x / length        variance = sum (x - mean)^2 / length        rstd = 1 / sqrt(variance + eps)
//   normed = (x - mean) * rstd * weight + bias
//
// The mean of fp32 is off by half its last place, which is much beside a small variance: `shift` = sum (x - mean) / length is
// what it lacks, and is taken off every difference.
//
// The gradient of x from that of normed, g, with n = (x - mean) * rstd and s = g * weight: rstd * (s - sum s / length -
// n * sum (s * n) / length); those of weight and bias are the sums of g * n and of g over the rows.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/norm_rows.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel {

struct LayerNormForward {
  int64_t rows, length;
  Dtype dtype;         // of x and normed
  StridedRows x;
  const void *weight;  // [length], or null: 1 each
  Dtype weight_dtype;
  const void* bias;    // [length], or null
  Dtype bias_dtype;
  float eps;
  void* normed;        // [rows, length]
  float *mean, *rstd;  // [rows], or both null
};

struct LayerNormBackward {
  int64_t rows, length;
  Dtype dtype;  // of x, of its gradient, and of that of normed
  StridedRows x, grad;
  const float *mean, *rstd;
  const void* weight;
  Dtype weight_dtype, bias_dtype;
  void* grad_x;            // [rows, length]
  float* weight_partials;  // [norm_chunks(rows), length]: sums over rows of a chunk, null unless grad_weight is wanted
  float* bias_partials;
  void *grad_weight, *grad_bias;  // [length] of the dtypes of weight and bias, or null
};

// From the sums of differences to the rounded mean and of their squares, as differences to the mean itself have it. What is
// taken off is the smaller one, unless both overflow.
RLKERNEL_HOST_DEVICE static inline float layer_norm_variance(float squares, float more, float length) {
  const float lost = more * (more / length);
  return (squares - (lost < squares ? lost : 0)) / length;
}

RLKERNEL_KERNEL(layer_norm_forward, const LayerNormForward&)
RLKERNEL_KERNEL(layer_norm_backward, const LayerNormBackward&)

}  // namespace rlkernel
