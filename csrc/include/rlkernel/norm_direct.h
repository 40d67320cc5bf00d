// What the short ways of the norms share.
#pragma once
#include <memory>

#include "rlkernel/direct.h"
#include "rlkernel/norm_bind.h"

namespace rlkernel::direct {

// The gradient of a weight or a bias, where it is wanted: a sum over the rows, and the parts that it is made of.
struct Sums {
  py::object object;
  Plain total;
  std::unique_ptr<float[]> partials;

  Sums(const Caller& caller, const calls::NormRows& rows, const Maybe& parameter, PyObject* wanted) {
    if (!parameter.given || wanted != Py_True) return;
    object = caller.empty(parameter.object, total);
    partials.reset(new float[norm_chunks(rows.count) * rows.length]);
  }

  void* data() const { return total.given ? total.data() : nullptr; }
};

}  // namespace rlkernel::direct
