// The public call of plain tensors, without a residual.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/rms_norm/bind.h"

namespace rlkernel::direct {

struct rms_norm {
  static constexpr int kPlaces = 2;
  Plain x;
  Maybe weight;
  double eps = 1e-6;
  Absent residual;
  double weight_offset = 0;
  NormRounding rounding = NormRounding::before_weight;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!are_rows(x) || !is_row(weight, x.last()) || !(eps >= 0 && eps < 1) || !(weight_offset > -2 && weight_offset < 2)) return {};
    Plain normed;
    py::object made = caller.empty(x.object, normed);
    const bool first = rounding == NormRounding::before_weight;
    const calls::rms_norm_forward call{x, {}, {}, {weight}, weight_offset, eps, first, normed, {}};
    launched(x.elements(), [&] { return call.run(launch, nullptr); });
    return made;
  }
};

RLKERNEL_FIELDS(rms_norm, x, weight, eps, residual, weight_offset, rounding)

}  // namespace rlkernel::direct
