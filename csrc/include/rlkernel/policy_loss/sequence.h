// One sequence of the policy loss, and the values of the whole batch from the sums of its sequences.
//
// A `Team` is the threads or the vector that share a sequence: each(sums, body) visits its tokens, finish() joins the sums,
// smallest() and largest() what they found. Every lane runs the function; the order of the sums follows from the place in
// the sequence alone.
#pragma once
#include "rlkernel/policy_loss/correction.h"

namespace RLKERNEL_SPACE {

// Where a sequence begins, and the one before it ends. Offsets that nobody checked lead to no illegal access.
template <class Rows>
RLKERNEL_INLINE int64_t offset_of(const Rows& p, int64_t row) {
  if (p.cu_seqlens == nullptr) return row * p.length;
  const int64_t offset = p.cu_seqlens[row];
  return offset < 0 ? 0 : offset > p.length ? p.length : offset;
}

// Whether the kernel of plain clipping, which knows that nothing else is asked for, does the same as the general one.
inline bool is_plain(const PolicyLoss& p) {
  return p.rule.term == Term::clipped && p.rule.kl == Kl::none && p.rule.correction == Correction::absent &&
         p.rule.log_clip == __builtin_huge_valf() && p.entropy == nullptr && p.selected == nullptr;
}

// A copy on a CPU: through a reference its numbers would be read and spread anew after every gradient that is stored. A GPU has them
// among its constants.
#if defined(__CUDACC__) || defined(__HIP__)
using RuleOfSequence = const PolicyLossRule&;
#else
using RuleOfSequence = const PolicyLossRule;
#endif

// `whole` says whether the ratio is that of the sequence: a bool, or a constant where the compiler is to know it.
template <bool kPlain, class Team, class Whole>
RLKERNEL_INLINE void policy_loss_sequence(const PolicyLoss& p, int64_t row, Team& team, Whole whole) {
  using F = typename Team::Value;
  using M = MaskOf<F>;
  RuleOfSequence rule = p.rule;
  const F one = spread<F>(1.0f), zero{};
  const bool corrected = !kPlain && rule.correction != Correction::absent;
  const bool shrink = corrected && rule.shrink, vespo = !kPlain && rule.term == Term::vespo;

  RolloutDrift<Team> rollout{p, row};
  if (corrected) {
    rollout.gather(team);
    if (rule.normalize) rollout.mean = p.values[kValues];
  }
  const F of_row = spread<F>(p.advantage_per_token ? 0.0f : p.advantages[row]);
  const auto advantage_of = [&](auto at, M present) -> F {
    return keep(present, p.advantage_per_token ? at.load(p.advantages) : of_row);
  };
  const auto difference = [&](auto at, M inside) -> F {
    if (p.old_logprobs == nullptr) return zero;
    return keep(inside, at.load(p.logprobs) - at.load(p.old_logprobs));
  };
  const auto used = [&](auto at) -> M {
    const M present = at.mask(p.mask);
    if (!shrink) return present;
    return both<M>(present, rollout.weigh(at, present, advantage_of(at, present)).kept);
  };
  // A token outside of its support adds nothing, but counts: so the counts are known before the logprobs.
  const auto supported = [&](auto at, M present) -> M {
    const M inside = both<M>(present, in_support(at.load(p.logprobs)));
    return p.old_logprobs == nullptr ? inside : both<M>(inside, in_support(at.load(p.old_logprobs)));
  };

  double tokens = 0, moved = 0, count = 0, mean = 0, log_w = 0;
  if (whole || vespo || rule.aggregation == Aggregation::sequence_means) {
    typename Team::template Sums<3> sums;
    team.each(sums, [&](auto at) {
      const M present = used(at);
      sums.add(0, keep(present, one));
      if (!whole && !vespo) return;
      const M inside = supported(at, present);
      const F d = difference(at, inside);
      if (kPlain || rule.term != Term::gmpo) sums.add(1, d);
      else sums.add(1, log_ratio(rule, d, advantage_of(at, inside)).value);
      if (vespo) sums.add(2, clamped(d, -20.0f, 20.0f));
    });
    team.finish(sums);
    tokens = sums.total(0);
    moved = sums.total(1);
    count = tokens > 1 ? tokens : 1;
    mean = moved / count;
    log_w = sums.total(2);
  }
  if (vespo && corrected) {
    typename Team::template Sums<1> sums;
    team.each(sums, [&](auto at) {
      const M present = used(at);
      sums.add(0, keep(present, rollout.weigh(at, present, advantage_of(at, present)).log_weight));
    });
    team.finish(sums);
    log_w += rule.correction == Correction::token ? sums.total(0) : sums.total(0) / count;
  }
  const LogRatio<float> of_sequence = bounded(static_cast<float>(mean), rule.log_clip);
  double divisor = count;
  if (p.token_counts != nullptr) {
    const float given = p.token_counts[row];
    constexpr double kInfinity = __builtin_huge_val();
    divisor = given > 1 ? given : 1;
    if (!(given >= 0 && given < kInfinity)) divisor = kInfinity - kInfinity;  // no count, and nobody could look: NaN
  }
  const float share = rule.aggregation == Aggregation::sequence_means ? static_cast<float>(1 / divisor) : 1.0f;
  Token<F> x;
  x.ratio = spread<F>(exp_of(of_sequence.value).exp);
  if (vespo) {
    const float w = clamped(static_cast<float>(log_w), kLogTiny, 20.0f);
    x.phi_positive = spread<F>(gamma_weight(rule.k_positive, rule.lambda_positive, w));
    x.phi_negative = spread<F>(gamma_weight(rule.k_negative, rule.lambda_negative, w));
  }

  typename Team::template Sums<kSums + 1> sums;
  constexpr int kChain = kSums;
  F largest = zero;
  team.each(sums, [&](auto at) {
    const M present = used(at), inside = supported(at, present);
    x.advantage = advantage_of(at, inside);
    x.logprob = keep(inside, at.load(p.logprobs));
    x.old_logprob = p.old_logprobs == nullptr ? x.logprob : keep(inside, at.load(p.old_logprobs));
    const F d = x.logprob - x.old_logprob;
    const Exp<F> e = exp_of(d);
    M passes = d == d;
    if (!whole) x.ratio = e.exp;
    if (!kPlain && (rule.term == Term::gmpo || !whole)) {
      const LogRatio<F> own = log_ratio(rule, d, x.advantage), held = bounded(own.value, rule.log_clip);
      passes = whole ? own.passes : both(own.passes, held.passes);
      if (!whole && (rule.term == Term::gmpo || rule.log_clip < __builtin_huge_valf())) x.ratio = exp_of(held.value).exp;
    }
    Term_<F> t = kPlain ? clipped_term(rule, x) : term(rule, x);
    if (!kPlain && p.selected != nullptr) apply_selection(rule, t, both<M>(inside, at.mask(p.selected)), d);
    if (corrected) {
      const Weighing<F> w = rollout.weigh(at, present, advantage_of(at, present));
      t.value = keep(w.kept, t.value * w.weight);
      t.direct = keep(w.kept, t.direct * w.weight);
      t.chain = keep(w.kept, t.chain * w.weight);
      sums.add(kWeight, keep(both(present, w.kept), w.weight));
      sums.add(kKept, keep(both(present, w.kept), one));
    }
    M referred = inside;
    if (!kPlain && rule.kl != Kl::none) {
      const F reference = at.load(p.ref_logprobs);
      referred = both<M>(inside, in_support(reference));
      F weight = one;
      if (rule.kl_weight == KlWeight::ratio) weight = x.ratio;
      if (rule.kl_weight == KlWeight::token) weight = e.exp;
      if (rule.kl_weight == KlWeight::rollout) {
        weight = exp_of(x.logprob - at.load(p.rollout_logprobs)).exp;
        weight = keep(weight - weight == zero, weight);
      }
      weight = keep(referred, weight);
      const WeighedKl<F> kl = kl_to_reference(rule, keep(referred, x.logprob - reference), weight);
      if (rule.beta != 0.0f) {  // 0 * inf is NaN: what has no weight is a metric
        t.value += rule.beta * kl.value;
        t.direct += rule.beta * kl.slope;
        if (rule.kl_weight == KlWeight::ratio) t.chain += rule.beta * kl.through * weight;
        else if (rule.kl_weight != KlWeight::none) t.direct += rule.beta * kl.through * weight;
      }
      sums.add(kKl, keep(referred, kl.value));
    }
    if (!kPlain && p.entropy != nullptr) {
      const F entropy = keep(inside, at.load(p.entropy));
      if (rule.entropy_coef != 0.0f) t.value -= rule.entropy_coef * entropy;
      sums.add(kEntropy, entropy);
      if (p.grad_entropy != nullptr) at.store(p.grad_entropy, keep(inside, spread<F>(-rule.entropy_coef * share)));
    }
    if (rule.level == Level::sequence) {
      sums.add(kChain, keep(inside, t.chain));
      if (!kPlain) at.store(p.grad_logprobs, keep(inside, t.direct * share));
    } else {
      const bool open = !whole || of_sequence.passes;
      const F own = kPlain ? t.chain : open ? keep(passes, t.chain) : zero;
      at.store(p.grad_logprobs, keep(inside, (t.direct + own) * share));
    }
    sums.add(kLoss, keep(inside, t.value * share));
    if (!(kPlain && whole)) {
      sums.add(kTokens, keep(present, one));
      sums.add(kMinusLogRatio, -d);
      largest = larger(keep(inside, x.ratio), largest);
    }
    sums.add(kClippedLow, keep(both(inside, t.low), one));
    sums.add(kClippedHigh, keep(both(inside, t.high), one));
    sums.add(kClippedFar, keep(both(inside, t.far), one));
    sums.add(kK3, e.minus_one - d);
    sums.add(kRatio, keep(inside, x.ratio));
    sums.add(kNotFinite, keep(both<M>(inside, not_<M>(t.value - t.value == zero)), one));
    sums.add(kOutside, keep(both<M>(present, not_<M>(referred)), one));
  });
  team.finish(sums);

  if (rule.level == Level::sequence) {  // the ratio of the sequence hangs on every token of it
    const float chain = static_cast<float>(sums.total(kChain) / count) * share;
    const F part = spread<F>(of_sequence.passes ? chain : 0.0f);
    typename Team::template Sums<1> none;
    team.each(none, [&](auto at) {
      const M inside = supported(at, used(at));
      if (kPlain) return at.store(p.grad_logprobs, keep(inside, part));
      F own = part;
      if (rule.term == Term::gmpo)
        own = keep(log_ratio(rule, difference(at, inside), advantage_of(at, inside)).passes, part);
      at.store(p.grad_logprobs, keep(inside, at.load(p.grad_logprobs) + own));
    });
  }
  if (kPlain && whole && tokens > 0) largest = larger(x.ratio, largest);
  const float top = team.largest(largest);
  if (team.leads()) {
    double* out = p.partials + row * kPartials;
    for (int k = 0; k < kSums; ++k) out[k] = sums.total(k);
    if (kPlain && whole) {  // the first pass has them
      out[kTokens] = tokens;
      out[kMinusLogRatio] = -moved;
    }
    out[kSequences] = out[kTokens] > 0 ? 1 : 0;
    if (!corrected) out[kWeight] = out[kKept] = out[kTokens];
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
  values[16] = static_cast<float>(sums[kOutside]);
}

}  // namespace RLKERNEL_SPACE
