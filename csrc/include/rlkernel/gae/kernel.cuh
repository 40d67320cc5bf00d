// Generalised advantage estimation as a segmented reverse scan: one block walks a row from its end in tiles.
//
// Floor: 4 + 4 (+ 1) bytes read and 4 + 4 written a token; 64 x 4096 tokens are 4.5 MB, 1.4 us at 3.35 TB/s. What a walk
// takes is the latency of its tiles, one behind the other, of which a row of 4096 has four.
//
// Tiles are counted from a row's first token, and a token beyond its end or under the mask changes nothing at all, so a row
// has the same bits packed and padded.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/gae/arguments.h"
#include "rlkernel/math.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kGaeThreads = 256, kGaeTokens = 4;  // threads of a block; consecutive tokens of a thread
constexpr int kGaeTile = kGaeThreads * kGaeTokens, kGaeGroups = kGaeThreads / kLanes;

// What comes over the tokens behind: the advantage and the value of the next token that counts.
struct Behind {
  double advantage, value;
};

// What a stretch of tokens does to that: A = decay * A_behind + slope * V_behind + gain, and V is its first token's.
// A stretch without a token that counts does nothing, whatever the numbers.
struct Stretch {
  double decay, slope, gain, value;
  bool counts;
};

__device__ __forceinline__ Stretch nothing() { return {1.0, 0.0, 0.0, 0.0, false}; }

__device__ __forceinline__ Behind over(const Stretch& s, const Behind& behind) {
  if (!s.counts) return behind;
  return {s.decay * behind.advantage + s.slope * behind.value + s.gain, s.value};
}

// `first`, and what comes after it in the row.
__device__ __forceinline__ Stretch join(const Stretch& first, const Stretch& second) {
  if (!first.counts) return second;
  if (!second.counts) return first;
  return {first.decay * second.decay, first.decay * second.slope,
          first.decay * second.gain + first.slope * second.value + first.gain, first.value, true};
}

__device__ __forceinline__ Stretch shuffle_down(const Stretch& s, int distance) {
  return {shuffle_down(s.decay, distance), shuffle_down(s.slope, distance), shuffle_down(s.gain, distance),
          shuffle_down(s.value, distance), shuffle_down(static_cast<int>(s.counts), distance) != 0};
}

struct GaeRow {
  const float *rewards, *values;
  const uint8_t* mask;
  float *advantages, *returns;
  int64_t length;
};

__device__ __forceinline__ int64_t clamped(int64_t x, int64_t low, int64_t high) {
  return x < low ? low : x > high ? high : x;
}

__device__ __forceinline__ GaeRow gae_row(const Gae& g, int64_t r) {
  if (g.offsets == nullptr)
    return {g.rewards + r * g.rewards_stride, g.values + r * g.values_stride,
            g.mask != nullptr ? g.mask + r * g.mask_stride : nullptr, g.advantages + r * g.length,
            g.returns + r * g.length, g.length};
  const int64_t start = clamped(g.offsets[r], 0, g.total), end = clamped(g.offsets[r + 1], start, g.total);
  return {g.rewards + start, g.values + start, g.mask != nullptr ? g.mask + start : nullptr, g.advantages + start,
          g.returns + start, end - start};
}

// The tile that starts at `start`; returns what comes over it to the tile before. Every thread gets the same.
__device__ __forceinline__ Behind gae_tile(const GaeRow& row, int64_t start, double gamma, double lam, bool zero_holes,
                                           Behind behind) {
  using Groups = Stretch[kGaeGroups];
  RLKERNEL_SHARED(Groups, groups);
  const int lane = threadIdx.x % kLanes, group = threadIdx.x / kLanes;
  const int64_t first = start + threadIdx.x * kGaeTokens;
  double reward[kGaeTokens], value[kGaeTokens];
  bool kept[kGaeTokens], counts[kGaeTokens];  // `counts`: takes part in the recurrence
#pragma unroll
  for (int i = 0; i < kGaeTokens; ++i) {
    const int64_t t = first + i;
    kept[i] = t < row.length && (row.mask == nullptr || row.mask[t] != 0);
    counts[i] = zero_holes ? t < row.length : kept[i];
    reward[i] = kept[i] ? row.rewards[t] : 0.0f;
    value[i] = kept[i] ? row.values[t] : 0.0f;
  }
  Stretch own = nothing();
#pragma unroll
  for (int i = kGaeTokens - 1; i >= 0; --i)
    own = join({gamma * lam, gamma, reward[i] - value[i], value[i], counts[i]}, own);
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const Stretch after = shuffle_down(own, distance);
    if (lane + distance < kLanes) own = join(own, after);
  }
  Stretch after = shuffle_down(own, 1);
  if (lane == kLanes - 1) after = nothing();
  if (lane == 0) groups[group] = own;
  __syncthreads();  // the groups are written
  Behind mine = behind;
  for (int i = kGaeGroups - 1; i >= 0; --i) {
    behind = over(groups[i], behind);
    if (i == group + 1) mine = behind;
  }
  mine = over(after, mine);
#pragma unroll
  for (int i = kGaeTokens - 1; i >= 0; --i) {
    if (counts[i]) mine = {reward[i] + gamma * mine.value - value[i] + gamma * lam * mine.advantage, value[i]};
    if (first + i < row.length) {
      row.advantages[first + i] = kept[i] ? static_cast<float>(mine.advantage) : 0.0f;
      row.returns[first + i] = kept[i] ? static_cast<float>(mine.advantage + value[i]) : 0.0f;
    }
  }
  __syncthreads();  // the groups are read: the next tile may overwrite them
  return behind;
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kGaeThreads, 2) gae_kernel(Gae g) {
  for (int64_t r = blockIdx.x; r < g.rows; r += gridDim.x) {
    const GaeRow row = gae_row(g, r);
    Behind behind = {0.0, g.last_values != nullptr ? g.last_values[r] : 0.0};
    const int64_t tiles = (row.length + kGaeTile - 1) / kGaeTile;
    const double lam = g.lams != nullptr ? g.lams[r] : g.lam;
    for (int64_t tile = tiles - 1; tile >= 0; --tile)
      behind = gae_tile(row, tile * kGaeTile, g.gamma, lam, g.zero_holes, behind);
  }
}

int gae(const Gae& g, void* stream) {
  if (g.rows == 0 || g.total == 0) return 0;
  const unsigned blocks = static_cast<unsigned>(g.rows < 1 << 20 ? g.rows : 1 << 20);
  RLKERNEL_LAUNCH(gae_kernel, blocks, kGaeThreads, stream, g);
  return launch_error();
}

}  // namespace rlkernel::RLKERNEL_DEVICE
