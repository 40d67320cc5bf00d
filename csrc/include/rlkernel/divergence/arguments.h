// Arguments of the divergence kernels. Of a row x of the student and a row y of the teacher, with p and q their softmax:
//
//   p = exp((x - max x) / T) / sum_exp,  q likewise,  m = (1 - beta) p + beta q
//   beta 0: KL(q || p),  beta 1: KL(p || q),  else beta KL(q || m) + (1 - beta) KL(p || m)
//
// The gradient of x from that of a row's divergence, g, with D the student's part, KL(p || q) or KL(p || m):
//
//   beta 0: g (p - q) / T,  beta 1: g p (log p - log q - D) / T,  else g (1 - beta) p (log p - log m - D) / T
//
// What has no probability adds nothing to a sum that it is the weight of, and has no gradient.
//
// Bits: element i belongs to lane i % 32, each in ascending order, in fp32 for blocks of 2048 and in fp64 from block to block;
// then lanes i and i + 16, then i and i + 8, and so on. They are those of every instruction set.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel {

struct DivergenceRows {
  int64_t rows, vocab;
  StridedRows student, teacher;
  Dtype student_dtype, teacher_dtype;
  const uint8_t* mask;  // [rows], or null: every row counts
  double beta, temperature;
};

struct DivergenceForward {
  DivergenceRows pair;
  float *divergence, *entropy;  // [rows] each; entropy may be null
  float *row_max, *sum_exp, *teacher_max, *teacher_sum_exp;
  float* student_part;          // null where beta is 0
};

struct DivergenceBackward {
  DivergenceRows pair;
  const float* grad;            // [rows]: a row of 0 is not read
  const float *row_max, *sum_exp, *teacher_max, *teacher_sum_exp, *student_part;
  StridedRows out;              // of the student's dtype; may be the student itself
};

RLKERNEL_KERNEL(divergence_forward, const DivergenceForward&)
RLKERNEL_KERNEL(divergence_backward, const DivergenceBackward&)

}  // namespace rlkernel
