// The divergence of rows of logits from a teacher's, and its gradient: see arguments.h. A row belongs to one thread.
//
// Floor: both rows read, and a third written by backward. Each pass but the first finds them in the cache.
#define RLKERNEL_FUSED
#include "rlkernel/divergence/arguments.h"

#include <cmath>
#include <limits>
#include <memory>
#include <type_traits>

#include "vectors.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int kLanes = 32, kSums = kLanes / kWidth;
constexpr int64_t kBlock = 2048;  // elements that are summed in fp32: 64 in each lane
constexpr double kNear = 1.0 / 16;  // KL below which a row is read again for its digits
constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

enum class Kind { forward, reverse, mixed };

// x where it counts, else 0: a weight of 0 makes nothing of what may be infinite beside it.
Floats counted(Floats weight, Floats x) { return where(above(weight, Floats{}), weight * x); }

template <class T>
Floats behind_it(const T* x, int64_t i, int count) {
  return count == kWidth ? load(x + i) : fill_tail(load_part(x + i, count), count, -kInf);
}

// NaN is passed over: its exponential says so.
template <class T>
float largest_of(const T* x, int64_t length) {
  Floats peaks[kSums];
  for (Floats& peak : peaks) peak = broadcast(-kInf);
  int sum = 0;
  each_vector(length, [&](int64_t i, int count) {
    peaks[sum] = max(behind_it(x, i, count), peaks[sum]);
    sum = (sum + 1) % kSums;
  });
  for (sum = 1; sum < kSums; ++sum) peaks[0] = max(peaks[0], peaks[sum]);
  return largest(peaks[0]);
}

// kCount sums over a row. `add(sums, i, count)` adds the elements of a vector, each to its own lane of each sum.
template <int kCount, class Add>
void sum_row(int64_t length, double (&totals)[kCount], Add add) {
  double lanes[kCount][kLanes] = {};
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    const int64_t end = begin + kBlock < length ? begin + kBlock : length;
    Floats narrow[kSums][kCount] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
      for (int sum = 0; sum < kSums; ++sum) add(narrow[sum], i + sum * kWidth, kWidth);
    int sum = 0;
    for (; i + kWidth <= end; i += kWidth) add(narrow[sum++], i, kWidth);
    if (i < end) add(narrow[sum], i, static_cast<int>(end - i));
    for (int k = 0; k < kCount; ++k)
      for (int lane = 0; lane < kLanes; ++lane) lanes[k][lane] += narrow[lane / kWidth][k][lane % kWidth];
  }
  for (int k = 0; k < kCount; ++k) {
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int lane = 0; lane < half; ++lane) lanes[k][lane] += lanes[k][lane + half];
    totals[k] = lanes[k][0];
  }
}

// A row of each whose softmax is known: p = exp((x - peak) / T) / sum.
template <class T>
struct Known {
  const T *x, *y;
  Floats peak, teacher_peak, inverse_t, apart, inverse_sum, inverse_teacher_sum;
  ScaledExp exp;

  Known(const T* x, const T* y, double temperature, float peak, float teacher_peak, double sum, double teacher_sum)
      : x(x), y(y), peak(broadcast(peak)), teacher_peak(broadcast(teacher_peak)),
        inverse_t(broadcast(static_cast<float>(1 / temperature))),
        apart(broadcast(static_cast<float>(std::log(sum) - std::log(teacher_sum)))),
        inverse_sum(broadcast(static_cast<float>(1 / sum))),
        inverse_teacher_sum(broadcast(static_cast<float>(1 / teacher_sum))), exp(temperature) {}

  struct Value {
    Floats p, q, ahead;  // ahead = log q - log p, with the digits of a small one
  };

  Value at(int64_t i, int count) const {
    const Floats d = behind_it(x, i, count) - peak, other = behind_it(y, i, count) - teacher_peak;
    return {exp(exp.cut(d)) * inverse_sum, exp(exp.cut(other)) * inverse_teacher_sum, fma(other - d, inverse_t, apart)};
  }
};

// (exp(x) - 1 - x) / x^2 of an x within 0.35 of 0.
inline Floats exp_series(Floats x) {
  Floats series = broadcast(1.0f / 5040);
  series = fma(series, x, broadcast(1.0f / 720));
  series = fma(series, x, broadcast(1.0f / 120));
  series = fma(series, x, broadcast(1.0f / 24));
  series = fma(series, x, broadcast(1.0f / 6));
  return fma(series, x, broadcast(0.5f));
}

// exp(x) - 1 with the digits of a small one: its series within 0.35, where 1 takes some away. `e` is exp(x).
inline Floats exp_less_one(Floats x, Floats e) { return abs(x) < 0.35f ? fma(x * x, exp_series(x), x) : e - 1.0f; }

// weight * ahead + (other - weight), with ahead = log weight - log other: what an element adds to KL(weight || other), as both add
// up to 1. None is below 0, and a small one has its digits.
inline Floats surplus(Floats weight, Floats other, Floats ahead) {
  return abs(ahead) < 0.35f ? weight * (ahead * ahead) * exp_series(-ahead) : counted(weight, ahead) + (other - weight);
}

// How far p and q are ahead of m = (1 - beta) p + beta q, by logarithms. The larger of m's two parts is taken out of it: what p,
// or q, is ahead is then no difference, and keeps its digits where it is small, as of equal rows and of a beta near 0 or 1.
struct Mixture {
  Floats beta, rest_of_1, level;  // of the fp64 beta; above the level, log((1 - beta) / beta), the teacher's part is the larger
  ScaledExp exp;

  explicit Mixture(double beta)
      : beta(broadcast(static_cast<float>(beta))), rest_of_1(broadcast(static_cast<float>(1 - beta))),
        level(broadcast(static_cast<float>(std::log1p(-beta) - std::log(beta)))), exp(1) {}

  struct Ahead {
    Floats student, teacher;
  };

  Ahead of(Floats ahead) const {
    const Floats apart = ahead > level ? -ahead : ahead;  // of the other one, from the one that is taken out
    const Floats share = ahead > level ? rest_of_1 : beta, larger = ahead > level ? beta : rest_of_1;
    const Floats e = exp(exp.cut(apart > 88.0f ? broadcast(88.0f) : apart));
    const Floats less = share * exp_less_one(apart, e), sum = 1.0f + less;
    const Floats rest = max(fma(share, e, larger), broadcast(std::numeric_limits<float>::min()));
    // near 1 what 1 + less has lost is found again; far from it `less` has lost the larger one's share
    const Floats lost = less > -0.5f ? (less - (sum - 1.0f)) / sum : broadcast(0.0f);
    const Floats near = -(log(less > -0.5f ? sum : rest) + lost), far = near + apart;
    return {ahead > level ? far : near, ahead > level ? near : far};
  }
};

template <class T, Kind kKind, bool kEntropy>
void forward_row(const DivergenceForward& f, int64_t r, const T* x, const T* y) {
  const DivergenceRows& pair = f.pair;
  const double t = pair.temperature, beta = pair.beta;
  const float peak = largest_of(x, pair.vocab), teacher_peak = largest_of(y, pair.vocab);
  const ScaledExp exp(t);
  const Floats top = broadcast(peak), teacher_top = broadcast(teacher_peak);
  // sums of exp, that of the student's exp times its difference to the maximum, and that of the gaps
  enum { kStudent, kTeacher, kOwn, kGap, kAll };
  double sums[kAll];
  sum_row<kAll>(pair.vocab, sums, [&](Floats (&sum)[kAll], int64_t i, int count) {
    const Floats d = behind_it(x, i, count) - top, other = behind_it(y, i, count) - teacher_top;
    const Floats e = exp(exp.cut(d)), of_other = exp(exp.cut(other));
    sum[kStudent] += e;
    sum[kTeacher] += of_other;
    if constexpr (kEntropy) sum[kOwn] += counted(e, d);
    if constexpr (kKind == Kind::forward) sum[kGap] += counted(of_other, other - d);
    if constexpr (kKind == Kind::reverse) sum[kGap] += counted(e, d - other);
  });
  const double log_sum = std::log(sums[kStudent]), teacher_log_sum = std::log(sums[kTeacher]);
  f.row_max[r] = peak;
  f.sum_exp[r] = static_cast<float>(sums[kStudent]);
  f.teacher_max[r] = teacher_peak;
  f.teacher_sum_exp[r] = static_cast<float>(sums[kTeacher]);
  if constexpr (kEntropy) f.entropy[r] = static_cast<float>(log_sum - sums[kOwn] / t / sums[kStudent]);
  // of the sums that backward is left: what it measures from student_part is then 0 where it should be
  const Known<T> known(x, y, t, peak, teacher_peak, f.sum_exp[r], f.teacher_sum_exp[r]);
  if constexpr (kKind != Kind::mixed) {
    constexpr bool kForward = kKind == Kind::forward;
    const double apart = kForward ? log_sum - teacher_log_sum : teacher_log_sum - log_sum;
    double found[2] = {sums[kGap] / t / sums[kForward ? kTeacher : kStudent] + apart};
    found[1] = found[0];
    if (found[0] < kNear)  // of a difference of two numbers that large little is left
      sum_row<2>(pair.vocab, found, [&](Floats (&sum)[2], int64_t i, int count) {
        const auto [p, q, ahead] = known.at(i, count);
        sum[0] += kForward ? surplus(q, p, ahead) : surplus(p, q, -ahead);
        if constexpr (!kForward) sum[1] += counted(p, -ahead);
      });
    f.divergence[r] = static_cast<float>(found[0]);
    if constexpr (!kForward) f.student_part[r] = static_cast<float>(found[1]);
  } else {
    const Mixture mixture(beta);
    double parts[2];
    sum_row<2>(pair.vocab, parts, [&](Floats (&sum)[2], int64_t i, int count) {
      const auto [p, q, ahead] = known.at(i, count);
      const auto of = mixture.of(ahead);
      sum[0] += counted(p, of.student);
      sum[1] += counted(q, of.teacher);
    });
    const double nan = sums[kStudent] * 0 + sums[kTeacher] * 0;  // which counted() passes over
    f.student_part[r] = static_cast<float>(parts[0] + nan);
    f.divergence[r] = static_cast<float>((1 - beta) * parts[0] + beta * parts[1] + nan);
  }
}

template <class T>
void fill(T* out, int64_t length, float value) {
  each_vector(length, [&](int64_t i, int count) { store(out + i, broadcast(value), count); });
}

template <class T, Kind kKind>
void backward_row(const DivergenceBackward& b, int64_t r, const T* x, const T* y, T* out) {
  const DivergenceRows& pair = b.pair;
  const float part = kKind == Kind::forward ? 0 : b.student_part[r];
  if (!(b.sum_exp[r] > 0 && b.teacher_sum_exp[r] > 0 && std::fabs(part) < kInf))
    return fill(out, pair.vocab, kNan);
  const Known<T> known(x, y, pair.temperature, b.row_max[r], b.teacher_max[r], b.sum_exp[r], b.teacher_sum_exp[r]);
  const Mixture mixture(pair.beta);
  const double weight = kKind == Kind::mixed ? 1 - pair.beta : 1;
  const Floats scale = broadcast(static_cast<float>(b.grad[r] * weight / pair.temperature)), beside = broadcast(part);
  each_vector(pair.vocab, [&](int64_t i, int count) {
    const auto [p, q, ahead] = known.at(i, count);
    Floats d;
    if constexpr (kKind == Kind::forward) d = p - q;
    if constexpr (kKind == Kind::reverse) d = counted(p, -ahead - beside);
    if constexpr (kKind == Kind::mixed) d = counted(p, mixture.of(ahead).student - beside);
    store(out + i, d * scale, count);
  });
}

bool counts(const DivergenceRows& pair, int64_t r) { return pair.mask == nullptr || pair.mask[r] != 0; }

void forget_row(const DivergenceForward& f, int64_t r) {
  for (float* x : {f.divergence, f.entropy, f.row_max, f.sum_exp, f.teacher_max, f.teacher_sum_exp, f.student_part})
    if (x != nullptr) x[r] = 0;
}

// Calls body(r, rows) for all rows, with memory of the thread for what it asks of it. Dealt out in turn: rows that do not count
// cost nothing, and come in runs.
template <class Memory, class Body>
void each_row(const DivergenceRows& pair, Body body) {
#pragma omp parallel if (pair.rows > 1 && pair.rows * pair.vocab >= kParallel)
  {
    const FlushDenormals scope(FlushDenormals::operands);
    Memory memory(pair);
#pragma omp for schedule(static, 1)
    for (int64_t r = 0; r < pair.rows; ++r) body(r, memory);
  }
}

// Rows of one type as they lie.
template <class T>
struct AsTheyLie {
  using Type = T;
  const DivergenceRows& pair;

  explicit AsTheyLie(const DivergenceRows& pair) : pair(pair) {}
  const T* student(int64_t r) const { return row_at<const T>(pair.student, r); }
  const T* teacher(int64_t r) const { return row_at<const T>(pair.teacher, r); }
  T* into(const StridedRows& out, int64_t r) const { return row_at<T>(out, r); }
  void store_row(const StridedRows&, int64_t) const {}
};

// Rows of two types, in fp32: a copy of each, as the bits are the same and few calls have them.
struct Widened {
  using Type = float;
  const DivergenceRows& pair;
  std::unique_ptr<float[]> rows;

  explicit Widened(const DivergenceRows& pair) : pair(pair), rows(new float[3 * pair.vocab]) {}

  const float* student(int64_t r) { return widen(pair.student, pair.student_dtype, r, rows.get()); }
  const float* teacher(int64_t r) { return widen(pair.teacher, pair.teacher_dtype, r, rows.get() + pair.vocab); }
  float* into(const StridedRows&, int64_t) { return rows.get() + 2 * pair.vocab; }

  void store_row(const StridedRows& out, int64_t r) const {
    const float* found = rows.get() + 2 * pair.vocab;
    with_type(pair.student_dtype, [&](auto type) {
      auto* to = row_at<decltype(type)>(out, r);
      each_vector(pair.vocab, [&](int64_t i, int count) { store(to + i, load(found + i, count), count); });
    });
  }

 private:
  const float* widen(const StridedRows& from, Dtype dtype, int64_t r, float* to) const {
    with_type(dtype, [&](auto type) {
      const auto* x = row_at<const decltype(type)>(from, r);
      each_vector(pair.vocab, [&](int64_t i, int count) { store(to + i, load(x + i, count), count); });
    });
    return to;
  }
};

// Calls body with a constant of the kind.
template <class Body>
auto with_kind(double beta, Body body) {
  if (beta == 0) return body(std::integral_constant<Kind, Kind::forward>{});
  if (beta == 1) return body(std::integral_constant<Kind, Kind::reverse>{});
  return body(std::integral_constant<Kind, Kind::mixed>{});
}

template <class Rows>
void forward(const DivergenceForward& f) {
  with_kind(f.pair.beta, [&](auto kind) {
    using T = typename Rows::Type;
    constexpr Kind kKind = decltype(kind)::value;
    const auto row = f.entropy == nullptr ? forward_row<T, kKind, false> : forward_row<T, kKind, true>;
    each_row<Rows>(f.pair, [&](int64_t r, Rows& rows) {
      if (counts(f.pair, r)) row(f, r, rows.student(r), rows.teacher(r));
      else forget_row(f, r);
    });
  });
}

template <class Rows>
void backward(const DivergenceBackward& b) {
  with_kind(b.pair.beta, [&](auto kind) {
    using T = typename Rows::Type;
    constexpr Kind kKind = decltype(kind)::value;
    each_row<Rows>(b.pair, [&](int64_t r, Rows& rows) {
      T* out = rows.into(b.out, r);
      if (counts(b.pair, r) && b.grad[r] != 0) backward_row<T, kKind>(b, r, rows.student(r), rows.teacher(r), out);
      else fill(out, b.pair.vocab, 0);
      rows.store_row(b.out, r);
    });
  });
}

// Calls body with the rows' way to memory.
template <class Body>
void with_rows(const DivergenceRows& pair, Body body) {
  if (pair.student_dtype != pair.teacher_dtype) return body(static_cast<Widened*>(nullptr));
  with_type(pair.student_dtype, [&](auto type) { body(static_cast<AsTheyLie<decltype(type)>*>(nullptr)); });
}

}  // namespace

int divergence_forward(const DivergenceForward& f) {
  with_rows(f.pair, [&](auto* rows) { forward<std::remove_pointer_t<decltype(rows)>>(f); });
  return 0;
}

int divergence_backward(const DivergenceBackward& b) {
  with_rows(b.pair, [&](auto* rows) { backward<std::remove_pointer_t<decltype(rows)>>(b); });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
