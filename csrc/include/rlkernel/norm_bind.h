// How the rows of a norm come from Python: [..., length] of at most two strides between rows.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/norm_rows.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel::calls {

using namespace bind;

// Rows as `x` has them; what a kernel reads beside x is of its shape and dtype.
struct NormRows {
  const Tensor& x;
  int64_t length, count;

  explicit NormRows(const Tensor& x) : x(x), length(x.last()), count(length ? x.elements() / length : 0) {
    if (x.rank() == 0) x.want_rank(1);
  }

  StridedRows of(const Tensor& t) const {
    if (!t.given) return {};
    if (t.elements() != x.elements() || t.last() != length) t.refuse_shape_of(x);  // dimensions in front may be one
    if (!t.has_type_of(x)) t.refuse("be of the dtype of x", t.type_text());
    if (t.is_dense()) return {t.data(), count, 0, length};
    t.want_unit_stride();
    // dimensions that continue each other are one
    int64_t size[2] = {1, 1}, stride[2] = {0, 0};
    int found = 0;
    for (int d = t.rank() - 2; d >= 0; --d) {
      if (t.size(d) == 1) continue;
      if (found > 0 && t.stride(d) == size[found - 1] * stride[found - 1]) {
        size[found - 1] *= t.size(d);
        continue;
      }
      if (found == 2) t.refuse("have at most two strides between rows", "more");
      size[found] = t.size(d), stride[found] = t.stride(d);
      ++found;
    }
    return {t.data(), size[0], stride[1], stride[0]};
  }

  void* dense(const Tensor& t) const {
    if (!t.given) return nullptr;
    if (!t.has_type_of(x)) t.refuse("be of the dtype of x", t.type_text());
    return t.dense_floats(count * length);
  }

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
