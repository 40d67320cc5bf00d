// The Python signatures of the logprob kernels: flat arguments in the order of the structs of logprob.h, a pointer being an
// int (0 for null). The extension and the host emulation bind the same names and arguments.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/logprob.h"

namespace rlkernel::bind {

// `tile_arguments` names the parameters that every function starts with, so that both lists stand side by side.
#define RLKERNEL_TILE_PARAMETERS                                                                                           \
  Address logits, int dtype, int64_t rows, int64_t inner, int64_t outer_stride, int64_t inner_stride, int64_t vocab,       \
      int64_t vocab_start, Address target_ids, int64_t ignore_index, Address temperatures, float temperature, Address bias, \
      float logit_scale, float softcap
#define RLKERNEL_TILE_NAMES                                                                                             \
  py::arg("logits"), py::arg("dtype"), py::arg("rows"), py::arg("inner"), py::arg("outer_stride"), py::arg("inner_stride"), \
      py::arg("vocab"), py::arg("vocab_start"), py::arg("target_ids"), py::arg("ignore_index"), py::arg("temperatures"),    \
      py::arg("temperature"), py::arg("bias"), py::arg("logit_scale"), py::arg("softcap")
#define RLKERNEL_TILE                                                                                              \
  LogprobTile {                                                                                                    \
    pointer<const void>(logits), static_cast<Dtype>(dtype), rows, inner, outer_stride, inner_stride, vocab, vocab_start, \
        pointer<const int64_t>(target_ids), ignore_index, pointer<const float>(temperatures), temperature,               \
        pointer<const float>(bias), logit_scale, softcap                                                                 \
  }

template <class Launch, class Describe>
void logprob_forward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_TILE_PARAMETERS, Address state_max, Address state_sum, Address state_weighted, Address state_target,
          bool first, bool last, Address logprobs, Address entropy, Address lse, Address row_max, Address log_sum,
          Address stream) {
        const LogprobForward arguments{RLKERNEL_TILE,
                                       pointer<float>(state_max),
                                       pointer<float>(state_sum),
                                       pointer<float>(state_weighted),
                                       pointer<float>(state_target),
                                       first,
                                       last,
                                       pointer<float>(logprobs),
                                       pointer<float>(entropy),
                                       pointer<float>(lse),
                                       pointer<float>(row_max),
                                       pointer<float>(log_sum)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      RLKERNEL_TILE_NAMES, py::arg("state_max"), py::arg("state_sum"), py::arg("state_weighted"), py::arg("state_target"),
      py::arg("first"), py::arg("last"), py::arg("logprobs"), py::arg("entropy"), py::arg("lse"), py::arg("row_max"),
      py::arg("log_sum"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void logprob_backward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_TILE_PARAMETERS, Address grad_logprobs, Address grad_entropy, Address grad_lse, Address entropy,
          Address row_max, Address log_sum, Address out, int out_dtype, int64_t out_outer_stride, int64_t out_inner_stride,
          Address stream) {
        const LogprobBackward arguments{RLKERNEL_TILE,
                                        pointer<const float>(grad_logprobs),
                                        pointer<const float>(grad_entropy),
                                        pointer<const float>(grad_lse),
                                        pointer<const float>(entropy),
                                        pointer<const float>(row_max),
                                        pointer<const float>(log_sum),
                                        pointer<void>(out),
                                        static_cast<Dtype>(out_dtype),
                                        out_outer_stride,
                                        out_inner_stride};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      RLKERNEL_TILE_NAMES, py::arg("grad_logprobs"), py::arg("grad_entropy"), py::arg("grad_lse"), py::arg("entropy"),
      py::arg("row_max"), py::arg("log_sum"), py::arg("out"), py::arg("out_dtype"), py::arg("out_outer_stride"),
      py::arg("out_inner_stride"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void logprob_exp(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_TILE_PARAMETERS, Address row_max, Address out, int out_dtype, int64_t out_outer_stride,
          int64_t out_inner_stride, Address stream) {
        const LogprobExp arguments{RLKERNEL_TILE,    pointer<const float>(row_max), pointer<void>(out),
                                   static_cast<Dtype>(out_dtype), out_outer_stride, out_inner_stride};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      RLKERNEL_TILE_NAMES, py::arg("row_max"), py::arg("out"), py::arg("out_dtype"), py::arg("out_outer_stride"),
      py::arg("out_inner_stride"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

#undef RLKERNEL_TILE
#undef RLKERNEL_TILE_NAMES
#undef RLKERNEL_TILE_PARAMETERS

}  // namespace rlkernel::bind
