// rlkernel._C: the kernels of every part that was built, each as <part>.<kernel>.
#include "rlkernel/errors.h"
#include "rlkernel/kernels.h"
#include "rlkernel/group_advantages/direct.h"
#include "rlkernel/layer_norm/direct.h"
#include "rlkernel/logprob/direct.h"
#include "rlkernel/matmul/direct.h"
#include "rlkernel/paged_prefix_attention/direct.h"
#include "rlkernel/replaced.h"
#include "rlkernel/rms_norm/direct.h"
#include "rlkernel/sampling/direct.h"
#include "rlkernel/swiglu/direct.h"

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

direct::Settings settings_of(py::object forced, py::object asked, py::dict last, py::list emulated, py::object debug,
                             py::list levels, py::dict forward_ad, py::object module) {
  const py::module_ torch = py::module_::import("torch");
  const py::object core = torch.attr("_C");
  return {forced, asked, last, emulated, debug, levels, forward_ad, torch.attr("is_grad_enabled"), torch.attr("empty_like"),
          torch.attr("nn").attr("Parameter"), torch.attr("contiguous_format"), torch.attr("float32"), module,
          core.attr("_len_torch_dispatch_stack"), core.attr("_functorch").attr("peek_interpreter_stack"),
          core.attr("_get_tracing_state"), core.attr("_len_torch_function_stack")};
}

// Those of a step of an engine.
struct SamplingKernels {
  int statistics(const SamplingInputs& in) const { return cpu::sampling_statistics(in, nullptr); }
  int finish(const SamplingInputs& in, const SamplingOutputs& out) const { return cpu::sampling_finish(in, out, nullptr); }
  int logprob(const LogprobForward& call) const { return cpu::logprob_forward(call, nullptr); }
};

struct GroupKernels {
  int advantages(const GroupAdvantages& call) const { return cpu::group_advantages(call, nullptr); }
  int whiten(const Whiten& call) const { return cpu::whiten(call, nullptr); }
};

#define DIRECT(name, kernel) \
  if (op == #name) return direct::define<direct::name>(#name, cpu::kernel, settings);

// The short way of an op's public call, or None.
py::object direct_call(const std::string& op, py::object forced, py::object asked, py::dict last, py::list emulated,
                       py::object debug, py::list levels, py::dict forward_ad, py::object module) {
  const direct::Settings settings = settings_of(forced, asked, last, emulated, debug, levels, forward_ad, module);
  DIRECT(layer_norm, layer_norm_forward)
  DIRECT(rms_norm, rms_norm_forward)
  DIRECT(swiglu, swiglu_forward)
  DIRECT(logprob, logprob_forward)
  DIRECT(product, matmul)
  if (op == "step_attention")
    return direct::define<direct::step_attention>("paged_prefix_attention", cpu::paged_prefix_attention, settings);
  DIRECT(layer_norm_backward, layer_norm_backward)
  DIRECT(rms_norm_backward, rms_norm_backward)
  DIRECT(swiglu_backward, swiglu_backward)
  if (op == "group_advantages") return direct::define<direct::group_advantages>("group_advantages", GroupKernels{}, settings);
  if (op == "sampling") return direct::define<direct::sampling>("sampling", SamplingKernels{}, settings);
  return py::none();
}

#define REPLACED(name, kernel) \
  if (op == #name) return direct::define<direct::name>(#name, kernel, settings, place);

// What takes an operation's place in torch's dispatcher: `otherwise` behind C++.
py::object replaced_call(const std::string& op, py::object counted, py::object used, py::object otherwise, py::list asides,
                         py::list emulated, py::list levels, py::dict forward_ad) {
  const direct::Settings settings = settings_of({}, {}, {}, emulated, {}, levels, forward_ad, {});
  const direct::Place place{otherwise, asides, used, counted};
  REPLACED(mm, cpu::matmul)
  REPLACED(bmm, cpu::matmul)
  REPLACED(addmm, cpu::matmul)
  REPLACED(linear, cpu::matmul)
  REPLACED(row_sum, cpu::matmul)
  REPLACED(row_mean, cpu::matmul)
  REPLACED(step_of_sdpa, cpu::paged_prefix_attention)
  REPLACED(softmax_of_rows, cpu::softmax)
  REPLACED(log_softmax_of_rows, cpu::softmax)
  REPLACED(silu, cpu::swiglu_forward)
  REPLACED(gelu, cpu::swiglu_forward)
  REPLACED(rms_norm_in_order, cpu::rms_norm_in_order)
  REPLACED(layer_norm_of_rows, cpu::layer_norm_forward)
  REPLACED(rsqrt, nullptr)
  REPLACED(power, nullptr)
  throw std::invalid_argument("op must be one that C++ takes, got " + op);
}

}  // namespace

#define DEFINE_CPU(name) bind::define<calls::name>(part, #name, dlpack::kCpu, cpu::name, cpu::error_string);
#define DEFINE_CUDA(name) bind::define<calls::name>(part, #name, dlpack::kCuda, cuda::name, cuda::error_string);
#define DEFINE_HIP(name) bind::define<calls::name>(part, #name, dlpack::kRocm, hip::name, hip::error_string);

PYBIND11_MODULE(_C, m) {
  bind::torch();
  m.def("built", &built);
  m.attr("ENUMS") = bind::enums();
  m.def("direct", &direct_call, py::arg("op"), py::kw_only(), py::arg("forced"), py::arg("asked"), py::arg("last"),
        py::arg("emulated"), py::arg("debug"), py::arg("levels"), py::arg("forward_ad"), py::arg("module"));
  m.def("replaced", &replaced_call, py::arg("op"), py::kw_only(), py::arg("counted"), py::arg("used"), py::arg("otherwise"),
        py::arg("asides"), py::arg("emulated"), py::arg("levels"), py::arg("forward_ad"));
  {
    py::module_ part = bind::add_part(m, "cpu");
    RLKERNEL_KERNELS(DEFINE_CPU)
    RLKERNEL_CPU_KERNELS(DEFINE_CPU)
  }
#ifdef RLKERNEL_BUILT_CUDA
  {
    py::module_ part = bind::add_part(m, "cuda");
    RLKERNEL_KERNELS(DEFINE_CUDA)
    m.def("cuda_versions", [] { return std::pair(cuda::runtime_version(), cuda::driver_version()); });
  }
#endif
#ifdef RLKERNEL_BUILT_HIP
  {
    py::module_ part = bind::add_part(m, "hip");
    RLKERNEL_KERNELS(DEFINE_HIP)
  }
#endif
}
