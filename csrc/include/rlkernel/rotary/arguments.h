// Arguments of the kernel of rotary position embedding.
//
//   y1 = x1 * cos - x2 * sin        y2 = x2 * cos + x1 * sin
//
// for the pairs of the first `rotary_dim` elements of a head, half of them apart or neighbours. The gradient is turned back: with
// the partner's sine, of the other sign.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"

namespace rlkernel {

// The heads of every token, [outer, inner, heads] of rows.
struct RotaryHeads {
  const void* x;  // null where there are none
  void* out;      // may be x
  int64_t heads, x_outer, x_inner, x_head, out_outer, out_inner, out_head;
};

struct RotaryTable {
  const void* start;
  int64_t outer, inner;  // strides of tokens; inner is that of positions where there are any
};

struct Rotary {
  int64_t outer, inner, length;
  Dtype dtype, table_dtype;
  RotaryHeads q, k;
  RotaryTable cos, sin;
  const int64_t* positions;  // [outer, inner], or null
  int64_t rotary_dim, width;  // width of a table: rotary_dim or half of it
  bool interleaved, round_each, inverse;
};

// The column of a table for element i of a head.
RLKERNEL_HOST_DEVICE static inline int64_t rotary_column(const Rotary& r, int64_t i) {
  if (r.width == r.rotary_dim) return i;
  if (r.interleaved) return i / 2;
  return i < r.width ? i : i - r.width;
}

// Where the row of a token starts, in elements.
RLKERNEL_HOST_DEVICE static inline int64_t rotary_row(const Rotary& r, const RotaryTable& table, int64_t token) {
  if (r.positions != nullptr) return r.positions[token] * table.inner;
  return token / r.inner * table.outer + token % r.inner * table.inner;
}

RLKERNEL_KERNEL(rotary, const Rotary&)

}  // namespace rlkernel
