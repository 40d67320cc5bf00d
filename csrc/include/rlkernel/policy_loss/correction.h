// The rollout correction of one sequence: the weights of its tokens, and which are rejected.
#pragma once
#include "rlkernel/policy_loss/terms.h"

namespace RLKERNEL_SPACE {

template <class F>
struct Weighing {
  F weight, log_weight;  // log_weight as vespo adds it up
  MaskOf<F> kept;
};

template <class Team>
struct RolloutDrift {
  using F = typename Team::Value;
  using M = MaskOf<F>;

  const PolicyLoss& p;
  int64_t row;
  float log_weight = 0;  // of the sequence
  bool rejected = false, drifted = false, far = false;
  float mean = 1;  // of the weights of the batch

  // Whether the engine had a logprob for the token, which the old policy knows.
  template <class At>
  RLKERNEL_INLINE M scored(At at, M present) const {
    const F rollout = at.load(p.rollout_logprobs);
    return both<M>(present, both<M>(both<M>(rollout == rollout, in_support(rollout)), in_support(at.load(p.old_logprobs))));
  }

  // d = log(old / rollout); 0 where it has none.
  template <class At>
  RLKERNEL_INLINE F drift(At at, M present) const {
    return keep(scored(at, present), at.load(p.old_logprobs) - at.load(p.rollout_logprobs));
  }

  // What the whole sequence decides.
  RLKERNEL_INLINE void gather(Team& team) {
    const PolicyLossRule& rule = p.rule;
    const float infinite = __builtin_huge_valf();
    const bool k2 = rule.sum_k2_high < infinite || rule.mean_k2_high < infinite;
    const bool k3 = rule.sum_k3_high < infinite || rule.mean_k3_high < infinite;
    const bool off_policy = rule.off_policy_high < infinite;
    const bool tv = rule.tv_high < infinite;
    enum { kCount, kWhole, kK1, kK2, kK3, kTv, kOffPolicy, kAll };
    typename Team::template Sums<kAll> sums;
    F least = spread<F>(infinite), most = spread<F>(-infinite);
    team.each(sums, [&](auto at) {
      const M present = at.mask(p.mask);
      const F d = drift(at, present), x = clamped(d, -20.0f, 20.0f);
      sums.add(kCount, keep(present, spread<F>(1.0f)));
      sums.add(kWhole, d);
      sums.add(kK1, x);
      if (k2) sums.add(kK2, x * x * 0.5f);
      if (k3) sums.add(kK3, exp_of(x).minus_one - x);
      if (tv) sums.add(kTv, magnitude(exp_of(x).minus_one));
      if (off_policy) {
        const F logprob = at.load(p.logprobs);
        const M known = both<M>(scored(at, present), in_support(logprob));
        sums.add(kOffPolicy, keep(known, at.load(p.rollout_logprobs) - logprob));
      }
      least = (present & (d < least)) ? d : least;
      most = (present & (d > most)) ? d : most;
    });
    team.finish(sums);
    const double count = sums.total(kCount) > 1 ? sums.total(kCount) : 1;
    if (rule.correction == Correction::sequence) log_weight = static_cast<float>(sums.total(kWhole));
    if (rule.correction == Correction::geometric) log_weight = static_cast<float>(sums.total(kWhole) / count);
    const float k1 = static_cast<float>(sums.total(kK1)), mean_k1 = static_cast<float>(sums.total(kK1) / count);
    rejected = outside(k1, rule.sum_k1_low, rule.sum_k1_high) || outside(mean_k1, rule.mean_k1_low, rule.mean_k1_high) ||
               static_cast<float>(sums.total(kK2)) > rule.sum_k2_high ||
               static_cast<float>(sums.total(kK2) / count) > rule.mean_k2_high ||
               static_cast<float>(sums.total(kK3)) > rule.sum_k3_high ||
               static_cast<float>(sums.total(kK3) / count) > rule.mean_k3_high;
    const float low = team.smallest(least), high = team.largest(most);
    rejected = rejected || low < rule.extreme_low || high > rule.extreme_high;
    far = static_cast<float>(sums.total(kTv) / count) > rule.tv_high;
    drifted = static_cast<float>(sums.total(kOffPolicy) / count) > rule.off_policy_high;
  }

  template <class At>
  RLKERNEL_INLINE F staleness(At at) const {
    return p.staleness_per_token ? at.load(p.staleness) : spread<F>(p.staleness[row]);
  }

  template <class At>
  RLKERNEL_INLINE Weighing<F> weigh(At at, M present, F advantage) const {
    const PolicyLossRule& rule = p.rule;
    const F one = spread<F>(1.0f), zero{};
    const F d = drift(at, present);
    F x = rule.correction == Correction::token ? d : spread<F>(log_weight);
    F stale = zero;
    if (p.staleness != nullptr) stale = keep(present, staleness(at));
    if (rule.stale_only) x = keep(stale > zero, x);
    const F logarithm = clamped(x, rule.log_weight_low, rule.log_weight_high);
    Weighing<F> w{clamped(exp_of(x).exp, rule.weight_low, rule.weight_high), clamped(logarithm, kLogTiny, 20.0f),
                  one > zero};
    if (rule.verdict == Verdict::mask) {
      const M inside = both<M>(x >= rule.log_weight_low, x <= rule.log_weight_high);
      w = {keep(inside, w.weight), inside ? w.log_weight : spread<F>(kLogTiny), inside};
    }
    if (rule.term == Term::vespo) {  // it takes the weight into its own
      w.weight = one;
      w.kept = one > zero;
    }
    if (rule.log_decay != 0) w.weight = w.weight * exp_of(stale * rule.log_decay).exp;
    w.weight = w.weight / mean;

    w.kept = w.kept & not_(either<M>(outside(d, rule.token_low, rule.token_high), stale > rule.max_staleness));
    if (rejected) w.kept = zero > zero;
    if (drifted) w.kept = w.kept & not_(advantage < zero);
    if (far) w.kept = w.kept & not_(d * advantage > zero);
    if (rule.sign_mask != Divergence::none) {
      const F logprob = at.load(p.logprobs);
      const M known = both<M>(scored(at, present), in_support(logprob));
      const F now = keep(known, logprob), then = keep(known, at.load(p.rollout_logprobs));
      Moved<F> moved = moved_too_far(rule.sign_mask, rule.sign_low, rule.sign_high, advantage, now, then);
      if (rule.two_sided) {
        moved.low = moved_too_far(rule.sign_mask, rule.sign_low, rule.sign_high, -one, now, then).low;
        moved.high = moved_too_far(rule.sign_mask, rule.sign_low, rule.sign_high, one, now, then).high;
      }
      w.kept = w.kept & not_(either(moved.low, moved.high));
    }
    return w;
  }
};

// For the mean weight of the batch: the sums of one sequence, before anything is rejected.
template <class Team>
RLKERNEL_INLINE void policy_loss_weights(const PolicyLoss& p, int64_t row, Team& team) {
  using F = typename Team::Value;
  RolloutDrift<Team> drift{p, row};
  drift.gather(team);
  typename Team::template Sums<2> sums;
  team.each(sums, [&](auto at) {
    const MaskOf<F> present = at.mask(p.mask);
    sums.add(0, keep(present, drift.weigh(at, present, F{}).weight));
    sums.add(1, keep(present, spread<F>(1.0f)));
  });
  team.finish(sums);
  if (!team.leads()) return;
  const double count = sums.total(1) > 1 ? sums.total(1) : 1;
  const bool by_token = p.rule.correction == Correction::token || p.rule.correction == Correction::none;
  double* out = p.partials + row * kPartials;
  out[0] = by_token ? sums.total(0) : sums.total(0) / count;
  out[1] = by_token ? sums.total(1) : sums.total(1) > 0 ? 1 : 0;
}

RLKERNEL_INLINE float mean_weight(double weights, double count) {
  const double mean = count > 0 ? weights / count : 1;
  return static_cast<float>(mean > 1e-8 ? mean : 1);
}

}  // namespace RLKERNEL_SPACE
