// The arguments of the value loss kernels in Python.
#pragma once
#include "rlkernel/batch.h"
#include "rlkernel/value_loss/arguments.h"

namespace rlkernel::calls {

struct value_loss_forward {
  Tensor values, returns;
  Optional old_values;
  Tensor mask;
  Optional cu_seqlens;
  double cliprange, huber_delta;
  Unit unit;
  Each<double> items;
  double factor;
  Optional slope;
  Tensor partials, scale, loss, metrics;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(values, cu_seqlens);
    const Sequences sequences = batch.sequences();
    const Dtype other = returns.dtype();
    if (other != Dtype::f32 && other != values.dtype()) returns.refuse("be float32 or of the dtype of values", returns.type_text());
    if (old_values.given && old_values.dtype() != other) old_values.refuse("be of the dtype of returns", old_values.type_text());
    return launch({batch.tokens_of_floats(values), batch.tokens_of_floats(returns), batch.tokens_of_floats(old_values),
                   values.dtype(), other, batch.tokens<const uint8_t>(mask), values.row_stride(), returns.row_stride(),
                   old_values.row_stride(), mask.row_stride(), sequences, static_cast<float>(cliprange),
                   static_cast<float>(huber_delta), unit, items.rows.dense<const float>(1), items.all, factor,
                   slope.dense<float>(batch.total), partials.dense<ValueSums>(slots_of(sequences)),
                   scale.dense<float>(batch.rows), loss.dense<float>(1), metrics.dense<float>(kValueMetrics)},
                  stream);
  }
};

struct value_loss_backward {
  Tensor grad_loss, slope, scale;
  Optional cu_seqlens;
  Tensor out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(slope, cu_seqlens);
    return launch({grad_loss.dense<const float>(1), slope.dense<const float>(batch.total),
                   scale.dense<const float>(batch.rows), batch.sequences(), out.dense_floats(batch.total), out.dtype()},
                  stream);
  }
};

RLKERNEL_FIELDS(value_loss_forward, values, returns, old_values, mask, cu_seqlens, cliprange, huber_delta, unit, items, factor,
                slope, partials, scale, loss, metrics)
RLKERNEL_FIELDS(value_loss_backward, grad_loss, slope, scale, cu_seqlens, out)

}  // namespace rlkernel::calls
