// The Python signature of the whitening kernels: flat arguments in the order of the struct of whiten.h.
#pragma once
#include "rlkernel/bind.h"
#include "rlkernel/whiten.h"

namespace rlkernel::bind {

template <class Launch, class Describe>
void whiten(py::module_& m, const char* name, Launch launch, Describe describe) {
  m.def(
      name,
      [=](Address x, bool wide, Address mask, Address weights, int64_t n, Address states, int64_t state_count, bool update,
          bool identity, bool shift_mean, bool unbiased, bool eps_in_std, double eps, double clip, Address partials,
          Address out, Address state, Address stream) {
        const Whiten arguments{pointer<const void>(x),
                               wide,
                               pointer<const uint8_t>(mask),
                               pointer<const float>(weights),
                               n,
                               pointer<const Moments>(states),
                               state_count,
                               update,
                               identity,
                               shift_mean,
                               unbiased,
                               eps_in_std,
                               eps,
                               clip,
                               pointer<Moments>(partials),
                               pointer<float>(out),
                               pointer<Moments>(state)};
        check(name, launch(arguments, pointer<void>(stream)), describe);
      },
      py::arg("x"), py::arg("wide"), py::arg("mask"), py::arg("weights"), py::arg("n"), py::arg("states"),
      py::arg("state_count"), py::arg("update"), py::arg("identity"), py::arg("shift_mean"), py::arg("unbiased"),
      py::arg("eps_in_std"), py::arg("eps"), py::arg("clip"), py::arg("partials"), py::arg("out"), py::arg("state"),
      py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

}  // namespace rlkernel::bind
