// Arguments of the RMSNorm kernels.
//
//   h = round(x + residual), or x        rstd = 1 / sqrt(sum h^2 / length + eps)
//   normed = round(h * rstd * scale), or round(round(h * rstd) * scale) with `round_first`; scale = weight + weight_offset
//
// The gradient of h from that of normed, g, with n = h * rstd: rstd * (g * scale - n * sum(g * scale * n) / length); the
// gradient of the weight is the sum of g * n over the rows.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/names.h"
#include "rlkernel/norm_rows.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel {

RLKERNEL_ENUM(NormRounding, before_weight, after_weight)

struct RmsNormForward {
  int64_t rows, length;
  Dtype dtype;           // of x, residual, summed and normed
  StridedRows x, residual;
  void* summed;          // [rows, length], where there is a residual
  const void* weight;    // [length], or null: 1 each
  Dtype weight_dtype;
  float weight_offset, eps;
  bool round_first;
  void* normed;          // [rows, length]
  float* rstd;           // [rows], or null
};

struct RmsNormBackward {
  int64_t rows, length;
  Dtype dtype;                    // of h, of its gradient, and of the gradients of normed and summed
  StridedRows h;
  StridedRows grad_normed, grad_summed;  // the latter may be null
  const float* rstd;              // [rows]
  const void* weight;
  Dtype weight_dtype;
  float weight_offset;
  void* grad_x;                   // [rows, length]
  float* partials;                // [norm_chunks(rows), length]: sums over rows of a chunk, null unless grad_weight is wanted
  void* grad_weight;              // [length] of weight_dtype, or null
};

RLKERNEL_KERNEL(rms_norm_forward, const RmsNormForward&)
// the same with rounded squares in the order of a matrix product: the bits that the formula has inside batch_invariant
RLKERNEL_KERNEL(rms_norm_in_order, const RmsNormForward&)
RLKERNEL_KERNEL(rms_norm_backward, const RmsNormBackward&)

}  // namespace rlkernel
