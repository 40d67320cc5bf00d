// Log-probability of the target, entropy and log-sum-exp of every row of a tile, in one read of it.
//
// Floor: rows * vocab * sizeof(T) bytes read; 8192 x 151936 in bf16 is 2.49 GB, 0.74 ms at 3.35 TB/s. Per element: convert,
// max, subtract, multiply, 2^u, add; with entropy a max and a multiply-add more.
#pragma once

#include "rlkernel/logprob/row.cuh"
#include "rlkernel/reduce.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// Adds kCount vectors, whose elements start at `place` and every `step`, of which the last holds `count` elements.
template <bool kEntropy, bool kPart, int kCount, class T, bool kMapped>
__device__ __forceinline__ void add(Softmax& part, const Row<T, kMapped>& row, const Bytes16 (&bytes)[kCount], int place,
                                    int step, int count, float scale) {
  constexpr int kSize = kVector<T>;
  float y[kCount][kSize], peaks[kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    peaks[k] = -infinity();
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const bool inside = !kPart || i < count;
      y[k][i] = inside ? row.map(element<T>(bytes[k], i), place + k * step + i).y : -infinity();
      peaks[k] = fmaxf(peaks[k], y[k][i]);  // drops NaN: the sum keeps it
    }
  }
  float peak = peaks[0];
#pragma unroll
  for (int k = 1; k < kCount; ++k) peak = fmaxf(peak, peaks[k]);
  if (peak > part.max) part = raised(part, peak, scale);
  const float max = part.max == -infinity() ? 0.0f : part.max;  // -inf - -inf would be NaN
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    float e[kSize], weighted = 0.0f;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      float u = (y[k][i] - max) * scale;
      if constexpr (kEntropy) u = max_or_nan(u, kLowestExponent);  // 0 * -inf would be NaN
      e[i] = exp2_fast(u);
      if constexpr (kEntropy) weighted = fmaf(e[i], u, weighted);
    }
#pragma unroll
    for (int half = kSize / 2; half > 0; half /= 2)
#pragma unroll
      for (int i = 0; i < half; ++i) e[i] += e[i + half];
    part.sum += static_cast<double>(e[0]);
    part.weighted += weighted;
  }
}

// kCount vectors of this thread, each `step` vectors behind the one before.
template <int kAlign, int kCount>
__device__ __forceinline__ void read_vectors(Bytes16 (&vectors)[kCount], const char* bytes, int v, int step) {
#pragma unroll
  for (int k = 0; k < kCount; ++k) vectors[k] = read_bytes<kAlign>(bytes + int64_t{16} * (v + k * step));
}

// The same of rows whose alignment is known when they are read.
template <class T, int kCount>
__device__ __forceinline__ void read_vectors(Bytes16 (&vectors)[kCount], const char* bytes, int v, int step, int align) {
  if (align == 16) read_vectors<16>(vectors, bytes, v, step);
  else if (sizeof(T) == 4 || align == 4) read_vectors<4>(vectors, bytes, v, step);
  else read_vectors<sizeof(T) == 2 ? 2 : 4>(vectors, bytes, v, step);
}

// Those of this thread's vectors that come kUnroll at a time; kAlign is 0 where `align` says it.
template <bool kEntropy, int kAlign, class T, bool kMapped>
__device__ __forceinline__ void add_many(Softmax& part, const Row<T, kMapped>& row, int& v, float scale, int align) {
  constexpr int kSize = kVector<T>, kReads = kUnroll<kMapped>;
  const int whole = row.vocab / kSize, step = blockDim.x;
  const char* bytes = reinterpret_cast<const char*>(row.x);
  for (; v + (kReads - 1) * step < whole; v += kReads * step) {
    Bytes16 vectors[kReads];
    if constexpr (kAlign != 0) read_vectors<kAlign>(vectors, bytes, v, step);
    else read_vectors<T>(vectors, bytes, v, step, align);
    add<kEntropy, false>(part, row, vectors, v * kSize, step * kSize, kSize, scale);
  }
}

// This thread's part of a row. Which elements it takes, in which order, follows from their places alone: rows that are not
// aligned to 16 bytes are read by narrower reads of the same elements. Code for each alignment is made where an element takes
// little but its read: of mapped ones it would be two thirds of the kernel, as it would be of the vectors that come one by one.
template <bool kEntropy, class T, bool kMapped>
__device__ __forceinline__ Softmax accumulate(const Row<T, kMapped>& row, float scale) {
  constexpr int kSize = kVector<T>;
  const int whole = row.vocab / kSize, step = blockDim.x, align = alignment_of(row.x);
  Softmax part = nothing_seen();
  int v = threadIdx.x;
  if constexpr (kMapped) add_many<kEntropy, 0>(part, row, v, scale, align);
  else if (align == 16) add_many<kEntropy, 16>(part, row, v, scale, align);
  else if (sizeof(T) == 4 || align == 4) add_many<kEntropy, 4>(part, row, v, scale, align);
  else add_many<kEntropy, sizeof(T) == 2 ? 2 : 4>(part, row, v, scale, align);
  for (; v < whole; v += step) {
    Bytes16 vectors[1];
    read_vectors<T>(vectors, reinterpret_cast<const char*>(row.x), v, step, align);
    add<kEntropy, false>(part, row, vectors, v * kSize, 0, kSize, scale);
  }
  const int rest = row.vocab - whole * kSize;
  if (v == whole && rest > 0) {
    const Bytes16 vectors[1] = {read_part(row.x + whole * kSize, rest)};
    add<kEntropy, true>(part, row, vectors, v * kSize, 0, rest, scale);
  }
  return part;
}

// Thread 0 of the block: adds the tile's sums to the state and, with the last tile, writes the row's results.
__device__ __forceinline__ void finish_row(const LogprobForward& f, int64_t r, Softmax seen, float at_target,
                                           float temperature, float scale) {
  if (!f.first) {
    const float weighted = f.entropy != nullptr ? f.state_weighted[r] * kLog2E : 0.0f;
    seen = merge({f.state_max[r], weighted, f.state_sum[r]}, seen, scale);
    if (at_target != at_target) at_target = f.state_target[r];
  }
  if (f.state_max != nullptr) {  // with the last tile too: the frozen-head direction reads it
    f.state_max[r] = seen.max;
    f.state_sum[r] = static_cast<float>(seen.sum);
    if (f.entropy != nullptr) f.state_weighted[r] = seen.weighted * kLn2;
    f.state_target[r] = at_target;
  }
  if (f.last) {
    const float log_sum = log_exact(seen.sum);
    f.logprobs[r] = (at_target - seen.max) / temperature - log_sum;
    if (f.entropy != nullptr) f.entropy[r] = log_sum - seen.weighted / static_cast<float>(seen.sum) * kLn2;
    f.lse[r] = seen.max / temperature + log_sum;
    f.row_max[r] = seen.max;
    f.log_sum[r] = at_target != at_target ? nan() : log_sum;
  }
}

template <class T, bool kMapped, bool kEntropy>
__device__ __forceinline__ void forward_row(const LogprobForward& f, int64_t r) {
  const int64_t target = f.tile.target_ids[r];
  if (target == f.tile.ignore_index) {
    if (threadIdx.x != 0) return;
    if (f.state_max != nullptr) f.state_max[r] = f.state_sum[r] = f.state_weighted[r] = f.state_target[r] = 0.0f;
    if (f.last) {
      f.logprobs[r] = f.lse[r] = f.row_max[r] = f.log_sum[r] = 0.0f;
      if (f.entropy != nullptr) f.entropy[r] = 0.0f;
    }
    return;
  }
  const Row<T, kMapped> row(f.tile, r);
  const float temperature = row_temperature(f.tile, r), scale = kLog2E / temperature;
  const int place = place_of(target, f.tile);
  const float at_target = threadIdx.x == 0 && place >= 0 ? row.y(place) : nan();
  Softmax part = accumulate<kEntropy>(row, scale);
  part = reduce_block(part, scale);
  if (threadIdx.x == 0) finish_row(f, r, part, at_target, temperature, scale);
}

template <class T, bool kMapped, bool kEntropy>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kMaxThreads, 2) forward_kernel(LogprobForward f) {
  for (int64_t r = blockIdx.x; r < f.tile.rows; r += gridDim.x) forward_row<T, kMapped, kEntropy>(f, r);
}

template <class T, bool kMapped>
inline void launch_forward_as(const LogprobForward& f, void* stream) {
  const unsigned blocks = blocks_for(f.tile.rows), threads = threads_for<T>(f.tile.vocab);
  if (f.entropy != nullptr) {
    RLKERNEL_LAUNCH((forward_kernel<T, kMapped, true>), blocks, threads, stream, f);
  } else {
    RLKERNEL_LAUNCH((forward_kernel<T, kMapped, false>), blocks, threads, stream, f);
  }
}

int logprob_forward(const LogprobForward& f, void* stream) {
  if (f.tile.rows == 0) return 0;
  if (!runs(f.tile)) return kInvalidArguments;
  return with_dtype(f.tile.dtype, [&](auto in) {
    using T = decltype(in);
    is_mapped(f.tile) ? launch_forward_as<T, true>(f, stream) : launch_forward_as<T, false>(f, stream);
    return launch_error();
  });
}

}  // namespace rlkernel::RLKERNEL_DEVICE
