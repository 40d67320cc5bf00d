// One row of a tile as the kernels of logprob see it.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/logprob/arguments.h"
#include "rlkernel/math.cuh"
#include "rlkernel/vec.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// Each thread has this many reads of 16 bytes on their way before it computes: 64 KiB for an H100 multiprocessor that
// holds 1024 threads, where 12 KiB cover the latency of its share of 3.35 TB/s.
template <bool kMapped>
constexpr int kUnroll = kMapped ? 2 : 4;  // tanh needs the registers
constexpr int kMaxThreads = 512;

// u at and below this has 2^u = 0 and a finite product with anything a row can hold.
constexpr float kLowestExponent = -200.0f;

// kMapped: y = softcap * tanh(u / softcap) with u = (x + bias) * logit_scale. Otherwise y = x.
template <class T, bool kMapped>
struct Row {
  struct Value {
    float y, slope;  // slope = dy / du
  };

  const T* x;
  const float* bias;
  float logit_scale, softcap, inverse_softcap;
  int vocab;

  __device__ __forceinline__ Row(const LogprobTile& tile, int64_t r)
      : x(static_cast<const T*>(tile.logits) + r / tile.inner * tile.outer_stride + r % tile.inner * tile.inner_stride),
        bias(tile.bias), logit_scale(tile.logit_scale), softcap(tile.softcap), inverse_softcap(1.0f / tile.softcap),
        vocab(static_cast<int>(tile.vocab)) {}

  __device__ __forceinline__ Value map(float value, int i) const {
    if constexpr (kMapped) {
      if (bias != nullptr) value += bias[i];
      value *= logit_scale;
      if (softcap != 0.0f) {
        const Tanh tanh = tanh_and_slope(value * inverse_softcap);
        return {softcap * tanh.value, tanh.slope};
      }
    }
    return {value, 1.0f};
  }

  __device__ __forceinline__ float y(int i) const { return map(to_float(x[i]), i).y; }

  __device__ __forceinline__ bool aligned(int bytes) const { return reinterpret_cast<uintptr_t>(x) % bytes == 0; }
};

__device__ __forceinline__ float row_temperature(const LogprobTile& tile, int64_t r) {
  return tile.temperatures != nullptr ? tile.temperatures[r] : tile.temperature;
}

// Where the target of a row lies in the tile, or -1.
__device__ __forceinline__ int place_of(int64_t target, const LogprobTile& tile) {
  const int64_t place = target - tile.vocab_start;
  return place >= 0 && place < tile.vocab ? static_cast<int>(place) : -1;
}

inline bool is_mapped(const LogprobTile& tile) {
  return tile.bias != nullptr || tile.logit_scale != 1.0f || tile.softcap != 0.0f;
}

// Threads for a row: enough for one round of reads each. From the length of the row and its dtype alone, as the
// order of the sums follows from it.
template <class T>
inline int threads_for(int64_t vocab) {
  int threads = 2 * kLanes;
  while (threads < kMaxThreads && vocab > int64_t{8} * threads * kVector<T>) threads *= 2;
  return threads;
}

// Blocks take rows in strides of the grid, so the count of blocks is free; HIP wants less than 2^32 threads in a grid.
inline unsigned blocks_for(int64_t rows) { return static_cast<unsigned>(rows < 1 << 20 ? rows : 1 << 20); }

// Positions in a row are 32-bit in the kernels.
inline bool runs(const LogprobTile& tile) { return tile.vocab >= 0 && tile.vocab < (int64_t{1} << 31) - 4096 * 8; }

}  // namespace rlkernel::RLKERNEL_DEVICE
