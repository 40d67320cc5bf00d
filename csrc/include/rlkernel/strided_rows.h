// Rows of a tensor as a kernel takes them: two strides between rows, none within.
#pragma once
#include "rlkernel/kernel.h"

namespace rlkernel {

// Row r starts at r / inner * outer_stride + r % inner * inner_stride elements; null where there is no tensor.
struct StridedRows {
  void* start;
  int64_t inner, outer_stride, inner_stride;
};

template <class T>
RLKERNEL_HOST_DEVICE static inline T* row_at(const StridedRows& rows, int64_t r) {
  // a division takes as long as a short row; dense rows need none
  const int64_t at = r < rows.inner ? r * rows.inner_stride
                                    : r / rows.inner * rows.outer_stride + r % rows.inner * rows.inner_stride;
  return static_cast<T*>(rows.start) + at;
}

// Whether they lie one behind the other, as one long row; also where there are none.
static inline bool lie_dense(const StridedRows& rows, int64_t count, int64_t length) {
  return rows.start == nullptr || count < 2 || (rows.inner >= count && rows.inner_stride == length);
}

}  // namespace rlkernel
