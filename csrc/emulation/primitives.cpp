#include "primitives.h"

#include "rlkernel/math.cuh"
#include "rlkernel/vec.cuh"

namespace rlkernel::primitives {

int warp_size() { return RLKERNEL_WARP; }

std::vector<uint64_t> ballots(unsigned threads) {
  std::vector<uint64_t> votes(threads);
  emulation::launch(1, threads, [&] { votes[threadIdx.x] = emulation::ballot(threadIdx.x % 3 == 0); });
  return votes;
}

std::vector<int> neighbours(unsigned threads, int mask, int width) {
  std::vector<int> got(threads);
  emulation::launch(1, threads, [&] {
    got[threadIdx.x] = emulation::shuffle_xor(static_cast<int>(threadIdx.x), mask, width);
  });
  return got;
}

std::vector<int> histogram(unsigned blocks, unsigned threads, unsigned bins) {
  std::vector<int> counts(bins);
  emulation::launch(blocks, threads, [&] {
    using Bins = int[64];
    RLKERNEL_SHARED(Bins, local);
    if (threadIdx.x < bins) local[threadIdx.x] = 0;
    __syncthreads();
    emulation::atomic_add(&local[threadIdx.x % bins], 1);
    __syncthreads();
    if (threadIdx.x < bins) emulation::atomic_add(&counts[threadIdx.x], local[threadIdx.x]);
  });
  return counts;
}

// Each block adds up what all blocks of its cluster have, by reads or by writes of their memory. Faults that are planted: the
// barrier between writing and reading is missing, or is one of a block; a block leaves while others read it.
std::vector<int> cluster_sums(unsigned clusters, unsigned size, unsigned threads, bool pushed, const std::string& fault) {
  std::vector<int> sums(clusters * size);
  emulation::launch_clusters(clusters, size, threads, [&] {
    using Parts = int[8];
    RLKERNEL_SHARED(Parts, parts);
    const unsigned rank = emulation::cluster_rank(), thread = threadIdx.x;
    const int own = static_cast<int>(blockIdx.x * blockIdx.x);
    if (pushed) {
      if (thread < size) static_cast<int*>(emulation::of_block(parts, thread))[rank] = own;
    } else if (thread == 0) {
      parts[rank] = own;
    }
    if (fault == "a barrier of the block") __syncthreads();
    else if (fault != "no barrier") emulation::cluster_barrier();
    if (thread == 0) {
      for (unsigned b = 0; b < size; ++b)
        sums[blockIdx.x] += pushed ? parts[b] : static_cast<int*>(emulation::of_block(parts, b))[b];
    }
    if (fault != "it leaves early") emulation::cluster_barrier();
  });
  return sums;
}

double log(double x) { return emulated::log_exact(x); }
float exp(float x) { return emulated::exp_exact(x); }
float expm1(float x) { return emulated::expm1_exact(x); }
std::pair<float, float> tanh(float x) { return {emulated::tanh_and_slope(x).value, emulated::tanh_and_slope(x).slope}; }
float through_f16(float x) { return emulated::to_float(emulated::from_float<emulated::f16>(x)); }
float through_bf16(float x) { return emulated::to_float(emulated::from_float<emulated::bf16>(x)); }

}  // namespace rlkernel::primitives
