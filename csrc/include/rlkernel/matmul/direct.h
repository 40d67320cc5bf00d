// A product of plain matrices, [M, K] with [K, N] or of as many in a batch, below autograd: what batch_invariant makes of torch's
// products, many of which are small.
#pragma once
#include <vector>

#include "rlkernel/direct.h"
#include "rlkernel/matmul/bind.h"

namespace rlkernel::direct {

// `out` [batch, M, N] of rows and columns [batch, ..., K].
template <class Launch>
void multiplied(const Operand& rows, const Operand& columns, const Maybe& bias, const Plain& out, int64_t batch, int64_t M, int64_t N,
                int64_t K, Launch launch) {
  const auto biases = widened(bias);
  const float* added = !bias.given ? nullptr : biases ? biases.get() : static_cast<const float*>(bias.data());
  launched(batch * M * N * K, [&] { return launch({rows, columns, added, out.data(), out.dtype(), batch, M, N, K}, nullptr); });
}

inline bool is_bias(const Maybe& bias, int64_t columns) {
  return !bias.given || is_row(bias, columns);
}

struct product {
  static constexpr int kPlaces = 6;
  static constexpr bool kBelowAutograd = true;
  Plain a, b;
  Maybe bias;
  bool wide = false;  // the result is fp32
  int64_t rank = 0;   // of the operands; 0: 2 or 3
  Maybe into;         // the result, of two matrices

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const int found = a.rank();
    if (found != b.rank() || (rank != 0 && found != rank) || found < 2 || found > 3) return {};
    if (!a.is_float() || !b.has_type_of(a) || a.elements() == 0 || b.elements() == 0) return {};
    const int z = found - 2;  // dimensions in front
    const int64_t batch = z ? a.size(0) : 1, M = a.size(z), K = a.size(z + 1), N = b.size(z + 1);
    if (b.size(z) != K || (z && b.size(0) != batch) || !is_bias(bias, N)) return {};
    Plain out = into;
    const int64_t shape[] = {batch, M, N};
    if (into.given && (z || wide || into.rank() != 2 || into.size(0) != M || into.size(1) != N || !into.is_dense() || !into.has_type_of(a)))
      return {};
    py::object made = into.given ? borrowed(into.object) : caller.new_empty(a.object, shape + 1 - z, found, wide, out);
    const auto strides = [&](const bind::Tensor& x, int row, int step) {
      return Operand{x.data(), x.dtype(), z ? x.stride(0) : 0, x.stride(row), K == 1 ? 1 : x.stride(step)};
    };
    multiplied(strides(a, z, z + 1), strides(b, z + 1, z), bias, out, batch, M, N, K, launch);
    return made;
  }
};

RLKERNEL_FIELDS(product, a, b, bias, wide, rank, into)

// torch's operations, in its dispatcher.

template <int kRank>
struct Mm {
  static constexpr int kPlaces = 2;
  Plain a, b;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    return product{a, b, {}, false, kRank, {}}.run(caller, launch);
  }
};

using mm = Mm<2>;
using bmm = Mm<3>;
RLKERNEL_FIELDS(mm, a, b)
RLKERNEL_FIELDS(bmm, a, b)

struct addmm {
  static constexpr int kPlaces = 3;
  Maybe base;
  Plain a, b;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!base.given || base.rank() != 1 || !base.has_type_of(a)) return {};
    return product{a, b, base, false, 2, {}}.run(caller, launch);
  }
};

RLKERNEL_FIELDS(addmm, base, a, b)

// In autograd's place: rows of any shape.
struct linear {
  static constexpr int kPlaces = 3;
  static constexpr bool kWhole = true;
  Plain x, weight;
  Maybe bias;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (x.rank() < 2 || weight.rank() != 2 || !x.is_float() || !weight.has_type_of(x) || (bias.given && !bias.has_type_of(x))) return {};
    const int64_t K = x.last(), N = weight.size(0), M = x.elements() / (K ? K : 1);
    if (weight.size(1) != K || M * N * K == 0 || !is_bias(bias, N) || !(x.is_dense() || x.rank() == 2)) return {};
    int64_t shape[64];
    for (int d = 0; d + 1 < x.rank(); ++d) shape[d] = x.size(d);
    shape[x.rank() - 1] = N;
    Plain out;
    py::object made = caller.new_empty(x.object, shape, x.rank(), false, out);
    const bool one = K == 1;
    const Operand rows{x.data(), x.dtype(), 0, x.is_dense() ? K : x.stride(0), one || x.is_dense() ? 1 : x.stride(1)};
    const Operand columns{weight.data(), weight.dtype(), 0, weight.stride(0), one ? 1 : weight.stride(1)};
    multiplied(rows, columns, bias, out, 1, M, N, K, launch);
    return made;
  }
};

RLKERNEL_FIELDS(linear, x, weight, bias)

// A sum over the last dimension of fp32: the product with ones.
template <bool kMean>
struct Sum {
  static constexpr int kPlaces = 3;
  Plain x;
  OneNumber dim;
  bool keepdim = false;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    const int rank = x.rank();
    if (!dim.given || rank == 0 || (dim.number != -1 && dim.number != rank - 1)) return {};
    if (x.elements() == 0 || !x.holds(bind::type_of<float>()) || !(x.is_dense() || rank == 2)) return {};
    const int64_t length = x.last(), count = x.elements() / length;
    int64_t shape[64];
    for (int d = 0; d + 1 < rank; ++d) shape[d] = x.size(d);
    shape[rank - 1] = 1;
    Plain out;
    py::object made = caller.new_empty(x.object, shape, keepdim ? rank : rank - 1, false, out);
    thread_local std::vector<float> ones;
    if (static_cast<int64_t>(ones.size()) < length) ones.assign(length, 1.0f);
    const Operand row{ones.data(), Dtype::f32, 0, length, 1};
    const Operand columns{x.data(), Dtype::f32, 0, x.is_dense() ? length : x.stride(0), length == 1 || x.is_dense() ? 1 : x.stride(1)};
    multiplied(row, columns, {}, out, 1, 1, count, length, launch);
    if (kMean) {
      auto* total = static_cast<float*>(out.data());
      for (int64_t i = 0; i < count; ++i) total[i] /= static_cast<float>(length);
    }
    return made;
  }
};

using row_sum = Sum<false>;
using row_mean = Sum<true>;
RLKERNEL_FIELDS(row_sum, x, dim, keepdim)
RLKERNEL_FIELDS(row_mean, x, dim, keepdim)

}  // namespace rlkernel::direct
