// What the norms share on the device: how threads take a row, its sum in a fixed order, and the sum over rows that is the
// gradient of a weight.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/norm_rows.h"
#include "rlkernel/strided_rows.h"
#include "rlkernel/vec.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kNormThreads = 256;  // of a block
constexpr int kNormColumns = 32;   // that a block of the sum over rows takes

// Threads of a row: from its length alone, as the order of its sum follows from them. Short rows share a block.
inline int norm_threads(int64_t length) { return length <= 1024 ? kLanes : kNormThreads; }

inline unsigned norm_blocks(int64_t rows, int64_t length) {
  const int64_t each = kNormThreads / norm_threads(length), blocks = (rows + each - 1) / each;
  return static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20);
}

// The sum of the row's threads, the same bits in each of them. Every thread of the block must call it.
template <int kThreads>
__device__ __forceinline__ float sum_of_row(float part) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) part += shuffle_xor(part, distance);
  if constexpr (kThreads > kLanes) {
    using Partials = float[kThreads / kLanes];
    RLKERNEL_SHARED(Partials, partials);
    if (threadIdx.x % kLanes == 0) partials[threadIdx.x / kLanes] = part;
    __syncthreads();  // the groups' sums are written
    part = 0;
    for (int group = 0; group < kThreads / kLanes; ++group) part += partials[group];
    __syncthreads();  // the groups' sums are read: the next sum may overwrite them
  }
  return part;
}

// Calls body(row, thread) for rows of the grid, as often in every thread of a block; `row` may lie behind the last.
template <int kThreads, class Body>
__device__ __forceinline__ void each_row(int64_t rows, Body body) {
  constexpr int kEach = kNormThreads / kThreads;
  const int thread = static_cast<int>(threadIdx.x) % kThreads, own = static_cast<int>(threadIdx.x) / kThreads;
  for (int64_t first = int64_t{blockIdx.x} * kEach; first < rows; first += int64_t{gridDim.x} * kEach)
    body(first + own, thread);
}

// Calls body(i, count) for the vectors of kVector<T> elements that a thread of a row takes.
template <class T, int kThreads, class Body>
__device__ __forceinline__ void each_vector(int64_t length, int thread, Body body) {
  constexpr int kSize = kVector<T>;
  for (int64_t i = int64_t{thread} * kSize; i < length; i += kThreads * kSize)
    body(i, static_cast<int>(length - i < kSize ? length - i : kSize));
}

struct NormWeight {
  const void* start;  // null: 1 each
  Dtype dtype;
  float offset;

  __device__ __forceinline__ float at(int64_t i) const {
    if (start == nullptr) return 1.0f;
    const float weight = dtype == Dtype::f32    ? static_cast<const float*>(start)[i]
                         : dtype == Dtype::bf16 ? to_float(static_cast<const bf16*>(start)[i])
                                                : to_float(static_cast<const f16*>(start)[i]);
    return weight + offset;
  }
};

// partials[chunk][i] = sum over the rows of a chunk, in their order, of term(row, i). A thread takes a column of a chunk.
template <class Term>
__device__ __forceinline__ void sum_chunks(int64_t rows, int64_t length, float* partials, Term term) {
  const int64_t tiles = (length + kNormThreads - 1) / kNormThreads, all = norm_chunks(rows) * tiles;
  for (int64_t tile = blockIdx.x; tile < all; tile += gridDim.x) {
    const int64_t chunk = tile / tiles, i = tile % tiles * kNormThreads + threadIdx.x;
    if (i >= length) continue;
    const int64_t end = (chunk + 1) * kNormRows < rows ? (chunk + 1) * kNormRows : rows;
    float sum = 0;
    for (int64_t r = chunk * kNormRows; r < end; ++r) sum += term(r, i);
    partials[chunk * length + i] = sum;
  }
}

// out[i] = sum over the chunks of partials[chunk][i], in fp64: a group of 32 threads takes 32 columns, the groups every eighth
// chunk.
template <class Out>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kNormThreads, 2)
    norm_total_kernel(const float* partials, int64_t rows, int64_t length, Out* out) {
  constexpr int kGroups = kNormThreads / kNormColumns;
  using Sums = double[kGroups][kNormColumns];
  RLKERNEL_SHARED(Sums, sums);
  const int column = threadIdx.x % kNormColumns, group = threadIdx.x / kNormColumns;
  const int64_t tiles = (length + kNormColumns - 1) / kNormColumns, chunks = norm_chunks(rows);
  for (int64_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const int64_t i = tile * kNormColumns + column;
    double sum = 0;
    if (i < length)
      for (int64_t chunk = group; chunk < chunks; chunk += kGroups) sum += partials[chunk * length + i];
    sums[group][column] = sum;
    __syncthreads();  // the groups' sums are written
    if (group == 0 && i < length) {
      for (int other = 1; other < kGroups; ++other) sum += sums[other][column];
      out[i] = from_float<Out>(static_cast<float>(sum));
    }
    __syncthreads();  // the groups' sums are read: the next tile may overwrite them
  }
}

inline unsigned norm_chunk_blocks(int64_t rows, int64_t length) {
  const int64_t blocks = norm_chunks(rows) * ((length + kNormThreads - 1) / kNormThreads);
  return static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20);
}

inline int launch_norm_total(const float* partials, int64_t rows, int64_t length, void* out, Dtype dtype, void* stream) {
  const int64_t tiles = (length + kNormColumns - 1) / kNormColumns;
  const unsigned blocks = static_cast<unsigned>(tiles < 1 << 20 ? tiles : 1 << 20);
  return with_dtype(dtype, [&](auto type) {
    using Out = decltype(type);
    RLKERNEL_LAUNCH((norm_total_kernel<Out>), blocks, kNormThreads, stream, partials, rows, length, static_cast<Out*>(out));
    return launch_error();
  });
}

}  // namespace rlkernel::RLKERNEL_DEVICE
