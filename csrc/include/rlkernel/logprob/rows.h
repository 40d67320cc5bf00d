// The rows of a tensor [..., V] as the kernels take them, neither copied nor reshaped.
#pragma once
#include <vector>

#include "rlkernel/call.h"

namespace rlkernel::calls {

using namespace bind;

// Rows of one launch: row r lies at offset + r / inner * outer_stride + r % inner * inner_stride.
struct Rows {
  int64_t count, inner, outer_stride, inner_stride;
  int64_t offset, first;  // of the first one: in elements, and among all rows of the tensor
};

// One of any number of rows, without a tensor behind them.
inline Rows rows_alone(int64_t count) { return {count, count, 0, 0, 0, 0}; }

// Dimensions that continue each other are one; two of the rest are the launch's, more are a loop of launches. `launch` gives
// the runtime's error code; the first that is none of success ends the loop.
template <class Launch>
int each_rows(const Tensor& x, Launch launch) {
  x.want_unit_stride();
  if (x.elements() == 0) return 0;
  struct Dim {
    int64_t size, stride;
  };
  std::vector<Dim> dims;
  if (x.is_dense()) {
    const int64_t count = x.elements() / x.last();
    return launch(Rows{count, count, 0, x.last(), 0, 0});
  }
  for (int d = 0; d + 1 < x.rank(); ++d) {
    if (!dims.empty() && dims.back().stride == x.size(d) * x.stride(d)) dims.back() = {dims.back().size * x.size(d), x.stride(d)};
    else if (x.size(d) > 1) dims.push_back({x.size(d), x.stride(d)});
  }
  while (dims.size() < 2) dims.insert(dims.begin(), {1, 0});
  const Dim inner = dims.back(), outer = dims[dims.size() - 2];
  const int64_t count = outer.size * inner.size;
  int64_t loops = 1;
  for (size_t d = 0; d + 2 < dims.size(); ++d) loops *= dims[d].size;
  for (int64_t k = 0; k < loops; ++k) {
    int64_t offset = 0, rest = k;
    for (size_t d = dims.size() - 2; d-- > 0; rest /= dims[d].size) offset += rest % dims[d].size * dims[d].stride;
    if (const int error = launch(Rows{count, inner.size, outer.stride, inner.stride, offset, k * count})) return error;
  }
  return 0;
}

// Where rows are written that are read from `in`: the address, and the strides that go with `rows`.
struct Target {
  void* at;
  int64_t outer_stride, inner_stride;
};

inline Target target_of(const Tensor& out, const Tensor& in, const Rows& rows) {
  if (!out.has_shape_of(in)) out.refuse_shape_of(in);
  out.want_unit_stride();
  out.want_apart();
  const int64_t bytes = out.item_bytes(), vocab = in.last();
  char* start = static_cast<char*>(out.data());
  if (out.has_strides_of(in)) return {start + rows.offset * bytes, rows.outer_stride, rows.inner_stride};
  if (out.is_dense()) return {start + rows.first * vocab * bytes, rows.inner * vocab, vocab};
  if (out.rank() != 2) out.want_dense();
  return {start, 0, out.stride(0)};
}

}  // namespace rlkernel::calls
