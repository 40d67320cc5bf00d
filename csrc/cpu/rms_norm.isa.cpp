// RMSNorm of rows. A row belongs to one thread, its sum runs in the lanes of row_sum.h, and what follows is one element's
// alone: the bits of a row depend neither on the other rows nor on the threads nor on the instruction set.
#include <cmath>

#include "norm.h"
#include "rlkernel/rms_norm/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

template <class T, bool kWeighted, bool kRoundFirst>
void forward_row(const RmsNormForward& f, const float* weight, int64_t r) {
  const T* h = row_at<T>(f.x, r);
  if (f.summed != nullptr) {
    const T* residual = row_at<T>(f.residual, r);
    T* summed = static_cast<T*>(f.summed) + r * f.length;
    each_vector(f.length, [&](int64_t i, int count) {
      store(summed + i, load(h + i, count) + load(residual + i, count), count);
    });
    h = summed;
  }
  const float squares = row_sum(f.length, [&](Lanes& sum, int64_t i, int count) {
    const Lanes x = lanes_at(h, i, count);
    sum = fused(x, x, sum);
  });
  const float rstd = 1 / std::sqrt(squares / static_cast<float>(f.length) + f.eps);
  if (f.rstd != nullptr) f.rstd[r] = rstd;
  T* out = static_cast<T*>(f.normed) + r * f.length;
  const Floats scale = broadcast(rstd);
  each_vector(f.length, [&](int64_t i, int count) {
    Floats y = load(h + i, count) * scale;
    if constexpr (kRoundFirst) y = rounded<T>(y);
    if constexpr (kWeighted) y *= load(weight + i, count);
    store(out + i, y, count);
  });
}

template <class T>
void forward(const RmsNormForward& f) {
  const Weights weights(f.weight, f.weight_dtype, f.weight_offset, f.length);
  const float* weight = weights.data();
  const auto row = weight == nullptr ? forward_row<T, false, false>
                   : f.round_first   ? forward_row<T, true, true>
                                     : forward_row<T, true, false>;
#pragma omp parallel for schedule(static) if (f.rows * f.length >= kParallel)
  for (int64_t r = 0; r < f.rows; ++r) row(f, weight, r);
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
  with_type(f.dtype, [&](auto type) { forward<decltype(type)>(f); });
  return 0;
}

int rms_norm_backward(const RmsNormBackward& b) {
  with_type(b.dtype, [&](auto type) { backward<decltype(type)>(b); });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
