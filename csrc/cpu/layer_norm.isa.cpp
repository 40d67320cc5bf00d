// LayerNorm of rows. A row belongs to one thread, its sums run in the lanes of row_sum.h, and what follows is one element's
// alone: the bits of a row depend neither on the other rows nor on the threads nor on the instruction set.
#include <cmath>

#include "norm.h"
#include "rlkernel/layer_norm/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

template <class T, bool kWeighted, bool kBiased>
void forward_row(const LayerNormForward& f, const float* weight, const float* bias, int64_t r) {
  const T* x = row_at<T>(f.x, r);
  const float length = static_cast<float>(f.length);
  const float mean = row_sum(f.length, [&](Lanes& sum, int64_t i, int count) { sum += lanes_at(x, i, count); }) / length;
  const auto [more, squares] = row_sums<2>(f.length, [&](Lanes (&sums)[2], int64_t i, int count) {
    const Lanes d = first_lanes(lanes_at(x, i, count) - mean, count);
    sums[0] += d;
    sums[1] = fused(d, d, sums[1]);
  });
  const float shift = more / length, rstd = 1 / std::sqrt(layer_norm_variance(squares, more, length) + f.eps);
  if (f.rstd != nullptr) {
    f.mean[r] = mean + shift;
    f.rstd[r] = rstd;
  }
  T* out = static_cast<T*>(f.normed) + r * f.length;
  const Floats middle = broadcast(mean), rest = broadcast(shift), scale = broadcast(rstd);
  each_vector(f.length, [&](int64_t i, int count) {
    Floats y = ((load(x + i, count) - middle) - rest) * scale;
    if constexpr (kWeighted) y *= load(weight + i, count);
    if constexpr (kBiased) y += load(bias + i, count);
    store(out + i, y, count);
  });
}

template <class T>
void forward(const LayerNormForward& f) {
  const Weights weights(f.weight, f.weight_dtype, 0, f.length), biases(f.bias, f.bias_dtype, 0, f.length);
  const float *weight = weights.data(), *bias = biases.data();
  const auto row = weight == nullptr ? (bias == nullptr ? forward_row<T, false, false> : forward_row<T, false, true>)
                                     : (bias == nullptr ? forward_row<T, true, false> : forward_row<T, true, true>);
#pragma omp parallel for schedule(static) if (f.rows * f.length >= kParallel)
  for (int64_t r = 0; r < f.rows; ++r) row(f, weight, bias, r);
}

// Adds this row's part of the gradients of weight and bias to those of the sums that are not null.
template <class T, bool kWeighted>
void backward_row(const LayerNormBackward& b, const float* weight, float* weight_sums, float* bias_sums, int64_t r) {
  const T *x = row_at<T>(b.x, r), *grad = row_at<T>(b.grad, r);
  T* out = static_cast<T*>(b.grad_x) + r * b.length;
  const float mean = b.mean[r], rstd = b.rstd[r], length = static_cast<float>(b.length);
  const auto [sum, dot] = row_sums<2>(b.length, [&](Lanes (&sums)[2], int64_t i, int count) {
    Lanes g = lanes_at(grad, i, count);
    if constexpr (kWeighted) g *= lanes_at(weight, i, count);
    sums[0] += g;
    sums[1] = fused(g, first_lanes((lanes_at(x, i, count) - mean) * rstd, count), sums[1]);
  });
  const Floats middle = broadcast(mean), scale = broadcast(rstd);
  const Floats even = broadcast(sum / length), along = broadcast(dot / length);
  each_vector(b.length, [&](int64_t i, int count) {
    const Floats n = (load(x + i, count) - middle) * scale, g = load(grad + i, count);
    if (weight_sums != nullptr) store(weight_sums + i, load(weight_sums + i, count) + g * n, count);
    if (bias_sums != nullptr) store(bias_sums + i, load(bias_sums + i, count) + g, count);
    Floats d = g;
    if constexpr (kWeighted) d *= load(weight + i, count);
    store(out + i, ((d - even) - n * along) * scale, count);
  });
}

template <class T>
void backward(const LayerNormBackward& b) {
  const Weights weights(b.weight, b.weight_dtype, 0, b.length);
  const float* weight = weights.data();
  const auto row = weight == nullptr ? backward_row<T, false> : backward_row<T, true>;
#pragma omp parallel for schedule(static) if (b.rows * b.length >= kParallel)
  for (int64_t chunk = 0; chunk < norm_chunks(b.rows); ++chunk) {
    const auto sums_of = [&](float* partials) {
      float* sums = partials == nullptr ? nullptr : partials + chunk * b.length;
      if (sums != nullptr) std::memset(sums, 0, b.length * sizeof(float));
      return sums;
    };
    float *weight_sums = sums_of(b.weight_partials), *bias_sums = sums_of(b.bias_partials);
    const int64_t end = (chunk + 1) * kNormRows < b.rows ? (chunk + 1) * kNormRows : b.rows;
    for (int64_t r = chunk * kNormRows; r < end; ++r) row(b, weight, weight_sums, bias_sums, r);
  }
  if (b.grad_weight != nullptr) sum_partials(b.weight_partials, b.rows, b.length, b.grad_weight, b.weight_dtype);
  if (b.grad_bias != nullptr) sum_partials(b.bias_partials, b.rows, b.length, b.grad_bias, b.bias_dtype);
}

}  // namespace

int layer_norm_forward(const LayerNormForward& f) {
  with_type(f.dtype, [&](auto type) { forward<decltype(type)>(f); });
  return 0;
}

int layer_norm_backward(const LayerNormBackward& b) {
  with_type(b.dtype, [&](auto type) { backward<decltype(type)>(b); });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
