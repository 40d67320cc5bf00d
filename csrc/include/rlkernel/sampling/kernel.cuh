// Sampling: the launches of its two passes.
#pragma once

#include "rlkernel/sampling/finish.cuh"
#include "rlkernel/sampling/statistics.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// Positions in a row are 32-bit in the kernels, and so are rows.
inline bool runs(const SamplingInputs& in) {
  return in.vocab > 0 && in.vocab_start >= 0 && in.vocab_start % kSplit == 0 && in.vocab_start + in.vocab <= in.whole_vocab &&
         in.whole_vocab < (int64_t{1} << 31) - 2 * kSplit && in.rows < int64_t{1} << 31;
}

// Of rows that nobody filters.
static __global__ void RLKERNEL_LAUNCH_BOUNDS(kLanes, 16) finish_kernel(SamplingInputs in, SamplingOutputs out) {
  for (int64_t r = blockIdx.x; r < in.rows; r += gridDim.x) {
    if (in.skip != nullptr && in.skip[r]) continue;
    const float temperature = of_row(in.temperature, r);
    const bool greedy = temperature == 0.0f;
    const RowSummary row = combine(in, r, softmax_temperature(temperature));
    const bool valid = is_valid(in, r, row);
    write_short_support(out, r, valid && greedy ? row.argmax : -1);
    if (threadIdx.x == 0) write_row(in, out, r, row, {}, row.token, 1, valid);
  }
}

int sampling_statistics(const SamplingInputs& in, void* stream) {
  if (in.rows == 0) return 0;
  if (!runs(in) || in.logits == nullptr) return kInvalidArguments;
  const SplitGrid grid(in.vocab);
  // HIP wants less than 2^32 threads in a grid: 512 GiB of bf16
  if (in.rows >= (int64_t{1} << 32) / kStatisticsThreads / grid.splits) return kInvalidArguments;
  const unsigned blocks = static_cast<unsigned>(in.rows) * grid.splits;
  return with_dtype(in.dtype, [&](auto type) {
    using T = decltype(type);
    if (in.adjusted != nullptr || in.bitmask != nullptr) {
      RLKERNEL_LAUNCH_ALL((statistics_kernel<T, true>), blocks, kStatisticsThreads, stream, in, grid);
    } else {
      RLKERNEL_LAUNCH_ALL((statistics_kernel<T, false>), blocks, kStatisticsThreads, stream, in, grid);
    }
    return launch_error();
  });
}

// launch.cuh
template <class T>
int launch_filter(const SamplingInputs& in, const SamplingOutputs& out, unsigned rows, void* stream);

int sampling_finish(const SamplingInputs& in, const SamplingOutputs& out, void* stream) {
  if (in.rows == 0) return 0;
  if (!runs(in)) return kInvalidArguments;
  const unsigned blocks = static_cast<unsigned>(in.rows < 1 << 20 ? in.rows : 1 << 20);
  if (in.group_max == nullptr) {
    RLKERNEL_LAUNCH(finish_kernel, blocks, kLanes, stream, in, out);
    return launch_error();
  }
  if (in.vocab != in.whole_vocab || (in.logits == nullptr)) return kInvalidArguments;
  if (in.adjusted != nullptr) return launch_filter<float>(in, out, blocks, stream);
  return with_dtype(in.dtype, [&](auto type) { return launch_filter<decltype(type)>(in, out, blocks, stream); });
}

}  // namespace rlkernel::RLKERNEL_DEVICE
