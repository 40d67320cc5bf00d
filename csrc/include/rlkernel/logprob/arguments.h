// Arguments of the logprob kernels. A kernel sees a tile: `rows` rows of `vocab` consecutive vocabulary entries that
// start at `vocab_start`. `logprob` passes all of V as one tile; `linear_logprob` passes the tiles of its workspace in
// vocabulary order and the row state carries the running softmax from one tile to the next.
//
//   u = (x + bias) * logit_scale       y = softcap * tanh(u / softcap), or u where softcap is 0       z = y / T
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel {

struct LogprobTile {
  const void* logits;         // row r starts at (r / inner) * outer_stride + (r % inner) * inner_stride elements
  Dtype dtype;
  int64_t rows, inner, outer_stride, inner_stride;
  int64_t vocab, vocab_start;
  const int64_t* target_ids;  // [rows], positions in the whole vocabulary
  int64_t ignore_index;
  const float* temperatures;  // [rows], or null: `temperature` holds for every row
  float temperature;
  const float* bias;          // [vocab] of this tile, or null
  float logit_scale, softcap;
};

struct LogprobForward {
  LogprobTile tile;
  // Running state, one value per row, before temperature: max y, sum e, sum e * (y - max) / T with e = exp((y - max) / T),
  // and y at the target (NaN until its tile was seen, so a target outside the vocabulary ends as NaN).
  // All null when the tile is the whole vocabulary (first and last).
  float *state_max, *state_sum, *state_weighted, *state_target;
  bool first, last;
  // Written with the last tile. entropy is null when it is not wanted; the state_weighted pass is then skipped.
  // log_sum is NaN where the target lies outside the vocabulary, so that the gradient of such a row is NaN too.
  float *logprobs, *entropy, *lse, *row_max, *log_sum;
};

struct LogprobBackward {
  LogprobTile tile;
  const float *grad_logprobs, *grad_entropy, *grad_lse;  // [rows] each, or null for zero
  const float *entropy;                                  // null unless grad_entropy is given
  const float *row_max, *log_sum;
  void* out;                                             // d loss / d x; may be the logits themselves (same strides and dtype)
  Dtype out_dtype;
  int64_t out_outer_stride, out_inner_stride;            // same `inner` as the tile
};

// out_i = exp((y_i - row_max) / T) * dy_i/dx_i / T, and 0 at the target and on ignored rows: the frozen-head direction.
struct LogprobExp {
  LogprobTile tile;
  const float* row_max;
  void* out;
  Dtype out_dtype;
  int64_t out_outer_stride, out_inner_stride;
};

// Over supports: rows whose softmax runs over some tokens of the vocabulary only.
//
// With z the logits at a row's support, d = z - max z and m = nearest integer of 2^40 * exp(d / T): S = 2^-40 * sum m,
// logprob = d_target / T - log S. Sums of integers have no order, so the bits are those of sampling's processed
// log-probabilities, whatever the order of the ids.
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

// The softmax of rows, or its logarithm, with the same bits on every instruction set:
//
//   e[i] = exp(x[i] - max x), of which lane i % 32 takes its own in ascending order
//   sum = the lanes' sum: i and i + 16, then i and i + 8, and so on
//   out[i] = round(e[i] / sum), or round((x[i] - max x) - log(sum))
struct SoftmaxRows {
  int64_t rows, length;
  Dtype dtype;
  StridedRows x;
  bool logarithm;
  void* out;                   // [rows, length], dense
  Dtype out_dtype;             // that of x, or fp32
};

RLKERNEL_KERNEL(logprob_forward, const LogprobForward&)
RLKERNEL_KERNEL(logprob_backward, const LogprobBackward&)
RLKERNEL_KERNEL(logprob_exp, const LogprobExp&)
RLKERNEL_KERNEL(logprob_support_forward, const LogprobSupportForward&)
RLKERNEL_KERNEL(logprob_support_backward, const LogprobSupportBackward&)
RLKERNEL_KERNEL(softmax, const SoftmaxRows&)

}  // namespace rlkernel
