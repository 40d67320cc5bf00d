// RMSNorm of rows. A row belongs to one thread, its sum runs in lanes, and what follows is one element's alone: the bits of a
// row depend neither on the other rows nor on the threads nor on the instruction set.
#include <cmath>

#include "norm.h"
#include "rlkernel/rms_norm/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

// Sums of squares in the lanes of row_sum.h.
struct Spread {
  static constexpr int kTogether = 1;

  template <class T>
  static void squares_of(const T* const (&rows)[1], int64_t length, float (&squares)[1]) {
    squares[0] = row_sum(length, [&](Lanes& sum, int64_t i, int count) {
      const Lanes x = lanes_at(rows[0], i, count);
      sum = fused(x, x, sum);
    });
  }
};

// Sums of rounded squares in the lanes of a matrix product: element i is added to lane i % 8, in ascending order.
struct InOrder {
  static constexpr int kTogether = 4;  // rows side by side: one chain of additions would wait for itself

  template <class T, int kRows>
  static void squares_of(const T* const (&rows)[kRows], int64_t length, float (&squares)[kRows]) {
    Lanes lanes[kRows] = {};
    const auto add = [&](int64_t i, int count) {
      for (int r = 0; r < kRows; ++r) {
        const Lanes x = lanes_at(rows[r], i, count);
        lanes[r] += x * x;
      }
    };
    int64_t i = 0;
    for (; i + kLanes <= length; i += kLanes) add(i, kLanes);
    if (i < length) add(i, static_cast<int>(length - i));
    for (int r = 0; r < kRows; ++r) squares[r] = sum_of(lanes[r]);
  }
};

// The sum of a row and its residual, which is written.
template <class T>
const T* with_residual(const RmsNormForward& f, int64_t r) {
  const T *x = row_at<T>(f.x, r), *residual = row_at<T>(f.residual, r);
  T* summed = static_cast<T*>(f.summed) + r * f.length;
  each_vector(f.length, [&](int64_t i, int count) {
    store(summed + i, load(x + i, count) + load(residual + i, count), count);
  });
  return summed;
}

template <class T, class Order, bool kWeighted, bool kRoundFirst, int kRows>
void forward_rows(const RmsNormForward& f, const float* weight, int64_t first) {
  const T* rows[kRows];
  for (int r = 0; r < kRows; ++r)
    rows[r] = f.summed == nullptr ? row_at<T>(f.x, first + r) : with_residual<T>(f, first + r);
  float squares[kRows];
  Order::squares_of(rows, f.length, squares);
  for (int r = 0; r < kRows; ++r) {
    const float rstd = 1 / std::sqrt(squares[r] / static_cast<float>(f.length) + f.eps);
    if (f.rstd != nullptr) f.rstd[first + r] = rstd;
    const T* h = rows[r];
    T* out = static_cast<T*>(f.normed) + (first + r) * f.length;
    const Floats scale = broadcast(rstd);
    each_vector(f.length, [&](int64_t i, int count) {
      Floats y = load(h + i, count) * scale;
      if constexpr (kRoundFirst) y = rounded<T>(y);
      if constexpr (kWeighted) y *= load(weight + i, count);
      store(out + i, y, count);
    });
  }
}

template <class T, class Order, bool kWeighted, bool kRoundFirst>
void forward_some(const RmsNormForward& f, const float* weight, int64_t first, int64_t end) {
  for (; first + Order::kTogether <= end; first += Order::kTogether)
    forward_rows<T, Order, kWeighted, kRoundFirst, Order::kTogether>(f, weight, first);
  for (; first < end; ++first) forward_rows<T, Order, kWeighted, kRoundFirst, 1>(f, weight, first);
}

template <class T, class Order>
void forward(const RmsNormForward& f) {
  const Weights weights(f.weight, f.weight_dtype, f.weight_offset, f.length);
  const float* weight = weights.data();
  const auto some = weight == nullptr ? forward_some<T, Order, false, false>
                    : f.round_first   ? forward_some<T, Order, true, true>
                                      : forward_some<T, Order, true, false>;
#pragma omp parallel for schedule(static) if (f.rows * f.length >= kParallel)
  for (int64_t first = 0; first < f.rows; first += Order::kTogether)
    some(f, weight, first, f.rows - first < Order::kTogether ? f.rows : first + Order::kTogether);
}

// Adds this row's part of the weight's gradient to `sums`, unless that is null.
template <class T, bool kWeighted>
void backward_row(const RmsNormBackward& b, const float* weight, float* sums, int64_t r) {
  const T *h = row_at<T>(b.h, r), *grad = row_at<T>(b.grad_normed, r);
  const T* more = b.grad_summed.start != nullptr ? row_at<T>(b.grad_summed, r) : nullptr;
  T* out = static_cast<T*>(b.grad_x) + r * b.length;
  const float rstd = b.rstd[r];
  const float dot = row_sum(b.length, [&](Lanes& sum, int64_t i, int count) {
    Lanes g = lanes_at(grad, i, count);
    if constexpr (kWeighted) g *= lanes_at(weight, i, count);
    sum = fused(g, lanes_at(h, i, count) * rstd, sum);
  });
  const Floats scale = broadcast(rstd), along = broadcast(dot / static_cast<float>(b.length));
  each_vector(b.length, [&](int64_t i, int count) {
    const Floats n = load(h + i, count) * scale, g = load(grad + i, count);
    if (sums != nullptr) store(sums + i, load(sums + i, count) + g * n, count);
    Floats d = g;
    if constexpr (kWeighted) d *= load(weight + i, count);
    d = (d - n * along) * scale;
    if (more != nullptr) d += load(more + i, count);
    store(out + i, d, count);
  });
}

template <class T>
void backward(const RmsNormBackward& b) {
  const Weights weights(b.weight, b.weight_dtype, b.weight_offset, b.length);
  const float* weight = weights.data();
  const auto row = weight == nullptr ? backward_row<T, false> : backward_row<T, true>;
#pragma omp parallel for schedule(static) if (b.rows * b.length >= kParallel)
  for (int64_t chunk = 0; chunk < norm_chunks(b.rows); ++chunk) {
    float* sums = b.partials == nullptr ? nullptr : b.partials + chunk * b.length;
    if (sums != nullptr) std::memset(sums, 0, b.length * sizeof(float));
    const int64_t end = (chunk + 1) * kNormRows < b.rows ? (chunk + 1) * kNormRows : b.rows;
    for (int64_t r = chunk * kNormRows; r < end; ++r) row(b, weight, sums, r);
  }
  if (b.grad_weight != nullptr) sum_partials(b.partials, b.rows, b.length, b.grad_weight, b.weight_dtype);
}

}  // namespace

int rms_norm_forward(const RmsNormForward& f) {
  with_type(f.dtype, [&](auto type) { forward<decltype(type), Spread>(f); });
  return 0;
}

int rms_norm_in_order(const RmsNormForward& f) {
  with_type(f.dtype, [&](auto type) { forward<decltype(type), InOrder>(f); });
  return 0;
}

int rms_norm_backward(const RmsNormBackward& b) {
  with_type(b.dtype, [&](auto type) { backward<decltype(type)>(b); });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
