// The Python signature of the gae kernel: flat arguments in the order of the struct of gae.h.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/gae.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void gae(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address rewards, int64_t rewards_stride, Address values, int64_t values_stride, Address mask, int64_t mask_stride,
          Address offsets, int64_t rows, int64_t length, int64_t total, Address last_values, double gamma, double lam,
          Address lams, bool zero_holes, Address advantages, Address returns, Address stream) {
        const Gae arguments{pointer<const float>(rewards),
                            rewards_stride,
                            pointer<const float>(values),
                            values_stride,
                            pointer<const uint8_t>(mask),
                            mask_stride,
                            pointer<const int64_t>(offsets),
                            rows,
                            length,
                            total,
                            pointer<const float>(last_values),
                            gamma,
                            lam,
                            pointer<const double>(lams),
                            zero_holes,
                            pointer<float>(advantages),
                            pointer<float>(returns)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("rewards"), py::arg("rewards_stride"), py::arg("values"), py::arg("values_stride"), py::arg("mask"),
      py::arg("mask_stride"), py::arg("offsets"), py::arg("rows"), py::arg("length"), py::arg("total"),
      py::arg("last_values"), py::arg("gamma"), py::arg("lam"), py::arg("lams"), py::arg("zero_holes"),
      py::arg("advantages"), py::arg("returns"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
