// How rows come from Python: [..., length] of at most two strides between them.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel::calls {

using namespace bind;

// Rows as `x` has them; what a kernel reads beside x is of its shape and dtype.
struct StridedRowsOf {
  const Tensor& x;
  int64_t length, count;

  explicit StridedRowsOf(const Tensor& x) : x(x), length(x.last()), count(length ? x.elements() / length : 0) {
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

  // What is written.
  StridedRows into(const Tensor& t) const {
    const StridedRows found = of(t);
    if (t.given) t.want_apart();
    return found;
  }

  void* dense(const Tensor& t) const {
    if (!t.given) return nullptr;
    if (!t.has_type_of(x)) t.refuse("be of the dtype of x", t.type_text());
    return t.dense_floats(count * length);
  }
};

}  // namespace rlkernel::calls
