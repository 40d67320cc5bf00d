// Arguments of the generalised advantage estimation kernel. Sequences are the rows of [rows, length], or with `offsets`
// stretches of [total]: row r is [offsets[r], offsets[r + 1]).
//
//   A_t = r_t + gamma * V_next - V_t + gamma * lam * A_next       R_t = A_t + V_t
//
// where `next` is the next token whose mask is set; after the last one V_next is the row's last value and A_next is 0.
// Tokens whose mask is not set are stepped over, or with zero_holes are tokens of reward and value 0: what they hold is never
// used, and their results are 0.
#pragma once
#include "rlkernel/kernel.h"

namespace rlkernel {

struct Gae {
  const float* rewards;
  int64_t rewards_stride;   // between rows, in elements; the stride within a row is 1
  const float* values;
  int64_t values_stride;
  const uint8_t* mask;      // null: every token counts
  int64_t mask_stride;
  const int64_t* offsets;   // [rows + 1], or null: the strides and `length` hold
  int64_t rows, length, total;
  const float* last_values; // [rows], or null for 0
  double gamma, lam;
  const double* lams;       // [rows], or null: `lam` is that of every row
  bool zero_holes;
  float *advantages, *returns;  // dense
};

RLKERNEL_KERNEL(gae, const Gae&)

}  // namespace rlkernel
