// The public call of plain tensors.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/swiglu/bind.h"

namespace rlkernel::direct {

struct swiglu {
  static constexpr int kPlaces = 2;
  static constexpr bool kTrains = true;
  Plain gate;
  Maybe up;
  Activation activation = Activation::silu;
  ProductRounding rounding = ProductRounding::before_product;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!up.given || !are_rows(gate) || !are_rows(up) || !up.has_shape_of(gate) || !up.has_type_of(gate)) return {};
    Plain product;
    const py::object out = caller.empty(gate.object, product);
    const bool first = rounding == ProductRounding::before_product;
    const calls::swiglu_forward call{gate, {up}, activation, first, product};
    launched(gate.elements(), [&] { return call.run(launch, nullptr); });
    if (!caller.trains()) return out;
    static PyObject* const asked = type_named("rlkernel.calls.swiglu", "SwigluCall");
    static PyObject* const answered = type_named("rlkernel.calls.swiglu", "SwigluResults");
    const py::object activated = borrowed(bind::names_in_python<Activation>()[static_cast<size_t>(activation)]);
    const py::object rounded = borrowed(bind::names_in_python<ProductRounding>()[static_cast<size_t>(rounding)]);
    return caller.computed(
        made(asked, borrowed(gate.object), borrowed(up.object), activated, rounded, py::bool_(false), needs_of(gate, up)),
        made(answered, out));
  }
};

RLKERNEL_FIELDS(swiglu, gate, up, activation, rounding)

// The backend's backward, of two tensors.
struct swiglu_backward {
  static constexpr int kPlaces = 2;
  static constexpr bool kBelowAutograd = true;
  Record call;
  Plain grad;

  template <class Launch>
  py::object run(Caller& caller, Launch launch) const {
    Plain gate, up, grad_gate, grad_up;
    Activation activation;
    ProductRounding rounding;
    const Record needs{call[5]};
    if (call[4] != Py_False || !caller.take(call[0], gate) || call[1] == Py_None || !caller.take(call[1], up)) return {};
    if (!caller.take(call[2], activation) || !caller.take(call[3], rounding)) return {};
    if (!are_rows(gate) || !are_rows(up) || !are_rows(grad) || !grad.has_shape_of(gate)) return {};
    const py::object of_gate = needs[0] == Py_True ? caller.empty(gate.object, grad_gate) : py::none();
    const py::object of_up = needs[1] == Py_True ? caller.empty(up.object, grad_up) : py::none();
    const bool first = rounding == ProductRounding::before_product;
    const calls::swiglu_backward b{gate, {up}, grad, activation, first, {grad_gate}, {grad_up}};
    launched(gate.elements(), [&] { return b.run(launch, nullptr); });
    static PyObject* const answered = type_named("rlkernel.calls.swiglu", "SwigluGrads");
    return made(answered, of_gate, of_up);
  }
};

RLKERNEL_FIELDS(swiglu_backward, call, grad)

// torch's activations, in its dispatcher: without a product behind them.
template <class Launch>
py::object activated(const Caller& caller, const Plain& x, Activation activation, Launch launch) {
  if (!are_rows(x)) return {};
  Plain out;
  py::object made = caller.empty(x.object, out);
  const calls::swiglu_forward call{x, {}, activation, true, out};
  launched(x.elements(), [&] { return call.run(launch, nullptr); });
  return made;
}

struct silu {
  static constexpr int kPlaces = 1;
  Plain x;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const { return activated(caller, x, Activation::silu, launch); }
};

RLKERNEL_FIELDS(silu, x)

enum class Approximate { none, tanh };
inline const char* names_of(Approximate) { return "none, tanh"; }

struct gelu {
  static constexpr int kPlaces = 1;
  Plain x;
  Approximate approximate = Approximate::none;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    return activated(caller, x, approximate == Approximate::tanh ? Activation::gelu_tanh : Activation::gelu, launch);
  }
};

RLKERNEL_FIELDS(gelu, x, approximate)

}  // namespace rlkernel::direct
