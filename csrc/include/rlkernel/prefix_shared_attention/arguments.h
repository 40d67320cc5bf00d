// Arguments of the kernels around vendors' attention over shared prefixes: a row's partial attentions become one, keys and
// values of shared segments are copied to where a varlen kernel wants them, and their gradients are summed back.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"

namespace rlkernel {

// In place, with weight(x) = exp(x - lse') and lse' = log(exp(lse) + exp(part_lse) + exp(sink)):
//   out = weight(lse) * out + weight(part_lse) * part      lse = lse'
//
// A row without keys has the lse -inf, or +inf as FlashAttention 2 says it; both weigh 0 and their `out` is not looked at.
// Where nothing has a weight, out = 0 and lse = -inf. NaN in an lse makes the row NaN.
struct AttentionMerge {
  void* out;                              // [rows, heads, head_dim], the last contiguous
  Dtype dtype;                            // of out and part
  int64_t out_stride, out_head_stride;    // of a row and of a head, in elements
  float* lse;                             // [heads, rows]
  int64_t lse_stride;                     // of a head
  const void* part;                       // or null: sinks alone
  int64_t part_stride, part_head_stride;
  const float* part_lse;
  int64_t part_lse_stride;
  const float* sinks;                     // [heads], or null
  int64_t rows, heads, head_dim;
};

// out[r] = the sum of source[index[i]] over i in [offsets[r], offsets[r + 1]), in that order in fp32; 0 for none.
// Both of a pair (the gradients of keys and of values) in one launch.
struct SegmentReduce {
  const void* sources[2];                 // [*, width]
  Dtype dtype;
  int64_t source_strides[2];              // of a row, in elements
  const int64_t *index, *offsets;
  int64_t rows, width;
  void* outs[2];                          // [rows, width]
  Dtype out_dtype;                        // f32, or the sources'
  int64_t out_strides[2];
};

// out[i] = source[index[i]] for keys and values in one launch.
struct GatherKv {
  const void* sources[2];                 // [*, heads, head_dim], the last contiguous
  int bytes;                              // of an element: 2, 4 or 8
  int64_t strides[2], head_strides[2];    // of a row and of a head, in elements
  const int64_t* index;
  int64_t rows, heads, head_dim;
  void* outs[2];                          // [rows, heads, head_dim], contiguous
};

RLKERNEL_KERNEL(attention_merge, const AttentionMerge&)
RLKERNEL_KERNEL(segment_reduce, const SegmentReduce&)
RLKERNEL_KERNEL(gather_kv, const GatherKv&)

}  // namespace rlkernel
