// The device kernels as a Python module that runs them on the CPU; the arguments are those of rlkernel._C.
#include "rlkernel/kernels.h"
#include "rlkernel/math.cuh"
#include "rlkernel/vec.cuh"

#include <pybind11/stl.h>

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

}  // namespace

#define DEFINE(name) bind::define<calls::name>(m, #name, dlpack::kCpu, emulated::name, describe);

PYBIND11_MODULE(emulated, m) {
  m.attr("warp_size") = RLKERNEL_WARP;
  m.def("configure", [](uint64_t seed, unsigned max_blocks) { emulation::settings() = {seed, max_blocks}; },
        py::arg("seed") = 0, py::arg("max_blocks") = 1 << 20);
  m.def("ballots", &ballots);
  m.def("neighbours", &neighbours);
  m.def("histogram", &histogram);
  m.def("log", [](double x) { return emulated::log_exact(x); });
  m.def("exp", [](float x) { return emulated::exp_exact(x); });
  m.def("expm1", [](float x) { return emulated::expm1_exact(x); });
  m.def("tanh", [](float x) { return std::pair(emulated::tanh_and_slope(x).value, emulated::tanh_and_slope(x).slope); });
  m.def("through_f16", [](float x) { return emulated::to_float(emulated::from_float<emulated::f16>(x)); });
  m.def("through_bf16", [](float x) { return emulated::to_float(emulated::from_float<emulated::bf16>(x)); });

  bind::describe_part(m, "emulated");
  RLKERNEL_KERNELS(DEFINE)
}
