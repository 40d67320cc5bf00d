// The Python signatures of the kernels of logprob over supports: flat arguments in the order of the structs of
// logprob_support.h, a pointer being an int (0 for null).
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/logprob_support.h"

namespace rlkernel::bind {

#define RLKERNEL_SUPPORT_PARAMETERS                                                                                  \
  int64_t rows, int64_t vocab, Address target_ids, int64_t ignore_index, Address temperatures, float temperature,    \
      Address ids, Address offsets
#define RLKERNEL_SUPPORT_NAMES                                                                                       \
  py::arg("rows"), py::arg("vocab"), py::arg("target_ids"), py::arg("ignore_index"), py::arg("temperatures"),        \
      py::arg("temperature"), py::arg("ids"), py::arg("offsets")
#define RLKERNEL_SUPPORT                                                                                             \
  LogprobSupport {                                                                                                   \
    rows, vocab, pointer<const int64_t>(target_ids), ignore_index, pointer<const float>(temperatures), temperature,  \
        pointer<const int32_t>(ids), pointer<const int64_t>(offsets)                                                 \
  }

template <class Launch, class Describe>
void logprob_support_forward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_SUPPORT_PARAMETERS, Address logits, int dtype, int64_t inner, int64_t outer_stride, int64_t inner_stride,
          Address values, Address logprobs, Address entropy, Address lse, Address row_max, Address log_sum, Address stream) {
        const LogprobSupportForward arguments{RLKERNEL_SUPPORT,
                                              pointer<const void>(logits),
                                              static_cast<Dtype>(dtype),
                                              inner,
                                              outer_stride,
                                              inner_stride,
                                              pointer<void>(values),
                                              pointer<float>(logprobs),
                                              pointer<float>(entropy),
                                              pointer<float>(lse),
                                              pointer<float>(row_max),
                                              pointer<float>(log_sum)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      RLKERNEL_SUPPORT_NAMES, py::arg("logits"), py::arg("dtype"), py::arg("inner"), py::arg("outer_stride"),
      py::arg("inner_stride"), py::arg("values"), py::arg("logprobs"), py::arg("entropy"), py::arg("lse"),
      py::arg("row_max"), py::arg("log_sum"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void logprob_support_backward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_SUPPORT_PARAMETERS, Address values, int dtype, Address grad_logprobs, Address grad_entropy,
          Address grad_lse, Address logprobs, Address entropy, Address row_max, Address log_sum, Address out, int out_dtype,
          bool scattered, int64_t inner, int64_t out_outer_stride, int64_t out_inner_stride, Address stream) {
        const LogprobSupportBackward arguments{RLKERNEL_SUPPORT,
                                               pointer<const void>(values),
                                               static_cast<Dtype>(dtype),
                                               pointer<const float>(grad_logprobs),
                                               pointer<const float>(grad_entropy),
                                               pointer<const float>(grad_lse),
                                               pointer<const float>(logprobs),
                                               pointer<const float>(entropy),
                                               pointer<const float>(row_max),
                                               pointer<const float>(log_sum),
                                               pointer<void>(out),
                                               static_cast<Dtype>(out_dtype),
                                               scattered,
                                               inner,
                                               out_outer_stride,
                                               out_inner_stride};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      RLKERNEL_SUPPORT_NAMES, py::arg("values"), py::arg("dtype"), py::arg("grad_logprobs"), py::arg("grad_entropy"),
      py::arg("grad_lse"), py::arg("logprobs"), py::arg("entropy"), py::arg("row_max"), py::arg("log_sum"), py::arg("out"),
      py::arg("out_dtype"), py::arg("scattered"), py::arg("inner"), py::arg("out_outer_stride"), py::arg("out_inner_stride"),
      py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

#undef RLKERNEL_SUPPORT
#undef RLKERNEL_SUPPORT_NAMES
#undef RLKERNEL_SUPPORT_PARAMETERS

}  // namespace rlkernel::bind
