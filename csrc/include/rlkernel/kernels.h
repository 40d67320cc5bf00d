// Table of contents of the compiled part: one line per kernel, grouped by op. Each part has all of them, in its namespace, but
// for those of a CPU alone.
#pragma once
#include "rlkernel/attention/bind.h"
#include "rlkernel/divergence/bind.h"
#include "rlkernel/gae/bind.h"
#include "rlkernel/group_advantages/bind.h"
#include "rlkernel/kl_shaped_rewards/bind.h"
#include "rlkernel/layer_norm/bind.h"
#include "rlkernel/logprob/bind.h"
#include "rlkernel/matmul/bind.h"
#include "rlkernel/paged_prefix_attention/bind.h"
#include "rlkernel/policy_loss/bind.h"
#include "rlkernel/preference_loss/bind.h"
#include "rlkernel/prefix_shared_attention/bind.h"
#include "rlkernel/rms_norm/bind.h"
#include "rlkernel/rotary/bind.h"
#include "rlkernel/sampling/bind.h"
#include "rlkernel/swiglu/bind.h"
#include "rlkernel/value_loss/bind.h"
#include "rlkernel/whiten/bind.h"

#define RLKERNEL_KERNELS(KERNEL) \
  KERNEL(logprob_forward) \
  KERNEL(logprob_backward) \
  KERNEL(logprob_exp) \
  KERNEL(logprob_support_forward) \
  KERNEL(logprob_support_backward) \
  KERNEL(gae) \
  KERNEL(kl_shaped_rewards) \
  KERNEL(group_advantages) \
  KERNEL(value_loss_forward) \
  KERNEL(value_loss_backward) \
  KERNEL(whiten) \
  KERNEL(policy_loss) \
  KERNEL(policy_select) \
  KERNEL(preference_sums) \
  KERNEL(preference_loss) \
  KERNEL(preference_backward) \
  KERNEL(attention_merge) \
  KERNEL(segment_reduce) \
  KERNEL(gather_kv) \
  KERNEL(layer_norm_forward) \
  KERNEL(layer_norm_backward) \
  KERNEL(rms_norm_forward) \
  KERNEL(rms_norm_backward) \
  KERNEL(rotary) \
  KERNEL(swiglu_forward) \
  KERNEL(swiglu_backward) \
  KERNEL(sampling_statistics) \
  KERNEL(sampling_finish)

// Those of a CPU alone.
#define RLKERNEL_CPU_KERNELS(KERNEL) \
  KERNEL(attention_backward) \
  KERNEL(divergence_forward) \
  KERNEL(divergence_backward) \
  KERNEL(matmul) \
  KERNEL(paged_prefix_attention) \
  KERNEL(rms_norm_in_order) \
  KERNEL(softmax)

namespace rlkernel::bind {

// What Python needs to know to make the buffers that kernels ask for.
inline void describe_part(py::module_& part, const char* name) {
  part.attr("part") = name;
  part.attr("CHUNK") = kChunk;
  part.attr("MOMENTS") = sizeof(Moments) / sizeof(double);
  part.attr("VALUE_SUMS") = sizeof(ValueSums) / sizeof(double);
  part.attr("VALUE_METRICS") = kValueMetrics;
  part.attr("NORM_ROWS") = kNormRows;
  part.attr("POLICY_PARTIALS") = kPartials;
  part.attr("POLICY_VALUES") = kValues + 1;
  part.attr("SELECTION_SUMS") = kSelectionSums;
  part.attr("SELECTION_COUNTS") = kLevels * kBins;
  part.attr("SEQUENCE_SUMS") = static_cast<int>(kSequenceSums);
  part.attr("PREFERENCE_METRICS") = kPreferenceMetrics;
  part.attr("PAGED_TILE") = kPagedTile;
  part.attr("PAGED_CHUNK") = kPagedChunk;
  part.attr("PAGED_STATE") = kPagedState;
  part.attr("SAMPLING_SPLIT") = kSamplingSplit;
  part.attr("SAMPLING_GROUP") = kSamplingGroup;
  part.attr("SAMPLING_RECORD") = static_cast<int>(kRecord);
}

template <class... Enums>
py::dict enums(const std::pair<const char*, Enums>&... each) {
  py::dict found;
  const auto add = [&](const char* name, const std::vector<PyObject*>& names) {
    py::tuple all(names.size());
    for (size_t i = 0; i < names.size(); ++i) all[i] = py::reinterpret_borrow<py::object>(names[i]);
    found[name] = all;
  };
  (add(each.first, names_in_python<Enums>()), ...);
  return found;
}

#define RLKERNEL_NAMED(Enum) std::pair(#Enum, Enum{})

// Each enum that Python has too, with its names in order.
inline py::dict enums() {
  return enums(RLKERNEL_NAMED(Term), RLKERNEL_NAMED(Level), RLKERNEL_NAMED(Aggregation), RLKERNEL_NAMED(Kl),
               RLKERNEL_NAMED(KlWeight), RLKERNEL_NAMED(Divergence), RLKERNEL_NAMED(Correction), RLKERNEL_NAMED(Verdict),
               RLKERNEL_NAMED(PreferenceTerm), RLKERNEL_NAMED(PreferenceDivergence), RLKERNEL_NAMED(FilterOrder),
               RLKERNEL_NAMED(PagedItem), RLKERNEL_NAMED(PagedLaunch), RLKERNEL_NAMED(Activation),
               RLKERNEL_NAMED(NormRounding), RLKERNEL_NAMED(ProductRounding));
}

inline py::module_ add_part(py::module_& m, const char* name) {
  py::module_ part = m.def_submodule(name);
  describe_part(part, name);
  return part;
}

}  // namespace rlkernel::bind
