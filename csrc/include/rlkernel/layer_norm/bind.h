// The arguments of the LayerNorm kernels in Python.
#pragma once
#include "rlkernel/layer_norm/arguments.h"
#include "rlkernel/norm_bind.h"

namespace rlkernel::calls {

struct layer_norm_forward {
  Tensor x;
  Optional weight, bias;
  double eps;
  Tensor normed;
  Optional mean, rstd;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const NormRows rows(x);
    if (mean.given != rstd.given) mean.refuse("be given where rstd is", mean.given ? "a tensor" : "None");
    return launch({rows.count, rows.length, x.dtype(), rows.of(x), rows.weights(weight), rows.weight_dtype(weight),
                   rows.weights(bias), rows.weight_dtype(bias), static_cast<float>(eps), rows.dense(normed),
                   mean.dense<float>(rows.count), rstd.dense<float>(rows.count)},
                  stream);
  }
};

RLKERNEL_FIELDS(layer_norm_forward, x, weight, bias, eps, normed, mean, rstd)

struct layer_norm_backward {
  Tensor x, grad_normed, mean, rstd;
  Optional weight;
  Tensor grad_x;
  Optional weight_partials, grad_weight, bias_partials, grad_bias;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const NormRows rows(x);
    return launch({rows.count, rows.length, x.dtype(), rows.of(x), rows.of(grad_normed), mean.dense<const float>(rows.count),
                   rstd.dense<const float>(rows.count), rows.weights(weight), rows.weight_dtype(weight),
                   rows.weight_dtype(grad_bias), rows.dense(grad_x), rows.partials(weight_partials, grad_weight),
                   rows.partials(bias_partials, grad_bias), rows.grad_weights(grad_weight, weight),
                   rows.grad_weights(grad_bias, grad_bias)},
                  stream);
  }
};

RLKERNEL_FIELDS(layer_norm_backward, x, grad_normed, mean, rstd, weight, grad_x, weight_partials, grad_weight, bias_partials,
                grad_bias)

}  // namespace rlkernel::calls
