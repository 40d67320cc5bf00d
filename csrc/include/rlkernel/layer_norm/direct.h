// The public call of plain tensors.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/layer_norm/bind.h"

namespace rlkernel::direct {

struct layer_norm {
  static constexpr int kPlaces = 3;
  Plain x;
  Maybe weight, bias;
  double eps = 1e-5;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const int64_t length = x.last();
    if (!are_rows(x) || !is_row(weight, length) || !is_row(bias, length) || !(eps >= 0 && eps < 1)) return {};
    Plain normed;
    py::object made = caller.empty(x.object, normed);
    const calls::layer_norm_forward call{x, {weight}, {bias}, eps, normed, {}, {}};
    launched(x.elements(), [&] { return call.run(launch, nullptr); });
    return made;
  }
};

RLKERNEL_FIELDS(layer_norm, x, weight, bias, eps)

}  // namespace rlkernel::direct
