// How the rows of a norm come from Python, with what is one for all rows.
#pragma once
#include "rlkernel/norm_rows.h"
#include "rlkernel/rows_bind.h"

namespace rlkernel::calls {

struct NormRows : StridedRowsOf {
  using StridedRowsOf::StridedRowsOf;

  const void* weights(const Tensor& weight) const { return weight.dense_floats(length); }
  Dtype weight_dtype(const Tensor& weight) const { return weight.given ? weight.dtype() : Dtype::f32; }

  void* grad_weights(const Tensor& grad, const Tensor& weight) const {
    if (grad.given && !(weight.given && grad.has_type_of(weight))) grad.refuse("be of the dtype of weight", grad.type_text());
    return grad.dense_floats(length);
  }

  // Of a sum over the rows.
  float* partials(const Tensor& partials, const Tensor& grad) const {
    if (partials.given != grad.given) partials.refuse("be given where its gradient is", partials.given ? "a tensor" : "None");
    return partials.dense<float>(norm_chunks(count) * length);
  }
};

}  // namespace rlkernel::calls
