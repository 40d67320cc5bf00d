// The running softmax of part of a row, and its reduction over a block in an order that depends on nothing but the
// number of threads.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/math.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// max y, sum e and sum e * u, where u = (y - max) / T * log2(e) and e = 2^u. Nothing seen yet: {-inf, 0, 0}.
// The sum is in double, where vectors meet: as p -> 1 it is 1 and a little, and the little is the result.
struct Softmax {
  float max, weighted;
  double sum;
};

__device__ __forceinline__ Softmax nothing_seen() { return {-infinity(), 0.0f, 0.0}; }

// The same sums relative to a larger maximum. `scale` is log2(e) / T. A part that saw only -inf has no exponent to
// shift by: its sum is 0, or NaN where it saw a NaN.
__device__ __forceinline__ Softmax raised(Softmax part, float to, float scale) {
  const float shift = part.max == -infinity() ? 0.0f : (part.max - to) * scale;
  const float factor = exp2_fast(shift);
  const float weighted = fmaf(static_cast<float>(part.sum), shift, part.weighted) * factor;
  return {to, factor == 0.0f ? 0.0f : weighted, part.sum * factor};
}

// `first` and what comes after it in the row.
__device__ __forceinline__ Softmax merge(Softmax first, Softmax second, float scale) {
  const float max = fmaxf(first.max, second.max);
  first = raised(first, max, scale);
  second = raised(second, max, scale);
  return {max, first.weighted + second.weighted, first.sum + second.sum};
}

// Over the 32 lanes of a group, by a butterfly: every lane gets the same bits.
__device__ __forceinline__ Softmax reduce_lanes(Softmax part, float scale) {
  float max = part.max;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) max = fmaxf(max, shuffle_xor(max, distance));
  part = raised(part, max, scale);
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    part.sum += shuffle_xor(part.sum, distance);
    part.weighted += shuffle_xor(part.weighted, distance);
  }
  return part;
}

// Over the block, whose size is a multiple of 32 and at most 1024. The result is in the first 32 threads.
__device__ __forceinline__ Softmax reduce_block(Softmax part, float scale) {
  using Partials = Softmax[kLanes];
  RLKERNEL_SHARED(Partials, partials);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes, groups = blockDim.x / kLanes;
  part = reduce_lanes(part, scale);
  if (groups == 1) return part;
  if (lane == 0) partials[group] = part;
  __syncthreads();  // the partials are written
  if (group == 0) part = reduce_lanes(lane < groups ? partials[lane] : nothing_seen(), scale);
  __syncthreads();  // the partials are read: the next row may overwrite them
  return part;
}

}  // namespace rlkernel::RLKERNEL_DEVICE
