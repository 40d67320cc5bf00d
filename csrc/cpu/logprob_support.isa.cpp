// Log-probability, entropy and log-sum-exp over the support of each row, and their gradient there. A row belongs to one
// thread, and its sums are sums of integers: its bits depend neither on other rows nor on the order of its ids.
#include <cmath>
#include <limits>

#include "factor_exp.h"
#include "rlkernel/logprob/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 13;  // entries from which waking the other threads pays
constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

typedef int64_t Longs __attribute__((vector_size(kWidth * 8)));

// The nearest integers, ties to even, of numbers below 2^62.
inline Longs nearest(Floats x) {
  const Floats magic = broadcast(8388608.0f);  // 2^23: from there on every float is an integer
  const Floats size = abs(x);
  const Floats rounded = copy_sign((size + magic) - magic, x);
  return __builtin_convertvector(size < magic ? rounded : x, Longs);
}

inline int64_t total(Longs x) {
  int64_t sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}

inline float nan_of(float) { return kNan; }
inline fp16 nan_of(fp16) { return {0x7e00}; }
inline bf16 nan_of(bf16) { return {0x7fc0}; }

double row_temperature(const LogprobSupport& s, int64_t r) {
  return s.temperatures != nullptr ? s.temperatures[r] : s.temperature;
}

// The largest of `count` values, and whether one of them is NaN.
struct Peak {
  float max;
  bool nan;
};

template <class T>
Peak peak_of(const T* values, int64_t count) {
  Floats peak = broadcast(-kInf);
  Bits nan = {};
  int64_t i = 0;
  const auto see = [&](Floats y) {
    nan |= (Bits)(y != y);
    peak = max(y, peak);
  };
  for (; i + kWidth <= count; i += kWidth) see(load(values + i));
  if (i < count) see(fill_tail(load_part(values + i, static_cast<int>(count - i)), static_cast<int>(count - i), -kInf));
  return {largest(peak), any(nan)};
}

template <class T>
void forward_row(const LogprobSupportForward& f, int64_t r) {
  const LogprobSupport& s = f.support;
  const int64_t begin = s.offsets[r], count = s.offsets[r + 1] - begin, target = s.target_ids[r];
  if (count <= 0 || target == s.ignore_index) {
    f.logprobs[r] = f.lse[r] = f.row_max[r] = f.log_sum[r] = 0;
    if (f.entropy != nullptr) f.entropy[r] = 0;
    return;
  }
  T* values = static_cast<T*>(f.values) + begin;
  const int32_t* ids = s.ids + begin;
  int64_t place = -1;  // of the target
  if (f.logits != nullptr) {
    const T* x = static_cast<const T*>(f.logits) + r / f.inner * f.outer_stride + r % f.inner * f.inner_stride;
    for (int64_t i = 0; i < count; ++i) {
      values[i] = ids[i] >= 0 && ids[i] < s.vocab ? x[ids[i]] : nan_of(T{});
      if (ids[i] == target) place = i;
    }
  } else {
    for (int64_t i = 0; i < count; ++i)
      if (ids[i] == target) place = i;
  }

  const Peak peak = peak_of(values, count);
  if (peak.nan || !(std::fabs(peak.max) < kInf)) {
    f.logprobs[r] = f.lse[r] = f.row_max[r] = f.log_sum[r] = kNan;
    if (f.entropy != nullptr) f.entropy[r] = kNan;
    return;
  }
  const double temperature = row_temperature(s, r);
  const FactorExp exp(temperature);
  const Floats max_y = broadcast(peak.max), unit = broadcast(kMassOne);
  const Floats inverse = broadcast(static_cast<float>(1 / temperature));
  Longs mass = {}, weighted = {};
  const auto add = [&](Floats y) {
    const Floats d = exp.cut(y - max_y);
    const Floats e = exp(d);
    mass += nearest(e * unit);
    if (f.entropy != nullptr) weighted += nearest(e * (d * inverse) * unit);
  };
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) add(load(values + i));
  const int rest = static_cast<int>(count - i);
  if (rest) add(fill_tail(load_part(values + i, rest), rest, -kInf));

  const double sum = static_cast<double>(total(mass));
  const double log_sum = std::log(sum / kMassOne);
  f.logprobs[r] = -kInf;
  if (place >= 0) {
    const double y = load_part(values + place, 1)[0];
    f.logprobs[r] = static_cast<float>((y - peak.max) / temperature - log_sum);
  }
  f.lse[r] = static_cast<float>(peak.max / temperature + log_sum);
  f.row_max[r] = peak.max;
  f.log_sum[r] = static_cast<float>(log_sum);
  if (f.entropy != nullptr) f.entropy[r] = static_cast<float>(log_sum - static_cast<double>(total(weighted)) / sum);
}

template <class In, class Out>
void backward_row(const LogprobSupportBackward& b, int64_t r) {
  const LogprobSupport& s = b.support;
  const int64_t begin = s.offsets[r], count = s.offsets[r + 1] - begin, target = s.target_ids[r];
  if (count <= 0 || target == s.ignore_index) return;
  const float logprob = b.logprobs[r];
  // a token of probability 0 cannot be made likelier by a small step
  const double grad_logprob = b.grad_logprobs != nullptr && logprob != -kInf ? b.grad_logprobs[r] : 0;
  const double grad_entropy = b.grad_entropy != nullptr ? b.grad_entropy[r] : 0;
  const double grad_lse = b.grad_lse != nullptr ? b.grad_lse[r] : 0;
  if (grad_logprob == 0 && grad_entropy == 0 && grad_lse == 0) return;

  const double temperature = row_temperature(s, r), log_sum = b.log_sum[r], scale = 1 / temperature;
  const double entropy = grad_entropy != 0 ? b.entropy[r] : 0;
  // p * (g_lse - g_logprob - g_entropy * (log p + H)) / T, with log p = d / T - log_sum and p = exp(d / T) / exp(log_sum)
  const double inverse_sum = std::exp(-log_sum) * scale;
  const double constant = (grad_lse - grad_logprob - grad_entropy * (entropy - log_sum)) * inverse_sum;
  const double linear = -grad_entropy * inverse_sum;  // times d / T: linear / T overflows before d / T does
  const double p = std::exp(static_cast<double>(logprob));
  double at_target = -grad_logprob * std::expm1(static_cast<double>(logprob)) + grad_lse * p;
  if (p != 0) at_target -= grad_entropy * p * (logprob + entropy);
  at_target *= scale;

  const FactorExp exp(temperature);
  const Floats max_y = broadcast(b.row_max[r]);
  const Floats c0 = broadcast(static_cast<float>(constant)), c1 = broadcast(static_cast<float>(linear));
  const Floats inverse = broadcast(static_cast<float>(scale));
  const In* values = static_cast<const In*>(b.values) + begin;
  const int32_t* ids = s.ids + begin;
  Out* out = static_cast<Out*>(b.out);
  out += b.scattered ? r / b.inner * b.out_outer_stride + r % b.inner * b.out_inner_stride : begin;
  for (int64_t i = 0; i < count; i += kWidth) {
    const int part = static_cast<int>(count - i < kWidth ? count - i : kWidth);
    const Floats d = exp.cut((part == kWidth ? load(values + i) : load_part(values + i, part)) - max_y);
    Floats gradient = exp(d) * fma(d * inverse, c1, c0);
    for (int lane = 0; lane < part; ++lane)
      if (ids[i + lane] == target) gradient[lane] = static_cast<float>(at_target);
    if (!b.scattered) {
      store_part(out + i, gradient, part);
      continue;
    }
    Out lanes[kWidth];
    store(lanes, gradient);
    for (int lane = 0; lane < part; ++lane) {
      const int32_t id = ids[i + lane];
      if (id >= 0 && id < s.vocab) out[id] = lanes[lane];
    }
  }
}

template <class Arguments>
void each_row(const LogprobSupport& s, void (*body)(const Arguments&, int64_t), const Arguments& arguments) {
  const int64_t entries = s.rows > 0 ? s.offsets[s.rows] - s.offsets[0] : 0;
#pragma omp parallel if (s.rows > 1 && entries >= kParallel)
  {
    const FlushDenormals scope;
#pragma omp for schedule(dynamic, 16)
    for (int64_t r = 0; r < s.rows; ++r) body(arguments, r);
  }
}

}  // namespace

int logprob_support_forward(const LogprobSupportForward& f) {
  with_type(f.dtype, [&](auto in) { each_row(f.support, forward_row<decltype(in)>, f); });
  return 0;
}

int logprob_support_backward(const LogprobSupportBackward& b) {
  with_type(b.dtype, [&](auto in) {
    with_type(b.out_dtype, [&](auto out) { each_row(b.support, backward_row<decltype(in), decltype(out)>, b); });
  });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
