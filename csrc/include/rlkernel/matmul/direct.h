// A product of plain matrices, [M, K] with [K, N] or of as many in a batch, below autograd: what batch_invariant makes of torch's
// products, many of which are small.
#pragma once
#include <cstring>

#include "rlkernel/direct.h"
#include "rlkernel/matmul/bind.h"

namespace rlkernel::direct {

struct product {
  static constexpr int kPlaces = 5;
  static constexpr bool kBelowAutograd = true;
  Plain a, b;
  Maybe bias;
  bool wide = false;  // the result is fp32
  int64_t rank = 0;   // of the operands; 0: 2 or 3

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const int found = a.rank();
    if (found != b.rank() || (rank != 0 && found != rank) || found < 2 || found > 3) return {};
    if (!a.is_float() || !b.has_type_of(a) || a.elements() == 0 || b.elements() == 0) return {};
    const int z = found - 2;  // dimensions in front
    const int64_t batch = z ? a.size(0) : 1, M = a.size(z), K = a.size(z + 1), N = b.size(z + 1);
    if (b.size(z) != K || (z && b.size(0) != batch)) return {};
    if (bias.given && !(bias.rank() == 1 && bias.size(0) == N && bias.is_dense() && bias.is_float())) return {};
    if (bias.given && bias.dtype() == Dtype::f16) return {};
    Plain out;
    const int64_t shape[] = {batch, M, N};
    py::object made = caller.new_empty(a.object, shape + 1 - z, found, wide, out);
    const std::unique_ptr<float[]> biases(bias.given && bias.dtype() == Dtype::bf16 ? widened(N) : nullptr);
    const float* added = !bias.given ? nullptr : biases ? biases.get() : static_cast<const float*>(bias.data());
    const auto strides = [&](const bind::Tensor& x, int row, int step) {
      return Operand{x.data(), x.dtype(), z ? x.stride(0) : 0, x.stride(row), K == 1 ? 1 : x.stride(step)};
    };
    const Operand rows = strides(a, z, z + 1), columns = strides(b, z + 1, z);
    launched(batch * M * N * K, [&] { return launch({rows, columns, added, out.data(), out.dtype(), batch, M, N, K}, nullptr); });
    return made;
  }

 private:
  float* widened(int64_t count) const {
    auto* values = new float[count];
    const auto* narrow = static_cast<const uint16_t*>(bias.data());
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(narrow[i]) << 16;
      std::memcpy(values + i, &bits, sizeof bits);
    }
    return values;
  }
};

RLKERNEL_FIELDS(product, a, b, bias, wide, rank)

}  // namespace rlkernel::direct
