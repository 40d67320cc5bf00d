// The public call of plain tensors, without a residual.
#pragma once
#include "rlkernel/direct.h"
#include "rlkernel/norm_direct.h"
#include "rlkernel/rms_norm/bind.h"

namespace rlkernel::direct {

struct rms_norm {
  static constexpr int kPlaces = 2;
  static constexpr bool kTrains = true;
  Plain x;
  Maybe weight;
  double eps = 1e-6;
  Absent residual;
  double weight_offset = 0;
  NormRounding rounding = NormRounding::before_weight;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!are_rows(x) || !is_row(weight, x.last()) || !(eps >= 0 && eps < 1) || !(weight_offset > -2 && weight_offset < 2)) return {};
    Plain normed, rstd;
    const py::object out = caller.empty(x.object, normed);
    const py::object scales = caller.trains() ? of_rows(caller, x, rstd) : py::none();
    const bool first = rounding == NormRounding::before_weight;
    const calls::rms_norm_forward call{x, {}, {}, {weight}, weight_offset, eps, first, normed, {rstd}};
    launched(x.elements(), [&] { return call.run(launch, nullptr); });
    if (!caller.trains()) return out;
    static PyObject* const asked = type_named("rlkernel.calls.rms_norm", "RmsNormCall");
    static PyObject* const answered = type_named("rlkernel.calls.rms_norm", "RmsNormResults");
    const py::object needs = needs_of(x, Plain{}, weight);
    const py::object rounded = borrowed(bind::names_in_python<NormRounding>()[static_cast<size_t>(rounding)]);
    return caller.computed(made(asked, borrowed(x.object), py::none(), borrowed(weight.object), py::float_(eps),
                                py::float_(weight_offset), rounded, py::bool_(true), needs),
                           made(answered, out, py::none(), scales));
  }
};

RLKERNEL_FIELDS(rms_norm, x, weight, eps, residual, weight_offset, rounding)

// torch's operation in its dispatcher: the bits of the operations that it makes of it inside batch_invariant.
struct rms_norm_in_order {
  static constexpr int kPlaces = 4;
  static constexpr bool kWhole = true;
  Plain x;
  OneNumber shape;
  Maybe weight;
  double eps = FLT_EPSILON;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!are_rows(x) || shape.number != x.last() || !is_row(weight, x.last()) || !(eps >= 0 && eps < 1)) return {};
    Plain normed;
    py::object out = caller.empty(x.object, normed);
    const calls::rms_norm_in_order call{x, {}, {}, {weight}, 0, eps, false, normed};
    launched(x.elements(), [&] { return call.run(launch, nullptr); });
    return out;
  }
};

RLKERNEL_FIELDS(rms_norm_in_order, x, shape, weight, eps)

// The backend's backward, of a call without a residual.
struct rms_norm_backward {
  static constexpr int kPlaces = 3;
  static constexpr bool kBelowAutograd = true;
  Record call, results, grads;

  template <class Launch>
  py::object run(Caller& caller, Launch launch) const {
    Plain x, rstd, grad, grad_x;
    Maybe weight;
    double offset;
    const Record needs{call[7]};
    if (call[1] != Py_None || results[1] != Py_None || grads[1] != Py_None) return {};
    if (!caller.take(call[0], x) || !caller.take(call[2], weight) || !caller.take(call[4], offset)) return {};
    if (!caller.take(results[2], rstd) || !caller.take(grads[0], grad)) return {};
    if (!are_rows(x) || !are_rows(grad) || !grad.has_shape_of(x)) return {};
    const calls::NormRows rows(x);
    const py::object of_x = caller.empty(x.object, grad_x);
    const Sums of_weight(caller, rows, weight, needs[2]);
    const RmsNormBackward b{rows.count, rows.length, x.dtype(), rows.of(x), rows.of(grad), {}, rstd.dense<const float>(rows.count),
                            rows.weights(weight), rows.weight_dtype(weight), static_cast<float>(offset), rows.dense(grad_x),
                            of_weight.partials.get(), of_weight.data()};
    launched(x.elements(), [&] { return launch(b, nullptr); });
    return py::make_tuple(of_x, of_weight.object ? of_weight.object : py::none());
  }
};

RLKERNEL_FIELDS(rms_norm_backward, call, results, grads)

}  // namespace rlkernel::direct
