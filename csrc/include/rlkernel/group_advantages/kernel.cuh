// Group advantages: 32 lanes for each group, in one launch; before it one of the batch's moments where those scale.
//
// Floor: 4 bytes read and 4 written a response, kilobytes in all: what a call takes is a launch.
#pragma once

#include "rlkernel/group_advantages/terms.h"
#include "rlkernel/whiten/moments.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kGroupThreads = 256, kGroupTeams = kGroupThreads / kLanes;

// Butterflies: every lane gets the same bits.
struct Lanes {
  static constexpr int kStride = kLanes;
  static constexpr bool kPlain = false;
  int lane;

  __device__ __forceinline__ double sum(double x) const {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) x += shuffle_xor(x, distance);
    return x;
  }
  __device__ __forceinline__ int64_t least(int64_t x) const {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const int64_t other = shuffle_xor(x, distance);
      x = other < x ? other : x;
    }
    return x;
  }
  __device__ __forceinline__ double largest(double x) const {
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const double other = shuffle_xor(x, distance);
      x = other > x ? other : x;
    }
    return x;
  }
};

// A chunk of responses of each column.
static __global__ void RLKERNEL_LAUNCH_BOUNDS(kMomentThreads, 2) batch_kernel(GroupAdvantages a) {
  const int64_t chunks = chunks_of(a.n), columns = a.estimator == Estimator::gdpo ? a.columns : 1;
  for (int64_t slot = blockIdx.x; slot < chunks * columns; slot += gridDim.x) {
    const int column = a.estimator == Estimator::gdpo ? static_cast<int>(slot / chunks) : kWeightedColumn;
    double x[kMomentsPerThread];
    float weight[kMomentsPerThread];
#pragma unroll
    for (int k = 0; k < kMomentsPerThread; ++k) {
      const int64_t i = slot % chunks * kChunk + k * kMomentThreads + threadIdx.x;
      const bool kept = i < a.n && counts_at<false>(a, i, column);
      x[k] = kept ? reward_at<false>(a, i, column) : 0;
      weight[k] = kept ? 1.0f : 0.0f;
    }
    const Moments own = reduce_block(moments_of_values(x, weight));
    if (threadIdx.x == 0) a.batch[slot] = own;
  }
}

static __global__ void RLKERNEL_LAUNCH_BOUNDS(kGroupThreads, 2) group_kernel(GroupAdvantages a) {
  const Lanes team{static_cast<int>(threadIdx.x % kLanes)};
  const auto batch = [&](int k) {
    const int64_t chunks = chunks_of(a.n);
    Moments moments = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) moments = merge(moments, a.batch[k * chunks + chunk]);
    return moments;
  };
  const int64_t tasks = tasks_of(a), first = static_cast<int64_t>(blockIdx.x) * kGroupTeams + threadIdx.x / kLanes;
  for (int64_t task = first; task < tasks; task += static_cast<int64_t>(gridDim.x) * kGroupTeams) group(team, a, task, batch);
}

int group_advantages(const GroupAdvantages& a, void* stream) {
  const int64_t tasks = a.ends != nullptr ? a.n : a.groups;
  if (a.n == 0 || tasks == 0) return 0;
  if (a.scale == RewardScale::batch) {
    const int64_t slots = chunks_of(a.n) * (a.estimator == Estimator::gdpo ? a.columns : 1);
    RLKERNEL_LAUNCH(batch_kernel, static_cast<unsigned>(slots < 1 << 20 ? slots : 1 << 20), kMomentThreads, stream, a);
    if (const int error = launch_error()) return error;
  }
  const int64_t wanted = (tasks + kGroupTeams - 1) / kGroupTeams;
  const unsigned blocks = static_cast<unsigned>(wanted < 1 << 20 ? wanted : 1 << 20);
  RLKERNEL_LAUNCH(group_kernel, blocks, kGroupThreads, stream, a);
  return launch_error();
}

}  // namespace rlkernel::RLKERNEL_DEVICE
