// rlkernel._C: the kernels of every part that was built, each as <kernel>_<part>.
#include "rlkernel/errors.h"
#include "rlkernel/kernels.h"

namespace py = pybind11;
using namespace rlkernel;

namespace {

// The build names the parts it compiles and their architectures in RLKERNEL_BUILT_<PART>.
py::dict built() {
  py::dict parts;
  const auto archs = [](const char* names) { return py::str(names).attr("split")(); };
  parts["cpu"] = archs(RLKERNEL_BUILT_CPU);
#ifdef RLKERNEL_BUILT_CUDA
  parts["cuda"] = archs(RLKERNEL_BUILT_CUDA);
#endif
#ifdef RLKERNEL_BUILT_HIP
  parts["hip"] = archs(RLKERNEL_BUILT_HIP);
#endif
  return parts;
}

}  // namespace

#define BIND_CPU(name) bind::name(m, #name "_cpu", cpu::name, cpu::error_string);
#define BIND_CUDA(name) bind::name(m, #name "_cuda", cuda::name, cuda::error_string);
#define BIND_HIP(name) bind::name(m, #name "_hip", hip::name, hip::error_string);

PYBIND11_MODULE(_C, m) {
  m.def("built", &built);
  RLKERNEL_KERNELS(BIND_CPU)
#ifdef RLKERNEL_BUILT_CUDA
  RLKERNEL_KERNELS(BIND_CUDA)
#endif
#ifdef RLKERNEL_BUILT_HIP
  RLKERNEL_KERNELS(BIND_HIP)
#endif
}
