// The softmax of rows, and its logarithm: see arguments.h. A row belongs to one thread.
#define RLKERNEL_FUSED
#include "rlkernel/logprob/arguments.h"

#include <cmath>
#include <limits>
#include <memory>

#include "vectors.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int kLanes = 32, kSums = kLanes / kWidth;
constexpr float kInf = std::numeric_limits<float>::infinity();

// Calls body(i, count, sum) for the vectors of a row; `sum` is the one of kSums that holds their lanes.
template <class Body>
void each(int64_t length, Body body) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes)
    for (int sum = 0; sum < kSums; ++sum) body(i + sum * kWidth, kWidth, sum);
  for (int sum = 0; i < length; i += kWidth, ++sum)
    body(i, length - i < kWidth ? static_cast<int>(length - i) : kWidth, sum);
}

template <class T>
Floats behind_it(const T* x, int64_t i, int count, float filler) {
  return count == kWidth ? load(x + i) : fill_tail(load_part(x + i, count), count, filler);
}

// NaN is passed over: its exponential says so.
template <class T>
float largest_of(const T* x, int64_t length) {
  Floats peaks[kSums];
  for (Floats& peak : peaks) peak = broadcast(-kInf);
  each(length, [&](int64_t i, int count, int sum) { peaks[sum] = max(behind_it(x, i, count, -kInf), peaks[sum]); });
  for (int sum = 1; sum < kSums; ++sum) peaks[0] = max(peaks[0], peaks[sum]);
  return largest(peaks[0]);
}

// Of exp(x - peak), which are put to `keep` where it is given.
template <class T>
float sum_of_exps(const T* x, int64_t length, float peak, float* keep) {
  const ScaledExp exp(1.0);
  Floats sums[kSums] = {};
  each(length, [&](int64_t i, int count, int sum) {
    const Floats e = exp(exp.cut(behind_it(x, i, count, -kInf) - broadcast(peak)));
    sums[sum] += e;
    if (keep != nullptr) store(keep + i, e, count);
  });
  float lanes[kLanes];
  std::memcpy(lanes, sums, sizeof lanes);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// e / sum, rounded once but for a quotient below the normal range: a division would take as long as the exponential.
struct Quotient {
  Floats sum, inverse;

  explicit Quotient(float sum) : sum(broadcast(sum)), inverse(broadcast(1 / sum)) {}

  Floats operator()(Floats e) const {
    const Floats q = e * inverse;
    return fma(fma(-q, sum, e), inverse, q);
  }
};

template <class T, class Out>
void of_row(const T* x, int64_t length, bool logarithm, float* exps, Out* out) {
  const float peak = largest_of(x, length);
  if (logarithm) {
    const Floats top = broadcast(peak);
    const Floats log_sum = broadcast(static_cast<float>(std::log(static_cast<double>(sum_of_exps(x, length, peak, nullptr)))));
    each_vector(length, [&](int64_t i, int count) { store(out + i, (load(x + i, count) - top) - log_sum, count); });
    return;
  }
  const Quotient quotient(sum_of_exps(x, length, peak, exps));
  each_vector(length, [&](int64_t i, int count) { store(out + i, quotient(load(exps + i, count)), count); });
}

template <class T, class Out>
void run(const SoftmaxRows& s) {
#pragma omp parallel if (s.rows > 1 && s.rows * s.length >= kParallel)
  {
    constexpr bool kOwn = sizeof(Out) < sizeof(float);  // the exponentials lie where the result will, if it is as wide
    const std::unique_ptr<float[]> own(kOwn && !s.logarithm ? new float[s.length] : nullptr);
#pragma omp for schedule(static)
    for (int64_t r = 0; r < s.rows; ++r) {
      Out* out = static_cast<Out*>(s.out) + r * s.length;
      float* exps = kOwn ? own.get() : reinterpret_cast<float*>(out);
      of_row(row_at<const T>(s.x, r), s.length, s.logarithm, exps, out);
    }
  }
}

}  // namespace

int softmax(const SoftmaxRows& s) {
  with_type(s.dtype, [&](auto type) {
    using T = decltype(type);
    if (s.out_dtype == Dtype::f32) run<T, float>(s);
    else run<T, T>(s);
  });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
