// How the rows of a norm are cut where the gradient of its weight sums over them: by their number alone.
#pragma once
#include "rlkernel/kernel.h"

namespace rlkernel {

constexpr int64_t kNormRows = 32;  // rows whose sum stands in a partial of its own, in fp32; partials are summed in fp64

RLKERNEL_HOST_DEVICE static inline int64_t norm_chunks(int64_t rows) { return (rows + kNormRows - 1) / kNormRows; }

}  // namespace rlkernel
