// Arguments of the value loss kernels, and how a batch is cut: a sequence into chunks of its own, counted from its first
// token, so that no partial sum depends on the sequences around it. Chunks have slots in one buffer; a slot's sequence is
// found from the offsets on the device, so the host need not know them.
#pragma once
#include <cstdint>

#include "rlkernel/logprob.h"  // Dtype

#if defined(__CUDACC__) || defined(__HIP__)
#define RLKERNEL_HOST_DEVICE __host__ __device__
#else
#define RLKERNEL_HOST_DEVICE
#endif

namespace rlkernel {

constexpr int64_t kChunk = 2048;  // tokens of a sequence that are summed together

// `rows` padded sequences of `length` tokens; or packed ones, where `length` is N and sequence r holds the tokens
// [cu_seqlens[r], cu_seqlens[r + 1]). What lies behind the last one is padding: a sequence without a sum.
struct Sequences {
  int64_t rows, length;
  const void* cu_seqlens;  // [rows + 1] of `offset_bytes` bytes each, or null: padded
  int offset_bytes;
};

struct Tokens {
  int64_t begin, count;
};

// Static: the files for each instruction set must not share one copy. Offsets that are no offsets are bent into [0, N].
RLKERNEL_HOST_DEVICE static inline int64_t begin_of(const Sequences& s, int64_t row) {
  if (row > s.rows) return s.length;
  const int64_t at = s.offset_bytes == 4 ? static_cast<const int32_t*>(s.cu_seqlens)[row]
                                         : static_cast<const int64_t*>(s.cu_seqlens)[row];
  return at < 0 ? 0 : at > s.length ? s.length : at;
}

// Packed: positions in the flat tensor. Padded: `begin` is 0, rows have strides of their own.
RLKERNEL_HOST_DEVICE static inline Tokens tokens_of(const Sequences& s, int64_t row) {
  if (s.cu_seqlens == nullptr) return {0, s.length};
  const int64_t begin = begin_of(s, row), end = begin_of(s, row + 1);
  return {begin, end > begin ? end - begin : 0};
}

RLKERNEL_HOST_DEVICE static inline int64_t chunks_of(int64_t count) { return (count + kChunk - 1) / kChunk; }

// The slot of a sequence's first chunk. Packed: floor(b / C) + r + 1 - floor(a / C) - r >= ceil((b - a) / C), so the
// chunks of [a, b) fit before the next sequence's.
RLKERNEL_HOST_DEVICE static inline int64_t first_slot(const Sequences& s, int64_t row) {
  return s.cu_seqlens == nullptr ? row * chunks_of(s.length) : begin_of(s, row) / kChunk + row;
}

// More than any slot; the padding behind packed sequences takes part.
RLKERNEL_HOST_DEVICE static inline int64_t slots_of(const Sequences& s) {
  return s.cu_seqlens == nullptr ? s.rows * chunks_of(s.length) : s.length / kChunk + s.rows + 1;
}

// The sequence in whose range a slot lies; `rows` for the padding.
RLKERNEL_HOST_DEVICE static inline int64_t row_of(const Sequences& s, int64_t slot) {
  if (s.cu_seqlens == nullptr) return slot / chunks_of(s.length);
  int64_t low = 0, high = s.rows;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first_slot(s, middle) <= slot) low = middle;
    else high = middle - 1;
  }
  return low;
}

// What a chunk, a sequence or the batch holds, over the tokens that the mask keeps. Means and sums of squared deviations
// from them: a sum of squares loses the variance of returns like 1000.1.
struct ValueSums {
  double count, loss, nonfinite, clipped;
  double return_mean, return_squares, error_mean, error_squares;
};

constexpr int kValueMetrics = 9;  // types.VALUE_METRICS

enum class Unit : int { token = 0, sum = 1, mean = 2 };  // types.Aggregation

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

// Each returns 0 or the runtime's error code. `stream` is the queue to launch on; the CPU kernels ignore it.
namespace cpu {
int value_loss_forward(const ValueLossForward&, void* stream);
int value_loss_backward(const ValueLossBackward&, void* stream);
}
namespace cuda {
int value_loss_forward(const ValueLossForward&, void* stream);
int value_loss_backward(const ValueLossBackward&, void* stream);
}
namespace hip {
int value_loss_forward(const ValueLossForward&, void* stream);
int value_loss_backward(const ValueLossBackward&, void* stream);
}

}  // namespace rlkernel
