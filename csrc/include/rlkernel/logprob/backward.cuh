// Gradient of logprobs, entropy and lse with respect to the logits of a tile, and the exponentials of the frozen-head
// direction: both are exp((y - row_max) / T) times a line in y - row_max.
//
// Floor: rows * vocab * (sizeof(In) + sizeof(Out)) bytes; 8192 x 151936 bf16 in place is 4.98 GB, 1.49 ms at 3.35 TB/s.
// Each element depends on itself alone, so `out` may be the logits, and rows that are not aligned are read in another order.
#pragma once

#include "rlkernel/logprob/row.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// out_i = 2^u * (constant + linear * u) * dy_i / du_i with u = (y_i - max) / T * log2(e), and at_target at the target.
struct Line {
  float max, scale, constant, linear;

  template <class T, bool kMapped>
  __device__ __forceinline__ float at(const Row<T, kMapped>& row, float x, int i) const {
    const auto [y, slope] = row.map(x, i);
    const float u = max_or_nan((y - max) * scale, kLowestExponent);
    return exp2_fast(u) * fmaf(linear, u, constant) * slope;
  }
};

// p * (g_lse - g_logprob - g_entropy * (log p + H)) / T, where log p = (y - max) / T - log_sum.
__device__ __forceinline__ Line gradient_line(const LogprobBackward& b, int64_t r, float temperature, float factor,
                                              float grad_logprob, float grad_entropy, float grad_lse) {
  const float max = b.row_max[r], log_sum = b.log_sum[r];
  if (!is_finite(max) || !is_finite(log_sum)) return {0.0f, 1.0f, nan(), nan()};  // a row of -inf, NaN or +inf in it
  const float inverse_sum = exp_exact(-log_sum) * factor;
  const float entropy = grad_entropy != 0.0f ? b.entropy[r] : 0.0f;
  const float constant = grad_lse - grad_logprob - grad_entropy * (entropy - log_sum);
  return {max, kLog2E / temperature, constant * inverse_sum, -grad_entropy * kLn2 * inverse_sum};
}

// The gradient at the target: 1 - p there is -expm1(log p), or all digits are lost as p -> 1.
template <class T, bool kMapped>
__device__ __forceinline__ float gradient_at_target(const LogprobBackward& b, int64_t r, const Row<T, kMapped>& row,
                                                    int place, float temperature, float factor, float grad_logprob,
                                                    float grad_entropy, float grad_lse) {
  const float log_sum = b.log_sum[r], max = b.row_max[r];
  if (!is_finite(max) || !is_finite(log_sum)) return nan();
  const auto [y, slope] = row.map(to_float(row.x[place]), place);
  const float logprob = (y - max) / temperature - log_sum;
  const float p = logprob < -87.0f ? 0.0f : exp_exact(logprob);
  float gradient = fmaf(p, grad_lse, -grad_logprob * expm1_exact(logprob));
  if (grad_entropy != 0.0f && p != 0.0f) gradient -= grad_entropy * p * (logprob + b.entropy[r]);
  return gradient * factor * slope;
}

template <class Out>
__device__ __forceinline__ void fill_with_zero(Out* out, int vocab) {
  constexpr int kSize = kVector<Out>;
  const bool wide = reinterpret_cast<uintptr_t>(out) % 16 == 0;
  const int whole = wide ? vocab / kSize : 0;
  const float zeros[kSize] = {};
  for (int v = threadIdx.x; v < whole; v += blockDim.x) write_vector(out + int64_t{v} * kSize, zeros);
  for (int i = whole * kSize + threadIdx.x; i < vocab; i += blockDim.x) out[i] = from_float<Out>(0.0f);
}

// Vectors of 16 bytes of In.
template <class In, bool kMapped, class Out>
__device__ __forceinline__ void weigh_vectors(const Row<In, kMapped>& row, Out* out, const Line& line) {
  constexpr int kSize = kVector<In>, kReads = kUnroll<kMapped>;
  const int whole = row.vocab / kSize, step = blockDim.x;
  const auto weigh = [&](const Bytes16& bytes, int v) {
    float values[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) values[i] = line.at(row, element<In>(bytes, i), v * kSize + i);
    write_vector(out + int64_t{v} * kSize, values);
  };
  int v = threadIdx.x;
  for (; v + (kReads - 1) * step < whole; v += kReads * step) {
    Bytes16 vectors[kReads];
#pragma unroll
    for (int k = 0; k < kReads; ++k) vectors[k] = read_streaming(row.x + int64_t{kSize} * (v + k * step));
#pragma unroll
    for (int k = 0; k < kReads; ++k) weigh(vectors[k], v + k * step);
  }
  for (; v < whole; v += step) weigh(read_streaming(row.x + int64_t{kSize} * v), v);
  if (v == whole)
    for (int i = whole * kSize; i < row.vocab; ++i) out[i] = from_float<Out>(line.at(row, to_float(row.x[i]), i));
}

// Single elements, neighbours by neighbouring threads: what narrow reads and writes are fastest with.
template <class In, bool kMapped, class Out>
__device__ __forceinline__ void weigh_elements(const Row<In, kMapped>& row, Out* out, const Line& line) {
  constexpr int kBatch = 8;
  const int step = blockDim.x;
  int i = threadIdx.x;
  for (; i + (kBatch - 1) * step < row.vocab; i += kBatch * step) {
    float x[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) x[k] = to_float(row.x[i + k * step]);
#pragma unroll
    for (int k = 0; k < kBatch; ++k) out[i + k * step] = from_float<Out>(line.at(row, x[k], i + k * step));
  }
  for (; i < row.vocab; i += step) out[i] = from_float<Out>(line.at(row, to_float(row.x[i]), i));
}

// Without log_sum: the exponentials alone, and 0 at the target.
template <class In, class Out, bool kMapped>
__device__ __forceinline__ void backward_row(const LogprobBackward& b, int64_t r) {
  Out* out = static_cast<Out*>(b.out) + r / b.tile.inner * b.out_outer_stride + r % b.tile.inner * b.out_inner_stride;
  const bool exponentials = b.log_sum == nullptr;
  const int64_t target = b.tile.target_ids[r];
  const float grad_logprob = b.grad_logprobs != nullptr ? b.grad_logprobs[r] : 0.0f;
  const float grad_entropy = b.grad_entropy != nullptr ? b.grad_entropy[r] : 0.0f;
  const float grad_lse = b.grad_lse != nullptr ? b.grad_lse[r] : 0.0f;
  const bool without_gradient = grad_logprob == 0.0f && grad_entropy == 0.0f && grad_lse == 0.0f && !exponentials;
  if (target == b.tile.ignore_index || without_gradient)
    return fill_with_zero(out, static_cast<int>(b.tile.vocab));

  const Row<In, kMapped> row(b.tile, r);
  const int place = place_of(target, b.tile);
  const float temperature = row_temperature(b.tile, r);
  const float factor = (kMapped ? row.logit_scale : 1.0f) / temperature;
  Line line{b.row_max[r], kLog2E / temperature, is_finite(b.row_max[r]) ? factor : nan(), 0.0f};
  const bool wide = row.aligned(16) && reinterpret_cast<uintptr_t>(out) % kWriteAlign<Out, kVector<In>> == 0;
  // The thread that writes the target's element: it alone may read it first, as `out` may be the logits.
  const unsigned owner = (wide ? place / kVector<In> : place) % blockDim.x;
  const bool has_target = place >= 0 && threadIdx.x == owner;
  float at_target = 0.0f;
  if (!exponentials) {
    line = gradient_line(b, r, temperature, factor, grad_logprob, grad_entropy, grad_lse);
    if (has_target)
      at_target = gradient_at_target(b, r, row, place, temperature, factor, grad_logprob, grad_entropy, grad_lse);
  }
  if (wide) weigh_vectors(row, out, line);
  else weigh_elements(row, out, line);
  if (has_target) out[place] = from_float<Out>(at_target);
}

template <class In, class Out, bool kMapped>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kMaxThreads, 2) backward_kernel(LogprobBackward b) {
  for (int64_t r = blockIdx.x; r < b.tile.rows; r += gridDim.x) backward_row<In, Out, kMapped>(b, r);
}

template <class In, class Out>
inline int launch_backward_as(const LogprobBackward& b, void* stream) {
  // Nobody wants a bf16 gradient of fp16 logits, or the reverse.
  if constexpr (sizeof(In) == 2 && sizeof(Out) == 2 && kIsBf16<In> != kIsBf16<Out>) {
    return kInvalidArguments;
  } else {
    const unsigned blocks = blocks_for(b.tile.rows), threads = threads_for<In>(b.tile.vocab);
    if (is_mapped(b.tile)) {
      RLKERNEL_LAUNCH((backward_kernel<In, Out, true>), blocks, threads, stream, b);
    } else {
      RLKERNEL_LAUNCH((backward_kernel<In, Out, false>), blocks, threads, stream, b);
    }
    return launch_error();
  }
}

int logprob_backward(const LogprobBackward& b, void* stream) {
  if (b.tile.rows == 0 || b.tile.vocab == 0) return 0;
  if (!runs(b.tile)) return kInvalidArguments;
  return with_dtype(b.tile.dtype, [&](auto in) {
    return with_dtype(b.out_dtype, [&](auto out) { return launch_backward_as<decltype(in), decltype(out)>(b, stream); });
  });
}

int logprob_exp(const LogprobExp& e, void* stream) {
  return logprob_backward({e.tile, nullptr, nullptr, nullptr, nullptr, e.row_max, nullptr, e.out, e.out_dtype,
                          e.out_outer_stride, e.out_inner_stride}, stream);
}

}  // namespace rlkernel::RLKERNEL_DEVICE
