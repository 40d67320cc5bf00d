// Arguments of the kernels of a gated MLP's product: product = activation(gate) * up, element by element.
#pragma once
#include "rlkernel/dtype.h"
#include "rlkernel/names.h"
#include "rlkernel/strided_rows.h"

namespace rlkernel {

RLKERNEL_ENUM(Activation, silu, gelu, gelu_tanh)
RLKERNEL_ENUM(ProductRounding, before_product, after_product)

struct SwigluForward {
  int64_t rows, length;
  Dtype dtype;           // of all tensors
  StridedRows gate, up;  // up: null, 1 everywhere
  Activation activation;
  bool round_first;      // the activated gate is rounded to the dtype before it is multiplied
  StridedRows product;
};

struct SwigluBackward {
  int64_t rows, length;
  Dtype dtype;
  StridedRows gate, up, grad;
  Activation activation;
  bool round_first;
  StridedRows grad_gate, grad_up;  // each null where it is not wanted
};

RLKERNEL_KERNEL(swiglu_forward, const SwigluForward&)
RLKERNEL_KERNEL(swiglu_backward, const SwigluBackward&)

}  // namespace rlkernel
