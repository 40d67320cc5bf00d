// The public call of plain tensors.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/swiglu/bind.h"

namespace rlkernel::direct {

struct swiglu {
  static constexpr int kPlaces = 2;
  Plain gate;
  Maybe up;
  Activation activation = Activation::silu;
  ProductRounding rounding = ProductRounding::before_product;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!up.given || !are_rows(gate) || !are_rows(up) || !up.has_shape_of(gate) || !up.has_type_of(gate)) return {};
    Plain product;
    py::object made = caller.empty(gate.object, product);
    const bool first = rounding == ProductRounding::before_product;
    const calls::swiglu_forward call{gate, {up}, activation, first, product};
    launched(gate.elements(), [&] { return call.run(launch, nullptr); });
    return made;
  }
};

RLKERNEL_FIELDS(swiglu, gate, up, activation, rounding)

}  // namespace rlkernel::direct
