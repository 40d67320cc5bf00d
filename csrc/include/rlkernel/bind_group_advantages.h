// The Python signature of the group advantages: flat arguments in the order of the struct of group_advantages.h.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/group_advantages.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void group_advantages(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address rewards, Address mask, int64_t n, int columns, Address reward_weights, Address baselines, Address lengths,
          Address ids, Address order, Address ends, Address offsets, int64_t groups, int64_t size, int estimator, int scale, bool unbiased,
          bool reward_singletons, double eps, Address batch, Address out, Address wide, Address counts, Address stream) {
        const GroupAdvantages arguments{pointer<const float>(rewards),
                                        pointer<const uint8_t>(mask),
                                        n,
                                        columns,
                                        pointer<const float>(reward_weights),
                                        pointer<const float>(baselines),
                                        pointer<const float>(lengths),
                                        pointer<const int64_t>(ids),
                                        pointer<const int64_t>(order),
                                        pointer<const int64_t>(ends),
                                        pointer<const int64_t>(offsets),
                                        groups,
                                        size,
                                        static_cast<Estimator>(estimator),
                                        static_cast<RewardScale>(scale),
                                        unbiased,
                                        reward_singletons,
                                        eps,
                                        pointer<Moments>(batch),
                                        pointer<float>(out),
                                        pointer<double>(wide),
                                        pointer<uint8_t>(counts)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("rewards"), py::arg("mask"), py::arg("n"), py::arg("columns"), py::arg("reward_weights"), py::arg("baselines"),
      py::arg("lengths"), py::arg("ids"), py::arg("order"), py::arg("ends"), py::arg("offsets"), py::arg("groups"), py::arg("size"),
      py::arg("estimator"), py::arg("scale"), py::arg("unbiased"), py::arg("reward_singletons"), py::arg("eps"),
      py::arg("batch"), py::arg("out"), py::arg("wide"), py::arg("counts"), py::arg("stream"),
      py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
