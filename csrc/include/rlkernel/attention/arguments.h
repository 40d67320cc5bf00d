// Arguments of attention's backward pass, whose bits depend on a row's own sequence alone. The order of each sum is declared,
// with tiles of kPagedTile positions that are counted from a sequence's start:
//
//   p[i, j] = exp(s[i, j] - lse[i]),  ds[i, j] = p[i, j] * (dout[i] . v[j] - dout[i] . out[i]) * scale (* the softcap's slope)
//   dq[i] = sum of ds[i, j] * k[j], in the order of j: a chain for each tile of keys, added one after the other
//   dk[j], dv[j] = sum of ds[i, j] * q[i] and p[i, j] * dout[i]: tile of rows by tile of rows, in each the heads that read j in
//                  their order, each with a chain over the rows of the tile
//
// A row whose upstream gradient is 0 has no part in any of them, whatever stands in it: that is padding.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"

namespace rlkernel {

// Elements [i, head, d] at first + i * row + head * head_step + d.
struct HeadRows {
  const void* first;
  int64_t row, head_step;
};

// Request r has the rows [rows[2r], rows[2r + 1]), the last of the positions of its keys, which are the rows
// keys[key_offsets[r]] ... keys[key_offsets[r + 1] - 1] of k and v. Requests that share keys are of one group.
struct AttentionBackward {
  Dtype dtype;                 // of the next five
  HeadRows q, k, v, out, grad;
  const float* lse;            // [heads, total]
  const int64_t *rows, *key_offsets, *keys, *group_offsets;
  int64_t groups, total, heads, kv_heads, head_dim, value_dim;
  float *dq, *dk, *dv;         // dense, of 0 before the call
  double scale, softcap;       // softcap 0: none
  int64_t window;              // 0: all
};

RLKERNEL_KERNEL(attention_backward, const AttentionBackward&)

}  // namespace rlkernel
