// The arguments of the matrix product in Python: a [B, M, K] and b [B, K, N] with any strides.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/matmul/arguments.h"

namespace rlkernel::calls {

using namespace bind;

struct matmul {
  Tensor a, b;
  Optional bias;
  Tensor out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    a.want_rank(3);
    b.want_rank(3);
    const int64_t batch = a.size(0), M = a.size(1), K = a.size(2), N = b.size(2);
    b.want_shape({batch, K, N});
    out.want_shape({batch, M, N});
    // the stride of a dimension of one element may be anything, and decides nothing
    const int64_t one = K == 1;
    const Operand rows{a.data(), a.dtype(), a.stride(0), a.stride(1), one ? 1 : a.stride(2)};
    const Operand columns{b.data(), b.dtype(), b.stride(0), b.stride(2), one ? 1 : b.stride(1)};
    void* written = out.dense_floats(batch * M * N);
    return launch({rows, columns, bias.dense<const float>(N), written, out.dtype(), batch, M, N, K}, stream);
  }
};

RLKERNEL_FIELDS(matmul, a, b, bias, out)

}  // namespace rlkernel::calls
