// The public call of plain tensors.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/layer_norm/bind.h"
#include "rlkernel/norm_direct.h"

namespace rlkernel::direct {

struct layer_norm {
  static constexpr int kPlaces = 3;
  static constexpr bool kTrains = true;
  Plain x;
  Maybe weight, bias;
  double eps = 1e-5;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const int64_t length = x.last();
    if (!are_rows(x) || !is_row(weight, length) || !is_row(bias, length) || !(eps >= 0 && eps < 1)) return {};
    Plain normed, mean, rstd;
    const py::object out = caller.empty(x.object, normed);
    const py::object means = caller.trains() ? of_rows(caller, x, mean) : py::none();
    const py::object scales = caller.trains() ? of_rows(caller, x, rstd) : py::none();
    const calls::layer_norm_forward call{x, {weight}, {bias}, eps, normed, {mean}, {rstd}};
    launched(x.elements(), [&] { return call.run(launch, nullptr); });
    if (!caller.trains()) return out;
    static PyObject* const asked = type_named("rlkernel.calls.layer_norm", "LayerNormCall");
    static PyObject* const answered = type_named("rlkernel.calls.layer_norm", "LayerNormResults");
    const py::object needs = needs_of(x, weight, bias);
    return caller.computed(
        made(asked, borrowed(x.object), borrowed(weight.object), borrowed(bias.object), py::float_(eps), py::bool_(true), needs),
        made(answered, out, means, scales));
  }
};

RLKERNEL_FIELDS(layer_norm, x, weight, bias, eps)

// torch's operation in its dispatcher, which may be over the last dimension alone.
struct layer_norm_of_rows {
  static constexpr int kPlaces = 6;
  static constexpr bool kWhole = true;
  Plain x;
  OneNumber shape;
  Maybe weight, bias;
  double eps = 1e-5;
  bool cudnn = true;  // says nothing on a CPU

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    return shape.number == x.last() ? layer_norm{x, weight, bias, eps}.run(caller, launch) : py::object();
  }
};

RLKERNEL_FIELDS(layer_norm_of_rows, x, shape, weight, bias, eps, cudnn)

// The backend's backward.
struct layer_norm_backward {
  static constexpr int kPlaces = 3;
  static constexpr bool kBelowAutograd = true;
  Record call, results;
  Plain grad;

  template <class Launch>
  py::object run(Caller& caller, Launch launch) const {
    Plain x, mean, rstd, grad_x;
    Maybe weight, bias;
    const Record needs{call[5]};
    if (!caller.take(call[0], x) || !caller.take(call[1], weight) || !caller.take(call[2], bias)) return {};
    if (!caller.take(results[1], mean) || !caller.take(results[2], rstd)) return {};
    if (!are_rows(x) || !are_rows(grad) || !grad.has_shape_of(x)) return {};
    const calls::NormRows rows(x);
    const py::object of_x = caller.empty(x.object, grad_x);
    Sums of_weight(caller, rows, weight, needs[1]), of_bias(caller, rows, bias, needs[2]);
    const LayerNormBackward b{rows.count, rows.length, x.dtype(), rows.of(x), rows.of(grad),
                              mean.dense<const float>(rows.count), rstd.dense<const float>(rows.count), rows.weights(weight),
                              rows.weight_dtype(weight), rows.weight_dtype(of_bias.total), rows.dense(grad_x),
                              of_weight.partials.get(), of_bias.partials.get(), of_weight.data(), of_bias.data()};
    launched(x.elements(), [&] { return launch(b, nullptr); });
    static PyObject* const answered = type_named("rlkernel.calls.layer_norm", "LayerNormGrads");
    return made(answered, of_x, of_weight.object, of_bias.object);
  }
};

RLKERNEL_FIELDS(layer_norm_backward, call, results, grad)

}  // namespace rlkernel::direct
