// What a gradient with respect to a row of logits is: each exponential times a number that follows from its logit.
#pragma once

#include <algorithm>
#include <type_traits>

#include "../factor_exp.h"
#include "row.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kAhead = 1024;  // elements between the one that is read and the one that is prefetched

// out_i = exp(d / T) * (constant + linear * d / T) * dy_i / du_i with d = y_i - row_max, and `at_target * dy / du` at
// `target`, a position in the row or -1. Where exp is 0, d is finite, so a logit of -inf gives 0.
struct Weights {
  float row_max;
  double temperature, constant, linear;
  int64_t target;
  double at_target;
};

// constant * exp(d / T): the exponential has its factor within.
class ConstantWeight {
 public:
  explicit ConstantWeight(const Weights& w) : exp_(w.temperature, w.constant), max_(broadcast(w.row_max)) {}
  static bool can(const Weights& w) {
    return w.linear == 0 && std::fabs(w.constant) >= FactorExp::kLeast && std::fabs(w.constant) <= FactorExp::kMost;
  }
  Floats operator()(Floats y) const { return exp_(exp_.cut(y - max_)); }

 private:
  FactorExp exp_;
  Floats max_;
};

// The exponential takes a power of two out of both numbers; d / T is a product of its own, because linear / T overflows before
// linear * d / T does.
class LinearWeight {
 public:
  explicit LinearWeight(const Weights& w) : LinearWeight(w, unit_of(w)) {}
  Floats operator()(Floats y) const {
    const Floats d = exp_.cut(y - max_);
    return exp_(d) * fma(d * inverse_, linear_, constant_);
  }

 private:
  LinearWeight(const Weights& w, double unit)
      : exp_(w.temperature, unit), max_(broadcast(w.row_max)), inverse_(broadcast(static_cast<float>(1 / w.temperature))),
        linear_(broadcast(number(w.linear / unit))), constant_(broadcast(number(w.constant / unit))) {}

  static double unit_of(const Weights& w) {
    const double most = std::fmax(std::fabs(w.constant), std::fabs(w.linear));
    if (!(most > FactorExp::kLeast)) return FactorExp::kLeast;
    return most < FactorExp::kMost ? std::exp2(std::floor(std::log2(most))) : FactorExp::kMost;
  }
  // A NaN is the usual one: rounding a step to bf16 expects it.
  static float number(double x) { return x != x ? kNan : static_cast<float>(x); }

  FactorExp exp_;
  Floats max_, inverse_, linear_, constant_;
};

template <class In, class Out, bool kMapped, class Weight>
void weigh_by(const Row<In, kMapped>& source, Out* out, int64_t vocab, const Weight& weight_of_row, bool streams) {
  const Row<In, kMapped> row = source;  // the compiler cannot know that `out` does not alias the source, nor the weight
  const Weight weight = weight_of_row;
  const auto value = [&](const typename Row<In, kMapped>::Value& v) {
    if constexpr (kMapped) return weight(v.y) * v.slope;
    return weight(v.y);
  };
  const auto some = [&](int64_t i, int64_t end) {
    for (; i + kWidth <= end; i += kWidth) store(out + i, value(row.at(i)));
    if (i < end) store_part(out + i, value(row.part(i, static_cast<int>(end - i))), static_cast<int>(end - i));
  };
  const int64_t lead = streams ? std::min<int64_t>((64 - reinterpret_cast<uintptr_t>(out) % 64) % 64 / sizeof(Out), vocab) : 0;
  some(0, lead);
  int64_t i = lead;
  if constexpr (!kMapped && std::is_same_v<In, Out>) {
    using S = Step<In>;
    for (; i + S::kElements <= vocab; i += S::kElements) {
      prefetch(row.x + i + kAhead);
      S step(row.x + i);
      for (Floats& v : step.v) v = weight(v);
      if (streams) step.stream_to(out + i);
      else step.store_to(out + i);
    }
  } else {
    for (; i + kWidth <= vocab; i += kWidth) {
      prefetch(row.x + i + kAhead);
      if (streams) stream(out + i, value(row.at(i)));
      else store(out + i, value(row.at(i)));
    }
  }
  if (streams) finish_streams();
  some(i, vocab);
}

template <class In, class Out, bool kMapped>
void weigh(const Row<In, kMapped>& row, Out* out, int64_t vocab, Weights weights, bool streams) {
  const int64_t target = weights.target;
  if constexpr (kMapped)  // now: out may be the logits
    if (target >= 0) weights.at_target *= row.part(target, 1).slope[0];
  if (ConstantWeight::can(weights)) weigh_by(row, out, vocab, ConstantWeight(weights), streams);
  else weigh_by(row, out, vocab, LinearWeight(weights), streams);
  if (target >= 0) store_part(out + target, broadcast(static_cast<float>(weights.at_target)), 1);
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
