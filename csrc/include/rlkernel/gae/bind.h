// The arguments of the gae kernel in Python.
#pragma once
#include "rlkernel/batch.h"
#include "rlkernel/gae/arguments.h"

namespace rlkernel::calls {

struct gae {
  Tensor rewards, values;
  Optional mask, cu_seqlens, last_values;
  double gamma;
  Each<double> lam;
  bool zero_holes;
  Tensor advantages, returns;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(rewards, cu_seqlens);
    return launch({batch.tokens<const float>(rewards), rewards.row_stride(), batch.tokens<const float>(values),
                   values.row_stride(), batch.tokens<const uint8_t>(mask), mask.row_stride(), batch.offsets(), batch.rows,
                   batch.length, batch.total, last_values.dense<const float>(batch.rows), gamma, lam.all,
                   lam.rows.dense<const double>(batch.rows), zero_holes, advantages.dense<float>(batch.total),
                   returns.dense<float>(batch.total)},
                  stream);
  }
};

RLKERNEL_FIELDS(gae, rewards, values, mask, cu_seqlens, last_values, gamma, lam, zero_holes, advantages, returns)

}  // namespace rlkernel::calls
