// The Python signatures of the sampling kernels: flat arguments in the order of the structs of sampling.h, a pointer being an
// int (0 for null). The extension and the host emulation bind the same names and arguments.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/sampling.h"

namespace rlkernel::bind {

// What both functions start with, so that both lists and the struct stand side by side.
#define RLKERNEL_SAMPLING_PARAMETERS                                                                                     \
  Address logits, int dtype, int64_t rows, int64_t row_stride, int64_t vocab, int64_t vocab_start, int64_t whole_vocab,  \
      Address adjusted, int64_t adjusted_stride, Address bitmask, int64_t bitmask_stride, Address temperatures,          \
      float temperature, Address top_ks, int64_t top_k, Address top_ps, float top_p, Address min_ps, float min_p,        \
      Address top_n_sigmas, float top_n_sigma, Address thresholds, Address band, Address seeds, Address positions,       \
      Address forced_ids, Address skip, int order, bool gumbel, bool raw, bool entropy, bool sigma, Address records,     \
      Address group_max
#define RLKERNEL_SAMPLING_NAMES                                                                                          \
  py::arg("logits"), py::arg("dtype"), py::arg("rows"), py::arg("row_stride"), py::arg("vocab"), py::arg("vocab_start"), \
      py::arg("whole_vocab"), py::arg("adjusted"), py::arg("adjusted_stride"), py::arg("bitmask"),                       \
      py::arg("bitmask_stride"), py::arg("temperatures"), py::arg("temperature"), py::arg("top_ks"), py::arg("top_k"),   \
      py::arg("top_ps"), py::arg("top_p"), py::arg("min_ps"), py::arg("min_p"), py::arg("top_n_sigmas"),                 \
      py::arg("top_n_sigma"), py::arg("thresholds"), py::arg("band"), py::arg("seeds"), py::arg("positions"),            \
      py::arg("forced_ids"), py::arg("skip"), py::arg("order"), py::arg("gumbel"), py::arg("raw"),                       \
      py::arg("entropy"), py::arg("sigma"), py::arg("records"), py::arg("group_max")
#define RLKERNEL_SAMPLING                                                                                                \
  SamplingInputs {                                                                                                       \
    pointer<const void>(logits), static_cast<Dtype>(dtype), rows, row_stride, vocab, vocab_start, whole_vocab,           \
        pointer<const float>(adjusted), adjusted_stride, pointer<const int32_t>(bitmask), bitmask_stride,                \
        {pointer<const float>(temperatures), temperature}, {pointer<const int64_t>(top_ks), top_k},                      \
        {pointer<const float>(top_ps), top_p}, {pointer<const float>(min_ps), min_p},                                    \
        {pointer<const float>(top_n_sigmas), top_n_sigma}, pointer<const float>(thresholds),                             \
        pointer<const float>(band), pointer<const int64_t>(seeds), pointer<const int64_t>(positions),                    \
        pointer<const int64_t>(forced_ids), pointer<const uint8_t>(skip), static_cast<FilterOrder>(order), gumbel, raw,  \
        entropy, sigma, pointer<double>(records), pointer<float>(group_max)                                              \
  }

template <class Launch, class Describe>
void sampling_statistics(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_SAMPLING_PARAMETERS, Address stream) {
        check(name, launch(RLKERNEL_SAMPLING, pointer<void>(stream)), describe);
      },
      RLKERNEL_SAMPLING_NAMES, py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

template <class Launch, class Describe>
void sampling_finish(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](RLKERNEL_SAMPLING_PARAMETERS, Address token_ids, Address raw_logprobs, Address tempered_logprobs,
          Address processed_logprobs, Address kept_mass, Address kept_count, Address entropies, Address rank,
          Address support, int64_t support_size, Address valid, Address row_max, Address log_sum, Address scratch,
          int64_t scratch_size, Address stream) {
        const SamplingOutputs outputs{pointer<int64_t>(token_ids),
                                      pointer<float>(raw_logprobs),
                                      pointer<float>(tempered_logprobs),
                                      pointer<float>(processed_logprobs),
                                      pointer<float>(kept_mass),
                                      pointer<int64_t>(kept_count),
                                      pointer<float>(entropies),
                                      pointer<int64_t>(rank),
                                      pointer<int32_t>(support),
                                      support_size,
                                      pointer<bool>(valid),
                                      pointer<float>(row_max),
                                      pointer<float>(log_sum),
                                      pointer<void>(scratch),
                                      scratch_size};
        check(name, launch(RLKERNEL_SAMPLING, outputs, pointer<void>(stream)), describe);
      },
      RLKERNEL_SAMPLING_NAMES, py::arg("token_ids"), py::arg("raw_logprobs"), py::arg("tempered_logprobs"),
      py::arg("processed_logprobs"), py::arg("kept_mass"), py::arg("kept_count"), py::arg("entropies"), py::arg("rank"),
      py::arg("support"), py::arg("support_size"), py::arg("valid"), py::arg("row_max"), py::arg("log_sum"),
      py::arg("scratch"), py::arg("scratch_size"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

#undef RLKERNEL_SAMPLING
#undef RLKERNEL_SAMPLING_NAMES
#undef RLKERNEL_SAMPLING_PARAMETERS

}  // namespace rlkernel::bind
