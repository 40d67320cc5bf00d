// Moments of a chunk, taken by a block.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/moments.h"
#include "rlkernel/sequences.h"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kMomentThreads = 256, kMomentsPerThread = kChunk / kMomentThreads;

// Over the 32 lanes of a group, each lane behind those before it. Every lane gets the same bits.
__device__ __forceinline__ Moments reduce_lanes(Moments part) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const Moments other{shuffle_xor(part.count, distance), shuffle_xor(part.mean, distance),
                        shuffle_xor(part.squares, distance)};
    part = lane & distance ? merge(other, part) : merge(part, other);
  }
  return part;
}

// Over the block; every thread gets the same bits.
__device__ __forceinline__ Moments reduce_block(Moments part) {
  using Parts = Moments[kMomentThreads / kLanes];
  RLKERNEL_SHARED(Parts, parts);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  part = reduce_lanes(part);
  if (lane == 0) parts[group] = part;
  __syncthreads();  // the groups' moments are written
  part = reduce_lanes(lane < kMomentThreads / kLanes ? parts[lane] : Moments{});
  __syncthreads();  // the groups' moments are read: the next chunk may overwrite them
  return part;
}

// Of a thread's own elements, by differences to the first that counts: of equal ones the squares are exactly 0.
template <class T>
__device__ __forceinline__ Moments moments_of_values(const T (&x)[kMomentsPerThread], const float (&weight)[kMomentsPerThread]) {
  Moments own = {};
  double first = 0, above = 0;
#pragma unroll
  for (int k = 0; k < kMomentsPerThread; ++k) {
    if (weight[k] == 0.0f) continue;
    if (own.count == 0) first = x[k];
    own.count += weight[k];
    above += weight[k] * (x[k] - first);
  }
  if (own.count != 0) above /= own.count;
  own.mean = first + above;
#pragma unroll
  for (int k = 0; k < kMomentsPerThread; ++k) {
    if (weight[k] == 0.0f) continue;
    const double d = x[k] - first - above;
    own.squares += weight[k] * (d * d);
  }
  return own;
}

}  // namespace rlkernel::RLKERNEL_DEVICE
