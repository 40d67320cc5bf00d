// Arguments of the kernels of logprob over supports: rows whose softmax runs over some tokens of the vocabulary only.
//
// With z the logits at a row's support, d = z - max z and m = nearest integer of 2^40 * exp(d / T): S = 2^-40 * sum m,
// logprob = d_target / T - log S. Sums of integers have no order, so the bits are those of sampling's processed
// log-probabilities, whatever the order of the ids.
#pragma once
#include <cstdint>

#include "rlkernel/logprob.h"

namespace rlkernel {

constexpr float kMassOne = 1099511627776.0f;  // 2^40, the mass of a token as likely as the likeliest

struct LogprobSupport {
  int64_t rows, vocab;
  const int64_t* target_ids;   // [rows]
  int64_t ignore_index;
  const float* temperatures;   // [rows], or null: `temperature` holds for every row
  float temperature;
  const int32_t* ids;          // an id outside the vocabulary makes its row NaN
  const int64_t* offsets;      // [rows + 1]: row r has ids[offsets[r]] up to ids[offsets[r + 1]]; none: the row is whole
};

struct LogprobSupportForward {
  LogprobSupport support;
  const void* logits;          // row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride elements;
  Dtype dtype;                 // null: they stand in `values` already
  int64_t inner, outer_stride, inner_stride;
  void* values;                // the logits at the support, at the places of their ids: written, or read
  float *logprobs, *entropy, *lse, *row_max, *log_sum;  // 0 where the row is whole or ignored; entropy may be null
};

struct LogprobSupportBackward {
  LogprobSupport support;
  const void* values;
  Dtype dtype;
  const float *grad_logprobs, *grad_entropy, *grad_lse;  // [rows] each, or null for zero
  const float *logprobs, *entropy, *row_max, *log_sum;   // entropy is null unless grad_entropy is given
  // Only the support is written, so the memory holds 0 before. scattered: rows of the logits' shape, at the ids;
  // else like `values`.
  void* out;
  Dtype out_dtype;
  bool scattered;
  int64_t inner, out_outer_stride, out_inner_stride;
};

// Each returns 0 or the runtime's error code. `stream` is the queue to launch on; the CPU kernels ignore it.
namespace cpu {
int logprob_support_forward(const LogprobSupportForward&, void* stream);
int logprob_support_backward(const LogprobSupportBackward&, void* stream);
}
namespace cuda {
int logprob_support_forward(const LogprobSupportForward&, void* stream);
int logprob_support_backward(const LogprobSupportBackward&, void* stream);
}
namespace hip {
int logprob_support_forward(const LogprobSupportForward&, void* stream);
int logprob_support_backward(const LogprobSupportBackward&, void* stream);
}

}  // namespace rlkernel
