// Six launches for kl_cov, four for clip_cov: the sums of each sequence, those of the batch, the counts (one launch for each
// digit of the least covariance that is picked), and what is picked.
#pragma once

#include "rlkernel/policy_loss.cuh"
#include "rlkernel/policy_loss_selection.h"

namespace rlkernel::RLKERNEL_DEVICE {

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_sums_kernel(PolicySelection p) {
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    Block block{offset_of(p, r), offset_of(p, r + 1)};
    selection_sums(p, r, block);
  }
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_batch_kernel(PolicySelection p) {
  Block block{0, p.rows};
  Block::Sums<kSelectionSums> sums;
  block.each(sums, [&](Block::At at) {
    for (int k = 0; k < kSelectionSums; ++k) sums.part[k] += p.partials[at.i * kSelectionSums + k];
  });
  block.finish(sums);
  if (block.leads())
    for (int k = 0; k < kSelectionSums; ++k) p.partials[p.rows * kSelectionSums + k] = sums.part[k];
  for (unsigned i = threadIdx.x; i < kLevels * kBins; i += kTeam) p.counts[i] = 0;
}

struct Found {
  uint32_t prefix, wanted;  // the digits so far, and how many of the tokens that share them are picked
};

// The next digit of the least rank that is picked. Each thread looks at some bins, the first thread at the highest.
__device__ __forceinline__ Found next_digit(const uint32_t* counts, int level, Found so_far) {
  constexpr unsigned kOwn = kBins / kTeam;
  using Totals = uint32_t[kTeam];
  RLKERNEL_SHARED(Totals, totals);
  RLKERNEL_SHARED(Found, found);
  const unsigned top = kBins - 1 - threadIdx.x * kOwn;
  uint32_t own = 0, above = 0;
  for (unsigned i = 0; i < kOwn; ++i) own += counts[top - i];
  totals[threadIdx.x] = own;
  if (threadIdx.x == 0) found = {so_far.prefix * bins_of(level), so_far.wanted};  // where no token counts
  __syncthreads();
  for (unsigned i = 0; i < threadIdx.x; ++i) above += totals[i];
  if (above < so_far.wanted && so_far.wanted <= above + own) {
    unsigned bin = top;
    for (; above + counts[bin] < so_far.wanted; --bin) above += counts[bin];
    found = {so_far.prefix * bins_of(level) + bin, so_far.wanted - above};
  }
  __syncthreads();
  const Found result = found;
  __syncthreads();  // it is read: the next digit may overwrite it
  return result;
}

__device__ __forceinline__ uint32_t prefix_of(const PolicySelection& p, int levels) {
  Found found{0, static_cast<uint32_t>(batch_of(p).wanted)};
  for (int level = 0; level < levels; ++level) found = next_digit(p.counts + level * kBins, level, found);
  return found.prefix;
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_count_kernel(PolicySelection p, int level) {
  using Counts = uint32_t[kBins];
  RLKERNEL_SHARED(Counts, counts);
  for (unsigned i = threadIdx.x; i < kBins; i += kTeam) counts[i] = 0;
  const uint32_t prefix = prefix_of(p, level);
  __syncthreads();  // the counts are 0
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    Block block{offset_of(p, r), offset_of(p, r + 1)};
    selection_count(p, r, block, level, prefix, counts);
  }
  __syncthreads();  // all tokens are counted
  for (unsigned i = threadIdx.x; i < kBins; i += kTeam)
    if (counts[i]) atomic_add(&p.counts[level * kBins + i], counts[i]);
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_kernel(PolicySelection p) {
  const uint32_t least = p.by_hash ? 0 : prefix_of(p, kLevels);
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    Block block{offset_of(p, r), offset_of(p, r + 1)};
    selection_write(p, r, block, least, p.counts[0]);
  }
}

inline int launch_policy_select(const PolicySelection& p, void* stream) {
  const unsigned blocks = p.rows < (1 << 20) ? static_cast<unsigned>(p.rows) : 1u << 20;
  if (!blocks) return 0;
  RLKERNEL_LAUNCH(policy_selection_sums_kernel, blocks, kTeam, stream, p);
  if (const int error = launch_error()) return error;
  RLKERNEL_LAUNCH(policy_selection_batch_kernel, 1u, kTeam, stream, p);
  if (const int error = launch_error()) return error;
  for (int level = 0; level < (p.by_hash ? 1 : kLevels); ++level) {
    RLKERNEL_LAUNCH(policy_selection_count_kernel, blocks, kTeam, stream, p, level);
    if (const int error = launch_error()) return error;
  }
  RLKERNEL_LAUNCH(policy_selection_kernel, blocks, kTeam, stream, p);
  return launch_error();
}

}  // namespace rlkernel::RLKERNEL_DEVICE
