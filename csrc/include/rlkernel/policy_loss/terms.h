// What one token adds to the policy loss, and its derivatives.
#pragma once
#include "rlkernel/policy_loss/math.h"

namespace RLKERNEL_SPACE {

// The logarithm of a token's importance ratio, and where the gradient passes through it.
template <class F>
struct LogRatio {
  F value;
  MaskOf<F> passes;
};

template <class F>
RLKERNEL_INLINE LogRatio<F> bounded(F x, float bound) {
  const F value = clamped(x, -bound, bound);
  return {value, not_(outside(x, -bound, bound))};
}

// gmpo clips each token's logarithm before the mean, on the side that the advantage favours.
template <class F>
RLKERNEL_INLINE LogRatio<F> log_ratio(const PolicyLossRule& rule, F difference, F advantage) {
  if (rule.term != Term::gmpo) return {difference, difference == difference};
  const F low = spread<F>(rule.low), high = spread<F>(rule.high), zero{};
  const F up = difference > high ? high : difference, down = difference < low ? low : difference;
  const F value = advantage > zero ? up : advantage < zero ? down : zero;
  return {value, both<MaskOf<F>>(value == difference, advantage != zero)};
}

template <class F>
struct Estimate {
  F value, slope;  // slope = d value / d logprob
};

// `weight` is what the estimate is multiplied by; `through` the derivative that reaches it, the estimate where no bound holds.
template <class F>
struct WeighedKl {
  F value, slope, through;
};

template <class F>
RLKERNEL_INLINE Estimate<F> estimate_kl(const PolicyLossRule& rule, F d) {
  const F one = spread<F>(1.0f), zero{};
  Estimate<F> kl{zero, zero};
  if (rule.kl == Kl::k1) kl = {d, one};
  if (rule.kl == Kl::abs) kl = {magnitude(d), d > zero ? one : d < zero ? -one : d};
  if (rule.kl == Kl::k2) kl = {d * d * 0.5f, d};
  if (rule.kl == Kl::k3) {
    const F m = exp_of(-d).minus_one;
    kl = {m + d, -m};
  }
  return kl;
}

template <class F>
RLKERNEL_INLINE WeighedKl<F> kl_to_reference(const PolicyLossRule& rule, F d, F weight) {
  const F bounded = clamped(d, -rule.kl_input, rule.kl_input);
  const Estimate<F> kl = estimate_kl(rule, bounded);
  const F value = kl.value * weight;
  MaskOf<F> open = not_(outside(d, -rule.kl_input, rule.kl_input));
  open = open & not_(outside(value, -rule.kl_output, rule.kl_output));
  // k2's slope knows of no bound, that of the weight does
  const F slope = rule.kl_gradient_of_k2 ? d * weight : keep(open, kl.slope * weight);
  return {clamped(value, -rule.kl_output, rule.kl_output), slope, keep(open, kl.value)};
}

// Where the probability fell or rose further from its anchor's than allowed, in the direction of the advantage.
template <class F>
struct Moved {
  MaskOf<F> low, high;
};

template <class F>
RLKERNEL_INLINE Moved<F> moved_too_far(Divergence kind, float low, float high, F advantage, F logprob, F anchor) {
  const F zero{};
  const Exp<F> p = exp_of(logprob), q = exp_of(anchor);
  F change = p.exp - q.exp;
  if (kind == Divergence::kl) {  // 1 - p = -minus_one: the difference would cancel where p is near 1
    const F not_p = larger(zero, -p.minus_one), not_q = larger(zero, -q.minus_one), tiny = spread<F>(1e-8f);
    const F kl = q.exp * (anchor - logprob) + not_q * log_of((not_q + tiny) / (not_p + tiny));
    change = change > zero ? kl : change < zero ? -kl : change;
  }
  return {both<MaskOf<F>>(advantage <= zero, change < low), both<MaskOf<F>>(advantage > zero, change > high)};
}

template <class F>
struct Token {
  F ratio, advantage, logprob, old_logprob;
  F phi_positive, phi_negative;  // vespo's weights of the sequence, by the advantage's sign
};

template <class F>
struct Term_ {
  F value, direct, chain;     // direct = d value / d logprob at a fixed ratio, chain = d value / d log ratio
  MaskOf<F> low, high, far;  // clipped
};

template <class F>
RLKERNEL_INLINE Term_<F> clipped_term(const PolicyLossRule& rule, const Token<F>& x) {
  const F zero{};
  const auto negative = x.advantage < zero;
  const F plain = -smaller(spread<F>(rule.delta), x.ratio) * x.advantage;
  const F bounded = -clamped(x.ratio, rule.low, rule.high) * x.advantage;
  const F loss = bounded > plain ? bounded : plain;
  const F limit = negative ? -x.advantage * rule.dual : spread<F>(__builtin_huge_valf());
  const auto dual = loss > limit, beyond = x.ratio > rule.delta;
  // the loss is flat where the bound that holds is; between a small delta and the upper bound only one of them is
  const MaskOf<F> clipped = bounded > plain;
  const MaskOf<F> frozen = (clipped & outside(x.ratio, rule.low, rule.high)) | (not_(clipped) & beyond) | dual;
  return {dual ? limit : loss,
          zero,
          keep(not_(frozen), -x.ratio * x.advantage),
          both<MaskOf<F>>(negative, x.ratio < rule.low),
          both<MaskOf<F>>(x.advantage > zero, x.ratio > rule.high),
          either<MaskOf<F>>(dual, negative & beyond)};
}

template <class F>
RLKERNEL_INLINE Term_<F> likelihood(F weight, const Token<F>& x) {  // -weight A logprob: the weight has no gradient
  const F direct = -weight * x.advantage, value = direct == F{} ? F{} : direct * x.logprob;
  return {value, direct, F{}, F{} > F{}, F{} > F{}, F{} > F{}};
}

template <class F>
RLKERNEL_INLINE Term_<F> sapo_term(const PolicyLossRule& rule, const Token<F>& x) {
  const F zero{}, one = spread<F>(1.0f);
  const F tau = x.advantage > zero ? spread<F>(rule.tau_positive) : spread<F>(rule.tau_negative);
  const F e = exp_of(-magnitude(tau * (x.ratio - 1.0f))).exp;  // in (0, 1]: nothing overflows
  const F inverse = 1.0f / (1.0f + e), gate = x.ratio >= one ? inverse : e * inverse;
  const F chain = e > zero ? -x.advantage * 4.0f * e * inverse * inverse * x.ratio : zero;
  return {-x.advantage * gate * 4.0f / tau, zero, chain, zero > zero, zero > zero, zero > zero};
}

template <class F>
RLKERNEL_INLINE Term_<F> term(const PolicyLossRule& rule, const Token<F>& x) {
  const F zero{}, d = x.logprob - x.old_logprob;
  const auto none = zero > zero;
  switch (rule.term) {
    case Term::clipped: return clipped_term(rule, x);
    case Term::cispo: {
      Term_<F> t = likelihood(clamped(x.ratio, rule.low, rule.high), x);
      t.low = x.ratio < rule.low;
      t.high = x.ratio > rule.high;
      return t;
    }
    case Term::cispo_mask: {
      const auto low = x.ratio <= rule.low, high = x.ratio >= rule.high;
      Term_<F> t = likelihood(keep(not_(either<MaskOf<F>>(low, high)), x.ratio), x);
      t.low = low;
      t.high = high;
      return t;
    }
    case Term::reinforce: return likelihood(spread<F>(1.0f), x);
    case Term::sapo: return sapo_term(rule, x);
    case Term::gmpo: {
      const F value = -x.ratio * x.advantage;
      return {value,
              zero,
              value,
              both<MaskOf<F>>(x.advantage < zero, d < rule.low),
              both<MaskOf<F>>(x.advantage > zero, d > rule.high),
              none};
    }
    case Term::dppo: {
      const Moved<F> moved =
          moved_too_far(rule.divergence, rule.low, rule.high, x.advantage, x.logprob, x.old_logprob);
      Token<F> y = x;  // without an advantage that may be infinite, where 0 times it would be NaN
      y.advantage = keep(not_(either(moved.low, moved.high)), x.advantage);
      Term_<F> t = likelihood(smaller(spread<F>(rule.dual), x.ratio), y);
      t.low = moved.low;
      t.high = moved.high;
      t.far = x.ratio > rule.dual;
      return t;
    }
    case Term::vespo: return likelihood(x.advantage < zero ? x.phi_negative : x.phi_positive, x);
    case Term::surrogate: {
      const F value = -x.ratio * x.advantage;
      return {value, zero, value, none, none, none};
    }
    case Term::dro:
      return {rule.coefficient * 0.5f * d * d - x.logprob * x.advantage, rule.coefficient * d - x.advantage, zero, none,
              none, none};
  }
  return {zero, zero, zero, none, none, none};
}

// vespo's weight exp(lambda + k log w - lambda w) of a sequence whose whole ratio is w; 0 where it is not finite.
RLKERNEL_INLINE float gamma_weight(float k, float lambda, float log_w) {
  const float phi = exp_of(lambda + k * log_w - lambda * exp_of(log_w).exp).exp;
  return phi - phi == 0.0f ? phi : 0.0f;
}

// Tokens that the covariance has picked: kl_cov adds |d| to their loss, clip_cov drops them.
template <class F>
RLKERNEL_INLINE void apply_selection(const PolicyLossRule& rule, Term_<F>& t, MaskOf<F> selected, F d) {
  const F zero{};
  if (rule.term == Term::surrogate) {
    t.value += keep(selected, rule.coefficient * magnitude(d));
    t.direct += keep(selected, d > zero ? spread<F>(rule.coefficient) : d < zero ? spread<F>(-rule.coefficient) : zero);
  } else {
    const auto left = not_(selected);
    t.value = keep(left, t.value);
    t.direct = keep(left, t.direct);
    t.chain = keep(left, t.chain);
  }
  t.far = t.far | selected;
}

}  // namespace RLKERNEL_SPACE
