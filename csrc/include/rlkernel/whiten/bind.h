// The arguments of the whitening kernels in Python.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/whiten/arguments.h"

namespace rlkernel::calls {

using namespace bind;

struct whiten {
  Tensor x;
  Optional mask, weights, states;
  bool update, shift_mean, unbiased, eps_in_std;
  double eps, clip;
  Tensor partials;
  Optional out, state;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const int64_t n = x.elements(), count = states.given ? states.size(0) : 0;
    const bool wide = x.holds(type_of<double>());
    const void* elements = wide ? static_cast<const void*>(x.dense<const double>(n)) : x.dense<const float>(n);
    return launch({elements, wide, mask.dense<const uint8_t>(n), weights.dense<const float>(n), n,
                   states.dense<const Moments>(count), count, update, state.given, shift_mean, unbiased, eps_in_std, eps, clip,
                   partials.dense<Moments>(update ? chunks_of(n) : 0), out.dense<float>(n), state.dense<Moments>(1)},
                  stream);
  }
};

RLKERNEL_FIELDS(whiten, x, mask, weights, states, update, shift_mean, unbiased, eps_in_std, eps, clip, partials, out, state)

}  // namespace rlkernel::calls
