// The Python signature of the KL-shaped rewards: flat arguments in the order of the struct of kl_shaped_rewards.h.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/kl_shaped_rewards.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void kl_shaped_rewards(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address rewards, Address logprobs, Address ref_logprobs, bool per_sequence, Address mask, int64_t rewards_stride,
          int64_t logprobs_stride, int64_t ref_stride, int64_t mask_stride, int64_t rows, int64_t length, Address cu_seqlens,
          int offset_bytes, float beta, int estimator, Address out, Address stream) {
        const KlShapedRewards arguments{pointer<const float>(rewards),
                                        pointer<const float>(logprobs),
                                        pointer<const float>(ref_logprobs),
                                        per_sequence,
                                        pointer<const uint8_t>(mask),
                                        rewards_stride,
                                        logprobs_stride,
                                        ref_stride,
                                        mask_stride,
                                        {rows, length, pointer<const void>(cu_seqlens), offset_bytes},
                                        beta,
                                        static_cast<KlEstimator>(estimator),
                                        pointer<float>(out)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("rewards"), py::arg("logprobs"), py::arg("ref_logprobs"), py::arg("per_sequence"), py::arg("mask"),
      py::arg("rewards_stride"), py::arg("logprobs_stride"), py::arg("ref_stride"), py::arg("mask_stride"), py::arg("rows"),
      py::arg("length"), py::arg("cu_seqlens"), py::arg("offset_bytes"), py::arg("beta"), py::arg("estimator"),
      py::arg("out"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
