// The device kernels as a Python module that runs them on the CPU; the arguments are those of rlkernel._C.
#include "rlkernel/kernels.h"
#include "rlkernel/math.cuh"
#include "rlkernel/vec.cuh"

#include <pybind11/stl.h>

#include <string>

namespace py = pybind11;
using namespace rlkernel;

namespace {

const char* describe(int) { return "invalid arguments"; }

// What the emulated primitives do, for the tests of the emulation itself.
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

}  // namespace

#define DEFINE(name) bind::define<calls::name>(m, #name, dlpack::kCpu, emulated::name, describe);

PYBIND11_MODULE(emulated, m) {
  m.attr("warp_size") = RLKERNEL_WARP;
  m.def("configure",
        [](uint64_t seed, unsigned max_blocks, unsigned room) {
          emulation::settings() = {seed, max_blocks, room, emulation::settings().missing};
        },
        py::arg("seed") = 0, py::arg("max_blocks") = 1 << 20, py::arg("room") = 0);
  m.def("leave_out", [](const std::string& file, int line) { emulation::settings().missing = {file, line}; }, py::arg("file") = "",
        py::arg("line") = 0);
  m.def("ballots", &ballots);
  m.def("neighbours", &neighbours);
  m.def("histogram", &histogram);
  m.def("cluster_sums", &cluster_sums, py::arg("clusters"), py::arg("size"), py::arg("threads"), py::arg("pushed"),
        py::arg("fault") = "");
  m.def("log", [](double x) { return emulated::log_exact(x); });
  m.def("exp", [](float x) { return emulated::exp_exact(x); });
  m.def("expm1", [](float x) { return emulated::expm1_exact(x); });
  m.def("tanh", [](float x) { return std::pair(emulated::tanh_and_slope(x).value, emulated::tanh_and_slope(x).slope); });
  m.def("through_f16", [](float x) { return emulated::to_float(emulated::from_float<emulated::f16>(x)); });
  m.def("through_bf16", [](float x) { return emulated::to_float(emulated::from_float<emulated::bf16>(x)); });

  bind::describe_part(m, "emulated");
  RLKERNEL_KERNELS(DEFINE)
}
