// How a batch of sequences comes from Python: [rows, length] with any stride between rows, or [total] with cu_seqlens.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/sequences.h"

namespace rlkernel::calls {

using namespace bind;

struct Batch {
  const Optional& cu_seqlens;
  int64_t rows, length, total;

  Batch(const Tensor& tokens, const Optional& cu_seqlens) : cu_seqlens(cu_seqlens), total(tokens.elements()) {
    tokens.want_rank(cu_seqlens.given ? 1 : 2);
    rows = cu_seqlens.given ? cu_seqlens.intervals() : tokens.size(0);
    length = tokens.last();
  }

  const int64_t* offsets() const { return cu_seqlens.dense<const int64_t>(rows + 1); }

  Sequences sequences() const {
    if (!cu_seqlens.given) return {rows, length, nullptr, 0};
    if (cu_seqlens.holds(type_of<int32_t>())) return {rows, length, cu_seqlens.dense<const int32_t>(rows + 1), 4};
    return {rows, length, offsets(), 8};
  }

  template <class T>
  T* tokens(const Tensor& x) const {
    return cu_seqlens.given ? x.dense<T>(total) : x.matrix<T>(rows, length);
  }

  void* tokens_of_floats(const Tensor& x) const {
    return cu_seqlens.given ? x.dense_floats(total) : x.matrix_of_floats(rows, length);
  }
};

}  // namespace rlkernel::calls
