// The Python signature of the policy loss: pointers as ints (0 for null), and the rule as its choices and its numbers in
// the order of PolicyLossRule.
#pragma once
#include <pybind11/stl.h>

#include <array>

#include "rlkernel/bind.h"
#include "rlkernel/policy_loss.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void policy_loss(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address logprobs, Address old_logprobs, Address advantages, Address mask, Address ref_logprobs,
          Address rollout_logprobs, Address entropy, Address staleness, Address selected, Address token_counts,
          Address cu_seqlens, int64_t rows, int64_t length, bool advantage_per_token, bool staleness_per_token, Address grad_logprobs, Address grad_entropy,
          Address partials, Address values, const std::array<int, kChoices>& choices,
          const std::array<float, kNumbers>& numbers, Address stream) {
        const auto& c = choices;
        const auto& x = numbers;
        const PolicyLossRule rule{
            static_cast<Term>(c[0]), static_cast<Level>(c[1]), static_cast<Aggregation>(c[2]), static_cast<Kl>(c[3]),
            c[4] != 0, static_cast<KlWeight>(c[5]), static_cast<Divergence>(c[6]), static_cast<Correction>(c[7]),
            static_cast<Verdict>(c[8]), c[9] != 0, c[10] != 0, c[11] != 0, static_cast<Divergence>(c[12]), c[13] != 0,
            x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7], x[8], x[9], x[10], x[11], x[12], x[13], x[14], x[15], x[16],
            x[17], x[18], x[19], x[20], x[21], x[22], x[23], x[24], x[25], x[26], x[27], x[28], x[29], x[30], x[31],
            x[32], x[33], x[34], x[35], x[36], x[37], x[38], x[39]};
        const PolicyLoss arguments{pointer<const float>(logprobs), pointer<const float>(old_logprobs),
                                   pointer<const float>(advantages), pointer<const uint8_t>(mask),
                                   pointer<const float>(ref_logprobs), pointer<const float>(rollout_logprobs),
                                   pointer<const float>(entropy), pointer<const float>(staleness),
                                   pointer<const uint8_t>(selected), pointer<const float>(token_counts),
                                   pointer<const int64_t>(cu_seqlens), rows, length, advantage_per_token, staleness_per_token, pointer<float>(grad_logprobs),
                                   pointer<float>(grad_entropy), pointer<double>(partials), pointer<float>(values), rule};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("logprobs"), py::arg("old_logprobs"), py::arg("advantages"), py::arg("mask"), py::arg("ref_logprobs"),
      py::arg("rollout_logprobs"), py::arg("entropy"), py::arg("staleness"), py::arg("selected"),
      py::arg("token_counts"), py::arg("cu_seqlens"), py::arg("rows"), py::arg("length"),
      py::arg("advantage_per_token"), py::arg("staleness_per_token"), py::arg("grad_logprobs"), py::arg("grad_entropy"), py::arg("partials"),
      py::arg("values"), py::arg("choices"), py::arg("numbers"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void policy_select(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address logprobs, Address old_logprobs, Address advantages, Address mask, Address cu_seqlens, int64_t rows,
          int64_t length, bool advantage_per_token, bool by_hash, double share, float cov_low, float cov_high, float low,
          float high, uint32_t seed, Address selected, Address partials, Address counts, Address stream) {
        const PolicySelection arguments{pointer<const float>(logprobs), pointer<const float>(old_logprobs),
                                        pointer<const float>(advantages), pointer<const uint8_t>(mask),
                                        pointer<const int64_t>(cu_seqlens), rows, length, advantage_per_token, by_hash,
                                        share, cov_low, cov_high, low, high, seed, pointer<uint8_t>(selected),
                                        pointer<double>(partials), pointer<uint32_t>(counts)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("logprobs"), py::arg("old_logprobs"), py::arg("advantages"), py::arg("mask"), py::arg("cu_seqlens"),
      py::arg("rows"), py::arg("length"), py::arg("advantage_per_token"), py::arg("by_hash"), py::arg("share"),
      py::arg("cov_low"), py::arg("cov_high"), py::arg("low"), py::arg("high"), py::arg("seed"), py::arg("selected"),
      py::arg("partials"), py::arg("counts"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
