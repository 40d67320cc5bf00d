// The arguments of the RMSNorm kernels in Python.
#pragma once
#include "rlkernel/norm_bind.h"
#include "rlkernel/rms_norm/arguments.h"

namespace rlkernel::calls {

struct rms_norm_forward {
  Tensor x;
  Optional residual, summed, weight;
  double weight_offset, eps;
  bool round_first;
  Tensor normed;
  Optional rstd;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const NormRows rows(x);
    if (summed.given != residual.given) summed.refuse("be given where residual is", summed.given ? "a tensor" : "None");
    return launch({rows.count, rows.length, x.dtype(), rows.of(x), rows.of(residual), rows.dense(summed), rows.weights(weight),
                   rows.weight_dtype(weight), static_cast<float>(weight_offset), static_cast<float>(eps), round_first,
                   rows.dense(normed), rstd.dense<float>(rows.count)},
                  stream);
  }
};

RLKERNEL_FIELDS(rms_norm_forward, x, residual, summed, weight, weight_offset, eps, round_first, normed, rstd)

struct rms_norm_in_order {
  Tensor x;
  Optional residual, summed, weight;
  double weight_offset, eps;
  bool round_first;
  Tensor normed;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    return rms_norm_forward{x, residual, summed, weight, weight_offset, eps, round_first, normed, {}}.run(launch, stream);
  }
};

RLKERNEL_FIELDS(rms_norm_in_order, x, residual, summed, weight, weight_offset, eps, round_first, normed)

struct rms_norm_backward {
  Tensor h, grad_normed;
  Optional grad_summed;
  Tensor rstd;
  Optional weight;
  double weight_offset;
  Tensor grad_x;
  Optional partials, grad_weight;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const NormRows rows(h);
    return launch({rows.count, rows.length, h.dtype(), rows.of(h), rows.of(grad_normed), rows.of(grad_summed),
                   rstd.dense<const float>(rows.count), rows.weights(weight), rows.weight_dtype(weight),
                   static_cast<float>(weight_offset), rows.dense(grad_x), rows.partials(partials, grad_weight),
                   rows.grad_weights(grad_weight, weight)},
                  stream);
  }
};

RLKERNEL_FIELDS(rms_norm_backward, h, grad_normed, grad_summed, rstd, weight, weight_offset, grad_x, partials, grad_weight)

}  // namespace rlkernel::calls
