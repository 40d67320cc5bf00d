// Seven launches: the sums of each sequence, those of the batch, the counts (one launch for each digit of the least rank that
// is picked), how many tokens of each sequence have it, and what is picked.
#pragma once

#include "rlkernel/policy_loss/kernel.cuh"
#include "rlkernel/policy_loss/selection.h"

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

// The next digit of the least rank that is picked: of a `Cut` whose rank is the digits so far. Each thread looks at some bins,
// the first thread at the highest.
__device__ __forceinline__ Cut next_digit(const uint32_t* counts, int level, Cut so_far) {
  constexpr unsigned kOwn = kBins / kTeam;
  using Totals = uint32_t[kTeam];
  RLKERNEL_SHARED(Totals, totals);
  RLKERNEL_SHARED(Cut, found);
  const unsigned top = kBins - 1 - threadIdx.x * kOwn;
  uint32_t own = 0, above = 0;
  for (unsigned i = 0; i < kOwn; ++i) own += counts[top - i];
  totals[threadIdx.x] = own;
  if (threadIdx.x == 0) found = {so_far.rank * bins_of(level), so_far.wanted};  // where no token counts
  __syncthreads();
  for (unsigned i = 0; i < threadIdx.x; ++i) above += totals[i];
  if (above < so_far.wanted && so_far.wanted <= above + own) {
    unsigned bin = top;
    for (; above + counts[bin] < so_far.wanted; --bin) above += counts[bin];
    found = {so_far.rank * bins_of(level) + bin, so_far.wanted - above};
  }
  __syncthreads();
  const Cut result = found;
  __syncthreads();  // it is read: the next digit may overwrite it
  return result;
}

__device__ __forceinline__ Cut cut_of(const PolicySelection& p, int levels) {
  Cut cut{0, static_cast<uint32_t>(batch_of(p).wanted)};
  for (int level = 0; level < levels; ++level) cut = next_digit(p.counts + level * kBins, level, cut);
  return cut;
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_count_kernel(PolicySelection p, int level) {
  using Counts = uint32_t[kBins];
  RLKERNEL_SHARED(Counts, counts);
  for (unsigned i = threadIdx.x; i < kBins; i += kTeam) counts[i] = 0;
  const uint32_t prefix = cut_of(p, level).rank;
  __syncthreads();  // the counts are 0
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    Block block{offset_of(p, r), offset_of(p, r + 1)};
    selection_count(p, r, block, level, prefix, counts);
  }
  __syncthreads();  // all tokens are counted
  for (unsigned i = threadIdx.x; i < kBins; i += kTeam)
    if (counts[i]) atomic_add(&p.counts[level * kBins + i], counts[i]);
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_ties_kernel(PolicySelection p) {
  const Cut cut = cut_of(p, kLevels);
  if (!is_tied(p, cut)) return;
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    Block block{offset_of(p, r), offset_of(p, r + 1)};
    selection_ties(p, r, block, cut);
  }
}

__global__ void RLKERNEL_LAUNCH_BOUNDS(kTeam, 1) policy_selection_kernel(PolicySelection p) {
  const Cut cut = cut_of(p, kLevels);
  const bool tied = is_tied(p, cut);
  for (int64_t r = blockIdx.x; r < p.rows; r += gridDim.x) {
    Block block{offset_of(p, r), offset_of(p, r + 1)};
    int64_t end = block.end;
    if (tied) {
      const Block before{0, r};
      Block::Sums<1> ties;
      before.each(ties, [&](Block::At at) { ties.part[0] += p.partials[at.i * kSelectionSums]; });
      before.finish(ties);
      end = end_of_ties(p, r, block, cut, cut.wanted - ties.total(0));
    }
    selection_write(p, r, block, cut, end);
  }
}

int policy_select(const PolicySelection& p, void* stream) {
  const unsigned blocks = p.rows < (1 << 20) ? static_cast<unsigned>(p.rows) : 1u << 20;
  if (!blocks) return 0;
  RLKERNEL_LAUNCH(policy_selection_sums_kernel, blocks, kTeam, stream, p);
  if (const int error = launch_error()) return error;
  RLKERNEL_LAUNCH(policy_selection_batch_kernel, 1u, kTeam, stream, p);
  if (const int error = launch_error()) return error;
  for (int level = 0; level < kLevels; ++level) {
    RLKERNEL_LAUNCH(policy_selection_count_kernel, blocks, kTeam, stream, p, level);
    if (const int error = launch_error()) return error;
  }
  RLKERNEL_LAUNCH(policy_selection_ties_kernel, blocks, kTeam, stream, p);
  if (const int error = launch_error()) return error;
  RLKERNEL_LAUNCH(policy_selection_kernel, blocks, kTeam, stream, p);
  return launch_error();
}

}  // namespace rlkernel::RLKERNEL_DEVICE
