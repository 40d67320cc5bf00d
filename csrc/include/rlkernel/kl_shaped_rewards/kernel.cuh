// KL-shaped rewards: one launch, a block for each chunk of a sequence. A chunk finds out by itself whether a token behind it
// counts: the nearest do, unless it is the sequence's last.
//
// Floor: two logprobs of 4 bytes and a mask of 1 read, 4 written; 64 x 4096 tokens are 3.4 MB, 1.0 us at 3.35 TB/s.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/kl_shaped_rewards/arguments.h"
#include "rlkernel/math.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kKlThreads = 256, kKlPerThread = kChunk / kKlThreads;

// exp(x) - 1, infinite where exp(x) is.
__device__ __forceinline__ float expm1_unbounded(float x) {
  if (!(x > 80.0f)) return expm1_exact(x);
  const float half = exp_exact(0.5f * x);
  return x > 89.0f ? infinity() : half * half;
}

// NaN stays NaN.
__device__ __forceinline__ float within(float x, float bound) { return x > bound ? bound : x < -bound ? -bound : x; }

__device__ __forceinline__ float kl_of(KlEstimator estimator, float d) {
  switch (estimator) {
    case KlEstimator::k1: return d;
    case KlEstimator::abs: return fabsf(d);
    case KlEstimator::k2: return d * d * 0.5f;
    default: return expm1_unbounded(-d) + d;
  }
}

// The largest over the block, in every thread.
__device__ __forceinline__ int largest_of_block(int x) {
  using Parts = int[kKlThreads / kLanes];
  RLKERNEL_SHARED(Parts, parts);
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const int other = shuffle_xor(x, distance);
    x = other > x ? other : x;
  }
  if (lane == 0) parts[threadIdx.x / kLanes] = x;
  __syncthreads();  // the groups' largest are written
  for (int group = 0; group < kKlThreads / kLanes; ++group) x = parts[group] > x ? parts[group] : x;
  __syncthreads();  // the groups' largest are read: the next may overwrite them
  return x;
}

// The chunk's last token that counts, or -1 where another one behind the chunk does.
__device__ __forceinline__ int paid_token(const KlChunk& c, int last) {
  last = largest_of_block(last);
  if (last < 0) return -1;
  if (c.mask == nullptr) return c.behind > 0 ? -1 : last;
  for (int64_t begin = 0; begin < c.behind; begin += kChunk) {
    int counts = 0;
    for (int k = 0; k < kKlPerThread; ++k) {
      const int64_t i = begin + k * kKlThreads + threadIdx.x;
      counts |= i < c.behind && c.mask[c.count + i] != 0;
    }
    if (largest_of_block(counts) > 0) return -1;
  }
  return last;
}

static __global__ void RLKERNEL_LAUNCH_BOUNDS(kKlThreads, 2) kl_kernel(KlShapedRewards arguments) {
  const int64_t slots = slots_of(arguments.sequences);
  for (int64_t slot = blockIdx.x; slot < slots; slot += gridDim.x) {
    const KlChunk c = kl_chunk(arguments, slot);
    if (c.count == 0) continue;
    float result[kKlPerThread];
    bool kept[kKlPerThread];
    int last = -1;
#pragma unroll
    for (int k = 0; k < kKlPerThread; ++k) {
      const int i = k * kKlThreads + threadIdx.x;
      kept[k] = i < c.count && !c.padding && (c.mask == nullptr || c.mask[i] != 0);
      const float d = within(kept[k] ? c.logprobs[i] - c.ref_logprobs[i] : 0.0f, arguments.kl_input);
      const float reward = kept[k] && !arguments.per_sequence ? c.rewards[i] : 0.0f;
      result[k] = reward - arguments.beta * within(kl_of(arguments.estimator, d), arguments.kl_output);
      if (kept[k]) last = i;
    }
    const int paid = arguments.per_sequence ? paid_token(c, last) : -1;
#pragma unroll
    for (int k = 0; k < kKlPerThread; ++k) {
      const int i = k * kKlThreads + threadIdx.x;
      if (i == paid) result[k] = *c.rewards + result[k];
      if (i < c.count) c.out[i] = kept[k] ? result[k] : 0.0f;
    }
  }
}

int kl_shaped_rewards(const KlShapedRewards& k, void* stream) {
  const int64_t slots = slots_of(k.sequences);
  if (slots == 0) return 0;
  RLKERNEL_LAUNCH(kl_kernel, static_cast<unsigned>(slots < 1 << 20 ? slots : 1 << 20), kKlThreads, stream, k);
  return launch_error();
}

}  // namespace rlkernel::RLKERNEL_DEVICE
