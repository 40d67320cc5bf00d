// rlkernel._C: the kernels of every part that was built, each as <part>.<kernel>.
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

#define DEFINE_CPU(name) bind::define<calls::name>(part, #name, dlpack::kCpu, cpu::name, cpu::error_string);
#define DEFINE_CUDA(name) bind::define<calls::name>(part, #name, dlpack::kCuda, cuda::name, cuda::error_string);
#define DEFINE_HIP(name) bind::define<calls::name>(part, #name, dlpack::kRocm, hip::name, hip::error_string);

PYBIND11_MODULE(_C, m) {
  bind::torch();
  m.def("built", &built);
  m.attr("ENUMS") = bind::enums();
  {
    py::module_ part = bind::add_part(m, "cpu");
    RLKERNEL_KERNELS(DEFINE_CPU)
    RLKERNEL_CPU_KERNELS(DEFINE_CPU)
  }
#ifdef RLKERNEL_BUILT_CUDA
  {
    py::module_ part = bind::add_part(m, "cuda");
    RLKERNEL_KERNELS(DEFINE_CUDA)
  }
#endif
#ifdef RLKERNEL_BUILT_HIP
  {
    py::module_ part = bind::add_part(m, "hip");
    RLKERNEL_KERNELS(DEFINE_HIP)
  }
#endif
}
