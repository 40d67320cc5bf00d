// The mathematics of the policy loss, once for every device: F is a float on a GPU and a vector of floats on a CPU. The
// includer names its namespace RLKERNEL_SPACE and provides for F: fused(a, b, c) = a * b + c, power_of_two(n), magnitude(x).
// Conditions are combined with & and |, and select with ?:, which vectors and scalars share.
#include "rlkernel/policy_loss.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define RLKERNEL_INLINE __device__ __forceinline__
#else
#define RLKERNEL_INLINE inline __attribute__((always_inline))
#endif

namespace RLKERNEL_SPACE {

template <class F>
RLKERNEL_INLINE F spread(float x) { return F{} + x; }

template <class F>
RLKERNEL_INLINE F smaller(F a, F b) { return a < b ? a : b; }  // b where either is NaN

template <class F>
RLKERNEL_INLINE F larger(F a, F b) { return a > b ? a : b; }

template <class F>
struct Exp {
  F exp, minus_one;  // exp(x) and exp(x) - 1, which keeps its digits as x -> 0
};

// Within 2 ulp; infinity above the range, exactly 0 below 2^-125, NaN at NaN.
template <class F>
RLKERNEL_INLINE Exp<F> exp_of(F x) {
  const float infinite = __builtin_huge_valf();
  const F lowest = spread<F>(-86.6f), highest = spread<F>(88.72283f);
  const F c = larger(lowest, smaller(highest, x));
  const F magic = spread<F>(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F n = fused(c, spread<F>(1.44269504f), magic) - magic;
  F r = fused(n, spread<F>(-0.693359375f), c);
  r = fused(n, spread<F>(2.12194440e-4f), r);
  F q = fused(spread<F>(1.991993e-4f), r, spread<F>(1.3945091e-3f));
  q = fused(q, r, spread<F>(8.3332649e-3f));
  q = fused(q, r, spread<F>(4.1666303e-2f));
  q = fused(q, r, spread<F>(1.6666667e-1f));
  q = fused(q, r, spread<F>(0.5f));
  q = fused(q * r, r, r);
  const F half = power_of_two(n - 1.0f);  // n reaches 128
  F e = (half + half * q) * 2.0f, m = fused(half, q, half - 0.5f) * 2.0f;
  e = x > highest ? spread<F>(infinite) : x < lowest ? F{} : x != x ? x : e;
  m = x > highest ? spread<F>(infinite) : x < lowest ? spread<F>(-1.0f) : x != x ? x : m;
  return {e, m};
}

// The logarithm of a token's importance ratio, and 1 where the gradient passes through it, else 0.
template <class F>
struct LogRatio {
  F value, passes;
};

template <class F>
RLKERNEL_INLINE LogRatio<F> bounded(F x, float bound) {
  const F top = spread<F>(bound), bottom = spread<F>(-bound);
  const F value = x > top ? top : x < bottom ? bottom : x;
  return {value, value == x ? spread<F>(1.0f) : x != x ? x : F{}};
}

// gmpo clips each token's logarithm before the mean, on the side that the advantage favours.
template <class F>
RLKERNEL_INLINE LogRatio<F> log_ratio(const PolicyLossRule& rule, F difference, F advantage) {
  if (rule.term != Term::gmpo) return {difference, spread<F>(1.0f)};
  const F low = spread<F>(rule.low), high = spread<F>(rule.high), one = spread<F>(1.0f), zero{};
  const F up = difference > high ? high : difference, down = difference < low ? low : difference;
  const F value = advantage > zero ? up : advantage < zero ? down : zero;
  return {value, ((value == difference) & (advantage != zero)) ? one : zero};
}

template <class F>
struct Weighing {
  F weight, kept;
};

// The weight of the rollout correction; `log_weight` is the token's, the sequence's sum or its mean.
template <class F>
RLKERNEL_INLINE Weighing<F> weigh(const PolicyLossRule& rule, F log_weight, bool vetoed) {
  const F one = spread<F>(1.0f), zero{};
  if (rule.correction == Correction::none) return {one, one};
  if (vetoed) return {zero, zero};
  const F low = spread<F>(rule.weight_low), high = spread<F>(rule.weight_high), w = exp_of(log_weight).exp;
  const F inside = ((w >= low) & (w <= high)) ? one : zero;
  if (rule.verdict == Verdict::truncate) return {w > high ? high : w < low ? low : w, one};
  if (rule.verdict == Verdict::mask) return {inside > zero ? w : zero, inside};
  return {inside, inside};
}

template <class F>
struct Estimate {
  F value, slope;  // slope = d value / d logprob
};

template <class F>
RLKERNEL_INLINE Estimate<F> kl_to_reference(const PolicyLossRule& rule, F d) {
  const F one = spread<F>(1.0f), zero{};
  Estimate<F> kl{zero, zero};
  if (rule.kl == Kl::k1) kl = {d, one};
  if (rule.kl == Kl::abs) kl = {magnitude(d), d > zero ? one : d < zero ? -one : d};
  if (rule.kl == Kl::k2) kl = {d * d * 0.5f, d};
  if (rule.kl == Kl::k3) {
    const F m = exp_of(-d).minus_one;
    kl = {m + d, -m};
  }
  if (rule.kl_gradient_of_k2) kl.slope = d;
  return kl;
}

template <class F>
struct Term_ {
  F value, direct, chain;  // direct = d value / d logprob at a fixed ratio, chain = d value / d log ratio
  F low, high, far;        // 1 where clipped
};

template <class F>
RLKERNEL_INLINE Term_<F> term(const PolicyLossRule& rule, F ratio, F advantage, F logprob, F old_logprob) {
  const F one = spread<F>(1.0f), zero{}, low = spread<F>(rule.low), high = spread<F>(rule.high);
  const auto positive = advantage > zero, negative = advantage < zero;
  Term_<F> t{zero, zero, zero, zero, zero, zero};
  if (rule.term == Term::clipped) {
    const F capped = ratio > rule.delta ? spread<F>(rule.delta) : ratio;
    const F clipped = ratio > high ? high : ratio < low ? low : ratio;
    const F plain = -capped * advantage, bounded = -clipped * advantage;
    const F loss = bounded > plain ? bounded : plain, limit = -advantage * (F{} + rule.dual);
    const auto dual = negative & (loss > limit);
    const auto frozen = (bounded > plain) | dual | (ratio > rule.delta);
    t.value = dual ? limit : loss;
    t.chain = frozen ? zero : -ratio * advantage;
    t.low = (negative & (ratio < low)) ? one : zero;
    t.high = (positive & (ratio > high)) ? one : zero;
    t.far = (dual | (negative & (ratio > rule.delta))) ? one : zero;
  } else if (rule.term == Term::cispo) {
    const F clipped = ratio > high ? high : ratio < low ? low : ratio;
    t.direct = -clipped * advantage;
    t.value = t.direct * logprob;
    t.low = ratio < low ? one : zero;
    t.high = ratio > high ? one : zero;
  } else if (rule.term == Term::reinforce) {
    t.direct = -advantage;
    t.value = t.direct * logprob;
  } else if (rule.term == Term::sapo) {
    const F tau = positive ? spread<F>(rule.tau_positive) : spread<F>(rule.tau_negative);
    const F e = exp_of(-magnitude(tau * (ratio - 1.0f))).exp;  // in (0, 1]: nothing overflows
    const F inverse = 1.0f / (1.0f + e), gate = ratio >= one ? inverse : e * inverse;
    t.value = -advantage * gate * 4.0f / tau;
    t.chain = e > zero ? -advantage * 4.0f * e * inverse * inverse * ratio : zero;
  } else if (rule.term == Term::gmpo) {
    t.value = -ratio * advantage;
    t.chain = t.value;
    const F d = logprob - old_logprob;
    t.low = (negative & (d < low)) ? one : zero;
    t.high = (positive & (d > high)) ? one : zero;
  } else {
    const F change = exp_of(logprob).exp - exp_of(old_logprob).exp;
    const auto too_high = positive & (change > high), too_low = (advantage <= zero) & (change < low);
    const F cut = ratio > rule.dual ? spread<F>(rule.dual) : ratio;
    t.direct = too_high | too_low ? zero : -cut * advantage;
    t.value = t.direct == zero ? zero : t.direct * logprob;
    t.low = too_low ? one : zero;
    t.high = too_high ? one : zero;
    t.far = ratio > rule.dual ? one : zero;
  }
  return t;
}

// Where a sequence begins, and the one before it ends. Offsets that nobody checked lead to no illegal access.
RLKERNEL_INLINE int64_t offset_of(const PolicyLoss& p, int64_t row) {
  if (p.cu_seqlens == nullptr) return row * p.length;
  const int64_t offset = p.cu_seqlens[row];
  return offset < 0 ? 0 : offset > p.length ? p.length : offset;
}

// One sequence. `team` is the threads or the vector that share it: each(body) visits its tokens, sum() and smallest() join
// what they found. Every lane runs this function; the order of the sums follows from the place in the sequence alone.
template <class Team>
RLKERNEL_INLINE void policy_loss_sequence(const PolicyLoss& p, int64_t row, Team& team) {
  using F = typename Team::Value;
  using At = typename Team::At;
  const PolicyLossRule& rule = p.rule;
  const F one = spread<F>(1.0f), zero{};
  const bool by_token = rule.correction == Correction::token;

  float log_weight = 0;
  bool vetoed = false;
  if (rule.correction != Correction::none) {
    typename Team::template Sums<2> sums;
    F least = zero;
    team.each(sums, [&](At at) {
      const auto present = at.mask(p.mask);
      const F d = present ? at.load(p.old_logprobs) - at.load(p.rollout_logprobs) : zero;
      sums.add(0, d);
      sums.add(1, present ? one : zero);
      least = d < least ? d : least;
    });
    team.finish(sums);
    const double count = sums.total(1) > 1 ? sums.total(1) : 1;
    log_weight = static_cast<float>(rule.correction == Correction::geometric ? sums.total(0) / count : sums.total(0));
    vetoed = team.smallest(least) < rule.log_veto;
  }
  const auto weighing = [&](At at, auto present) {
    F x = spread<F>(log_weight);
    if (by_token) x = present ? at.load(p.old_logprobs) - at.load(p.rollout_logprobs) : zero;
    return weigh(rule, x, vetoed);
  };
  const auto used = [&](At at) -> typename Team::Mask {
    const auto present = at.mask(p.mask);
    if (!rule.shrink) return present;
    return static_cast<typename Team::Mask>(present & (weighing(at, present).kept > zero));
  };
  const auto advantage_of = [&](At at, auto present) -> F {
    const F advantage = p.advantage_per_token ? at.load(p.advantages) : spread<F>(p.advantages[row]);
    return present ? advantage : zero;
  };
  const auto difference = [&](At at, auto present) -> F {
    if (p.old_logprobs == nullptr) return zero;
    return present ? at.load(p.logprobs) - at.load(p.old_logprobs) : zero;
  };

  double count = 0, mean = 0;
  const bool whole = rule.level != Level::token;
  if (whole || rule.aggregation == Aggregation::sequence_means) {
    typename Team::template Sums<2> sums;
    team.each(sums, [&](At at) {
      const auto present = used(at);
      sums.add(0, present ? one : zero);
      if (whole) sums.add(1, log_ratio(rule, difference(at, present), advantage_of(at, present)).value);
    });
    team.finish(sums);
    count = sums.total(0) > 1 ? sums.total(0) : 1;
    mean = sums.total(1) / count;
  }
  const LogRatio<F> of_sequence = bounded(spread<F>(static_cast<float>(mean)), rule.log_clip);
  const float share = rule.aggregation == Aggregation::sequence_means ? static_cast<float>(1 / count) : 1.0f;

  typename Team::template Sums<kSums + 1> sums;
  constexpr int kChain = kSums;
  F largest = zero;
  team.each(sums, [&](At at) {
    const auto present = used(at);
    const F advantage = advantage_of(at, present), d = difference(at, present);
    const F logprob = present ? at.load(p.logprobs) : zero;
    F old_logprob = logprob;
    if (p.old_logprobs != nullptr) old_logprob = present ? at.load(p.old_logprobs) : zero;
    const LogRatio<F> own = log_ratio(rule, d, advantage);
    LogRatio<F> l = whole ? of_sequence : bounded(own.value, rule.log_clip);
    if (!whole || rule.level == Level::sequence_token) l.passes = l.passes * own.passes;
    const F ratio = exp_of(l.value).exp;
    Term_<F> t = term(rule, ratio, advantage, logprob, old_logprob);
    const Weighing<F> w = weighing(at, present);
    if (rule.correction != Correction::none) {
      t.value = w.kept > zero ? t.value * w.weight : zero;
      t.direct = w.kept > zero ? t.direct * w.weight : zero;
      t.chain = w.kept > zero ? t.chain * w.weight : zero;
    }
    if (rule.kl != Kl::none) {
      const F to_reference = present ? logprob - at.load(p.ref_logprobs) : zero;
      Estimate<F> kl = kl_to_reference(rule, to_reference);
      if (rule.kl_times_ratio) {
        kl = {kl.value * ratio, kl.slope * ratio};
        t.chain += rule.beta * kl.value;
      }
      t.value += rule.beta * kl.value;
      t.direct += rule.beta * kl.slope;
      sums.add(kKl, present ? kl.value : zero);
    }
    if (p.entropy != nullptr) {
      const F entropy = present ? at.load(p.entropy) : zero;
      t.value -= rule.entropy_coef * entropy;
      sums.add(kEntropy, entropy);
      if (p.grad_entropy != nullptr) at.store(p.grad_entropy, present ? spread<F>(-rule.entropy_coef * share) : zero);
    }
    const F own_chain = rule.level == Level::sequence ? zero : t.chain * l.passes;
    at.store(p.grad_logprobs, present ? (t.direct + own_chain) * share : zero);
    const F counted = present ? one : zero;
    sums.add(kLoss, present ? t.value * share : zero);
    sums.add(kTokens, counted);
    sums.add(kClippedLow, present ? t.low : zero);
    sums.add(kClippedHigh, present ? t.high : zero);
    sums.add(kClippedFar, present ? t.far : zero);
    sums.add(kMinusLogRatio, -d);
    sums.add(kK3, exp_of(d).minus_one - d);
    sums.add(kRatio, present ? ratio : zero);
    sums.add(kWeight, present ? w.weight : zero);
    sums.add(kKept, present ? w.kept : zero);
    sums.add(kNotFinite, t.value - t.value == zero ? zero : one);
    if (rule.level == Level::sequence) sums.add(kChain, present ? t.chain : zero);
    largest = (present & (ratio > largest)) ? ratio : largest;
  });
  team.finish(sums);

  if (rule.level == Level::sequence) {  // the ratio of the sequence hangs on every token of it
    const F part = of_sequence.passes * static_cast<float>(sums.total(kChain) / count) * share;
    typename Team::template Sums<1> none;
    team.each(none, [&](At at) {
      const auto present = used(at);
      const F own = log_ratio(rule, difference(at, present), advantage_of(at, present)).passes;
      at.store(p.grad_logprobs, present ? at.load(p.grad_logprobs) + (own == zero ? zero : part * own) : zero);
    });
  }
  const float top = team.largest(largest);
  if (team.leads()) {
    double* out = p.partials + row * kPartials;
    for (int k = 0; k < kSums; ++k) out[k] = sums.total(k);
    out[kSequences] = sums.total(kTokens) > 0 ? 1 : 0;
    out[kSums] = top;
  }
}

// The values of the whole batch from the sums over all sequences.
RLKERNEL_INLINE void policy_loss_values(const PolicyLossRule& rule, const double* sums, double largest, float* values) {
  const double here = rule.aggregation == Aggregation::tokens ? sums[kTokens] : sums[kSequences];
  const double denominator = rule.denominator > 0 ? static_cast<double>(rule.denominator) : here > 1 ? here : 1;
  const double scale = rule.factor / denominator, tokens = sums[kTokens] > 1 ? sums[kTokens] : 1;
  values[0] = static_cast<float>(sums[kLoss] * scale);
  values[1] = static_cast<float>(scale);
  const int means[] = {kClippedLow, kClippedHigh, kClippedFar, kMinusLogRatio, kK3, kRatio};
  for (int k = 0; k < 6; ++k) values[2 + k] = static_cast<float>(sums[means[k]] / tokens);
  values[8] = static_cast<float>(largest);
  const int more[] = {kEntropy, kKl, kWeight, kKept};
  for (int k = 0; k < 4; ++k) values[9 + k] = static_cast<float>(sums[more[k]] / tokens);
  values[13] = static_cast<float>(sums[kTokens]);
  values[14] = static_cast<float>(sums[kSequences]);
  values[15] = static_cast<float>(sums[kNotFinite]);
}

}  // namespace RLKERNEL_SPACE
