// The device kernels as a Python module that runs them on the CPU; the arguments are those of rlkernel._C. Nothing here depends on
// the size of a warp: one object serves both.
#include "rlkernel/kernels.h"

#include "emulation.h"
#include "primitives.h"

#include <pybind11/stl.h>

#include <string>

namespace py = pybind11;
using namespace rlkernel;

namespace {

const char* describe(int) { return "invalid arguments"; }

}  // namespace

#define DEFINE(name) bind::define<calls::name>(m, #name, dlpack::kCpu, emulated::name, describe);

PYBIND11_MODULE(emulated, m) {
  m.attr("warp_size") = primitives::warp_size();
  m.def("configure",
        [](uint64_t seed, unsigned max_blocks, unsigned room) {
          emulation::settings() = {seed, max_blocks, room, emulation::settings().missing};
        },
        py::arg("seed") = 0, py::arg("max_blocks") = 1 << 20, py::arg("room") = 0);
  m.def("leave_out", [](const std::string& file, int line) { emulation::settings().missing = {file, line}; }, py::arg("file") = "",
        py::arg("line") = 0);
  m.def("ballots", &primitives::ballots);
  m.def("neighbours", &primitives::neighbours);
  m.def("histogram", &primitives::histogram);
  m.def("cluster_sums", &primitives::cluster_sums, py::arg("clusters"), py::arg("size"), py::arg("threads"), py::arg("pushed"),
        py::arg("fault") = "");
  m.def("log", &primitives::log);
  m.def("exp", &primitives::exp);
  m.def("expm1", &primitives::expm1);
  m.def("tanh", &primitives::tanh);
  m.def("through_f16", &primitives::through_f16);
  m.def("through_bf16", &primitives::through_bf16);

  bind::describe_part(m, "emulated");
  RLKERNEL_KERNELS(DEFINE)
}
