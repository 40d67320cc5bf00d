// The Python signatures of the preference losses: pointers as ints (0 for null), and the rule as its integers (paired,
// per_token, divergence, weighting, then the terms), its numbers in the order of PreferenceRule, and what the terms have.
#pragma once
#include <pybind11/stl.h>

#include <array>
#include <vector>

#include "rlkernel/bind.h"
#include "rlkernel/preference_loss.h"

namespace rlkernel::bind {

inline PreferenceRule preference_rule(const std::vector<int>& choices, const std::array<double, 11>& x,
                                      const std::vector<double>& weights, const std::vector<double>& smoothing) {
  if (choices.size() < 5 || choices.size() > 4 + kMaxTerms || weights.size() != choices.size() - 4 ||
      smoothing.size() != weights.size())
    throw std::invalid_argument("a preference rule has 1 to 16 terms, each with a weight and a smoothing");
  PreferenceRule rule{static_cast<int>(weights.size()), {}, {}, {}, choices[0] != 0, choices[1] != 0,
                      static_cast<PreferenceDivergence>(choices[2]), choices[3] != 0, x[0], x[1], x[2], x[3], x[4], x[5], x[6],
                      x[7], x[8], x[9], x[10]};
  for (size_t i = 0; i < weights.size(); ++i) {
    rule.terms[i] = static_cast<PreferenceTerm>(choices[4 + i]);
    rule.weights[i] = weights[i];
    rule.smoothing[i] = smoothing[i];
  }
  return rule;
}

template <class Launch, class Describe>
void preference_sums(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address logprobs, Address ref_logprobs, bool ref_per_token, Address mask, Address nll_mask,
          Address log_sum_sq_probs, Address cu_seqlens, int64_t rows, int64_t length, bool paired, double ld_alpha,
          Address stats, Address stream) {
        const PreferenceSums arguments{pointer<const float>(logprobs), pointer<const float>(ref_logprobs), ref_per_token,
                                       pointer<const uint8_t>(mask), pointer<const uint8_t>(nll_mask),
                                       pointer<const float>(log_sum_sq_probs), pointer<const int64_t>(cu_seqlens), rows,
                                       length, paired, ld_alpha, pointer<double>(stats)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("logprobs"), py::arg("ref_logprobs"), py::arg("ref_per_token"), py::arg("mask"), py::arg("nll_mask"),
      py::arg("log_sum_sq_probs"), py::arg("cu_seqlens"), py::arg("rows"), py::arg("length"), py::arg("paired"),
      py::arg("ld_alpha"), py::arg("stats"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void preference_loss(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address stats, int64_t rows, Address labels, Address kl, bool kl_per_row, Address order, Address items,
          Address nll_items, Address running_delta, Address loss, Address metrics, Address slopes, Address rewards,
          Address logps, Address new_delta, const std::vector<int>& choices, const std::array<double, 11>& numbers,
          const std::vector<double>& weights, const std::vector<double>& smoothing, Address stream) {
        const PreferenceLoss arguments{pointer<const double>(stats), rows, pointer<const uint8_t>(labels),
                                       pointer<const float>(kl), kl_per_row, pointer<const int64_t>(order),
                                       pointer<const double>(items), pointer<const double>(nll_items),
                                       pointer<const float>(running_delta), pointer<float>(loss), pointer<float>(metrics),
                                       pointer<double>(slopes), pointer<float>(rewards), pointer<float>(logps),
                                       pointer<float>(new_delta), preference_rule(choices, numbers, weights, smoothing)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("stats"), py::arg("rows"), py::arg("labels"), py::arg("kl"), py::arg("kl_per_row"), py::arg("order"),
      py::arg("items"), py::arg("nll_items"), py::arg("running_delta"), py::arg("loss"), py::arg("metrics"),
      py::arg("slopes"), py::arg("rewards"), py::arg("logps"), py::arg("new_delta"), py::arg("choices"),
      py::arg("numbers"), py::arg("weights"), py::arg("smoothing"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void preference_backward(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address grad_loss, Address slopes, Address stats, Address mask, Address nll_mask, Address labels,
          Address cu_seqlens, int64_t rows, int64_t length, double ld_alpha, Address grad, Address stream) {
        const PreferenceBackward arguments{pointer<const float>(grad_loss), pointer<const double>(slopes),
                                           pointer<const double>(stats), pointer<const uint8_t>(mask),
                                           pointer<const uint8_t>(nll_mask), pointer<const uint8_t>(labels),
                                           pointer<const int64_t>(cu_seqlens), rows, length, ld_alpha,
                                           pointer<float>(grad)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("grad_loss"), py::arg("slopes"), py::arg("stats"), py::arg("mask"), py::arg("nll_mask"), py::arg("labels"),
      py::arg("cu_seqlens"), py::arg("rows"), py::arg("length"), py::arg("ld_alpha"), py::arg("grad"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
