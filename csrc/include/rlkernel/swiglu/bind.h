// The arguments of the kernels of a gated MLP's product in Python.
#pragma once
#include "rlkernel/rows_bind.h"
#include "rlkernel/swiglu/arguments.h"

namespace rlkernel::calls {

struct swiglu_forward {
  Tensor gate;
  Optional up;
  Activation activation;
  bool round_first;
  Tensor product;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const StridedRowsOf rows(gate);
    return launch({rows.count, rows.length, gate.dtype(), rows.of(gate), rows.of(up), activation, round_first,
                   rows.into(product)},
                  stream);
  }
};

RLKERNEL_FIELDS(swiglu_forward, gate, up, activation, round_first, product)

struct swiglu_backward {
  Tensor gate;
  Optional up;
  Tensor grad_product;
  Activation activation;
  bool round_first;
  Optional grad_gate, grad_up;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const StridedRowsOf rows(gate);
    return launch({rows.count, rows.length, gate.dtype(), rows.of(gate), rows.of(up), rows.of(grad_product), activation,
                   round_first, rows.into(grad_gate), rows.into(grad_up)},
                  stream);
  }
};

RLKERNEL_FIELDS(swiglu_backward, gate, up, grad_product, activation, round_first, grad_gate, grad_up)

}  // namespace rlkernel::calls
