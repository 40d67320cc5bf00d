// The losses of pairs and of single sequences, with their derivatives, and how they become the batch's: once for every
// device. A Team is the threads that share the work; on a CPU it is one.
#pragma once

#include "rlkernel/preference_loss/arguments.h"
#include "rlkernel/preference_loss/math.h"

namespace rlkernel::preference {

struct Value {
  double value, slope;
};

// -logsigmoid(z), with labels that are wrong with probability e.
RLKERNEL_BOTH Value smoothed(double z, double e) {
  if (e == 0) return {softplus(-z), -sigmoid(-z)};
  return {(1 - e) * softplus(-z) + e * softplus(z), e * sigmoid(z) - (1 - e) * sigmoid(-z)};
}

// f'(exp(x)) of the f-divergence, less a constant.
RLKERNEL_BOTH Value score(const PreferenceRule& rule, double x) {
  if (rule.divergence == PreferenceDivergence::forward_kl) {
    const Exponential e = exponential(-x);
    return {-e.minus_one, e.exp};
  }
  if (rule.divergence == PreferenceDivergence::js_divergence) return {0.6931471805599453 - softplus(-x), sigmoid(-x)};
  if (rule.divergence == PreferenceDivergence::alpha_divergence) {
    const double t = rule.exponent * x;
    const Exponential e = exponential(t > 80 ? 80 : t);
    return {e.minus_one / rule.exponent, t > 80 ? 0 : e.exp};
  }
  return {x, 1};
}

struct PairLoss {
  double loss, chosen, rejected;  // and its derivatives by the sums of the two sides
  double log_odds;
};

RLKERNEL_BOTH double row_mean(const double* s) { return s[kLogps] / (s[kCounted] > 1 ? s[kCounted] : 1); }
RLKERNEL_BOTH double log_ratio(const double* s) { return s[kLogps] - s[kRefLogps]; }

RLKERNEL_BOTH PairLoss discopop(double z, double tau) {
  // exp(-z) * m in one exponential where z < 0: the product of the two would be infinity * 0
  const double m = sigmoid(z / tau), rest = sigmoid(-z / tau), plain = softplus(-z);
  const double blend = z < 0 ? exp_of(z / tau - z) * rest : exp_of(-z) * m;
  const double slope = -sigmoid(-z) * rest - blend + (blend * rest - plain * m * rest) / tau;
  return {plain * rest + blend, slope, 0, 0};
}

// By the means p and q of the two sides; a token that is certain (p -> 0) has the limit of the derivative.
RLKERNEL_BOTH PairLoss odds_ratio(double p, double q, double beta) {
  const double odds = p - q - (log1mexp_of(p) - log1mexp_of(q)), wrong = sigmoid(-odds);
  double of_chosen = -wrong / -expm1_of(p);
  if (p > -0.5) {
    const double P = exp_of(p), Q = exp_of(q);
    of_chosen = -Q / (Q * -expm1_of(p) + P * -expm1_of(q));
  }
  return {beta * softplus(-odds), beta * of_chosen, wrong == 0 ? 0 : beta * wrong / -expm1_of(q), odds};
}

// The loss of a pair whose sides are the sums c and r, without those that sort the batch, weighted and not yet averaged.
RLKERNEL_BOTH PairLoss pair_loss(const PreferenceRule& rule, const double* c, const double* r, double delta) {
  const double beta = rule.beta, x = log_ratio(c), y = log_ratio(r);
  const double per_c = 1 / (c[kCounted] > 1 ? c[kCounted] : 1), per_r = 1 / (r[kCounted] > 1 ? r[kCounted] : 1);
  const Value sx = score(rule, x), sy = score(rule, y);
  const double z = beta * (sx.value - sy.value), normed = sx.value * per_c - sy.value * per_r;
  PairLoss total{0, 0, 0, 0};
  for (int i = 0; i < rule.count; ++i) {
    const double e = rule.smoothing[i];
    double loss = 0, chosen = 0, rejected = 0;  // derivatives by the sums
    double by_z = 0, by_normed = 0;
    switch (rule.terms[i]) {
      case PreferenceTerm::sigmoid: {
        const Value v = smoothed(z, e);
        loss = v.value, by_z = v.slope;
        break;
      }
      case PreferenceTerm::hinge:
        loss = z < 1 ? 1 - z : z - z;  // NaN stays
        by_z = z < 1 ? -1 : z - z;
        break;
      case PreferenceTerm::ipo: {
        const double d = normed - 1 / (2 * beta);
        loss = d * d, by_normed = 2 * d;
        break;
      }
      case PreferenceTerm::ipo_sum: {
        const double d = sx.value - sy.value - 1 / (2 * beta);
        loss = d * d, by_z = 2 * d / beta;
        break;
      }
      case PreferenceTerm::exo_pair: {
        const double right = sigmoid(z), wrong = sigmoid(-z), log_right = log1p_of(-e), log_wrong = log_of(e);
        loss = right * (-softplus(-z) - log_right) + wrong * (-softplus(z) - log_wrong);
        by_z = right * wrong * (z - log_right + log_wrong);
        break;
      }
      case PreferenceTerm::nca_pair: {
        const double u = beta * x, v = beta * y;
        loss = softplus(-u) + 0.5 * softplus(u) + 0.5 * softplus(v);
        chosen = beta * (0.5 * sigmoid(u) - sigmoid(-u));
        rejected = beta * 0.5 * sigmoid(v);
        break;
      }
      case PreferenceTerm::robust:
        loss = ((1 - e) * softplus(-z) - e * softplus(z)) / (1 - 2 * e);
        by_z = -((1 - e) * sigmoid(-z) + e * sigmoid(z)) / (1 - 2 * e);
        break;
      case PreferenceTerm::bco_pair: {
        const double u = beta * x - delta, v = beta * y - delta;
        loss = softplus(-u) + softplus(v);
        chosen = -beta * sigmoid(-u), rejected = beta * sigmoid(v);
        break;
      }
      case PreferenceTerm::sppo_hard: {
        const double u = x - 0.5 / beta, v = y + 0.5 / beta;
        loss = u * u + v * v;
        chosen = 2 * u, rejected = 2 * v;
        break;
      }
      case PreferenceTerm::apo_zero: {
        const double u = sigmoid(-beta * x), v = sigmoid(beta * y);
        loss = u + v;
        chosen = -beta * u * sigmoid(beta * x), rejected = beta * v * sigmoid(-beta * y);
        break;
      }
      case PreferenceTerm::apo_down: {
        const double u = sigmoid(beta * x), v = sigmoid(-beta * (x - y)), by_v = beta * v * sigmoid(beta * (x - y));
        loss = u + v;
        chosen = beta * u * sigmoid(-beta * x) - by_v, rejected = by_v;
        break;
      }
      case PreferenceTerm::discopop: {
        const PairLoss d = discopop(z, rule.discopop_tau);
        loss = d.loss, by_z = d.chosen;
        break;
      }
      case PreferenceTerm::sigmoid_norm: {
        const Value v = smoothed(beta * normed, e);
        loss = v.value, by_normed = beta * v.slope;
        break;
      }
      case PreferenceTerm::orpo: {
        const PairLoss o = odds_ratio(row_mean(c), row_mean(r), beta);
        loss = o.loss, chosen = o.chosen * per_c, rejected = o.rejected * per_r;
        total.log_odds = o.log_odds;
        break;
      }
      case PreferenceTerm::simpo: {
        const Value u = score(rule, row_mean(c)), w = score(rule, row_mean(r));
        const Value v = smoothed(beta * (u.value - w.value) - rule.gamma, e);
        loss = v.value;
        chosen = beta * v.slope * u.slope * per_c, rejected = -beta * v.slope * w.slope * per_r;
        break;
      }
      default:  // the likelihood and what sorts the batch are added elsewhere
        continue;
    }
    // 0 * infinity: where the loss is flat, the score may have no end
    if (by_z != 0) chosen = beta * by_z * sx.slope, rejected = -beta * by_z * sy.slope;
    if (by_normed != 0) chosen = by_normed * sx.slope * per_c, rejected = -by_normed * sy.slope * per_r;
    total.loss += rule.weights[i] * loss;
    total.chosen += rule.weights[i] * chosen;
    total.rejected += rule.weights[i] * rejected;
  }
  return total;
}

RLKERNEL_BOTH Value single_loss(const PreferenceRule& rule, const double* s, bool desirable, double kl) {
  const double sign = desirable ? 1 : -1, weight = desirable ? rule.desirable_weight : rule.undesirable_weight;
  Value total{0, 0};
  for (int i = 0; i < rule.count; ++i) {
    const double shift = rule.terms[i] == PreferenceTerm::kto ? kl : 0;
    const double u = rule.beta * (log_ratio(s) - shift) * sign, v = sigmoid(-u);
    total.value += rule.weights[i] * weight * v;
    total.slope -= rule.weights[i] * weight * v * sigmoid(u) * rule.beta * sign;
  }
  return total;
}

RLKERNEL_BOTH const double* row_of(const PreferenceLoss& p, int64_t row) { return p.stats + row * kSequenceSums; }

RLKERNEL_BOTH bool is_counted(const PreferenceLoss& p, int64_t slot) {
  if (p.labels != nullptr) return row_of(p, slot)[kCounted] > 0;
  return row_of(p, slot)[kCounted] > 0 && row_of(p, slot + p.rows / 2)[kCounted] > 0;
}

RLKERNEL_BOTH double weight_of(const PreferenceLoss& p, int64_t slot) {
  if (!p.rule.weighting) return 1;
  const double *c = row_of(p, slot), *r = row_of(p, slot + p.rows / 2);
  return exp_of(c[kAligned] / c[kCounted]) * exp_of(r[kAligned] / r[kCounted]);
}

RLKERNEL_BOTH double shown_logps(const PreferenceLoss& p, const double* s) {
  return s[kCounted] > 0 ? p.rule.per_token ? row_mean(s) : s[kLogps] : 0;
}

RLKERNEL_BOTH double reward_of(const PreferenceLoss& p, const double* s) {
  return s[kCounted] > 0 ? p.rule.beta * (p.rule.per_token ? row_mean(s) : log_ratio(s)) : 0;
}

// The loss of rank k in the sorted batch, and by whose sums its derivative is.
struct Ranked {
  Value loss;
  int64_t chosen, rejected;
};

RLKERNEL_BOTH Ranked ranked_loss(const PreferenceLoss& p, int term, int64_t k) {
  const int64_t half = p.rows / 2;
  const bool unpaired = p.rule.terms[term] == PreferenceTerm::aot_unpaired;
  const int64_t a = p.order[(unpaired ? 2 : 0) * half + k], b = p.order[(unpaired ? 3 : 1) * half + k];
  if (!is_counted(p, a) && !is_counted(p, b)) return {{0, 0}, -1, -1};
  double d;
  if (unpaired) {
    d = log_ratio(row_of(p, a)) - log_ratio(row_of(p, b + half));
  } else {
    d = row_of(p, a)[kLogps] - row_of(p, a + half)[kLogps];
    d -= row_of(p, b)[kRefLogps] - row_of(p, b + half)[kRefLogps];
  }
  const Value v = smoothed(p.rule.beta * d, p.rule.smoothing[term]);
  return {{v.value, v.slope * p.rule.beta}, a, (unpaired ? b : a) + half};
}

RLKERNEL_BOTH bool sorts(PreferenceTerm term) {
  return term == PreferenceTerm::aot || term == PreferenceTerm::aot_unpaired;
}

// What is added up over the batch, in two walks.
enum Before : int { kPairs, kReward, kWeight, kNllSum, kNllCount, kBefore };
enum After : int {
  kPreference, kRewardChosen, kRewardRejected, kBetter, kLogpsChosen, kLogpsRejected, kRatio, kOdds, kTokensChosen,
  kTokensRejected, kNotFinite, kKlSum, kChosen, kRejected, kAfter
};

template <class Team>
RLKERNEL_BOTH void preference_total(const PreferenceLoss& p, Team& team) {
  const PreferenceRule& rule = p.rule;
  const bool paired = p.labels == nullptr;
  const int64_t half = p.rows / 2, slots = paired ? half : p.rows;
  double before[kBefore] = {}, after[kAfter] = {};
  for (int64_t k = team.first(); k < slots; k += team.step()) {
    const double* s = row_of(p, k);
    if (paired || p.labels[k] != 0) before[kNllSum] += s[kNllTokens] > 0 ? s[kNll] : 0, before[kNllCount] += s[kNllTokens];
    if (!is_counted(p, k)) continue;
    before[kPairs] += 1;
    before[kReward] += paired ? reward_of(p, s) + reward_of(p, row_of(p, k + half)) : 0;
    before[kWeight] += paired ? weight_of(p, k) : 1;
  }
  team.template sum<kBefore>(before);

  const double number = before[kPairs], here = number > 1 ? number : 1;
  double delta = 0;
  if (p.running_delta != nullptr) {
    const double mean = p.running_delta[0], batches = p.running_delta[1];
    delta = number > 0 ? mean + (before[kReward] / (2 * number) - mean) / (batches + 1) : mean;
    if (team.leads()) {
      p.new_delta[0] = static_cast<float>(delta);
      p.new_delta[1] = static_cast<float>(batches + (number > 0 ? 1 : 0));
    }
  }
  double items = rule.items > 0 ? rule.items : here;
  if (p.items != nullptr) items = *p.items;
  double nll_items = rule.nll_items > 0 ? rule.nll_items : before[kNllCount] > 1 ? before[kNllCount] : 1;
  if (p.nll_items != nullptr) nll_items = *p.nll_items;
  const double scale = rule.factor / items;

  for (int64_t k = team.first(); k < slots; k += team.step()) {
    const bool counted = is_counted(p, k);
    const double* s = row_of(p, k);
    double loss = 0;
    if (paired) {
      const double* t = row_of(p, k + half);
      PairLoss pair{0, 0, 0, 0};
      double weight = 0;
      if (counted) pair = pair_loss(rule, s, t, delta), weight = weight_of(p, k);
      loss = counted ? pair.loss * weight : 0;
      for (int i = 0; i < rule.count; ++i)
        if (sorts(rule.terms[i])) loss += rule.weights[i] * ranked_loss(p, i, k).loss.value;
      p.slopes[k] = counted ? pair.chosen * weight * scale : 0;
      p.slopes[k + half] = counted ? pair.rejected * weight * scale : 0;
      if (counted) {
        after[kRewardRejected] += reward_of(p, t);
        after[kLogpsRejected] += shown_logps(p, t);
        after[kBetter] += reward_of(p, s) > reward_of(p, t) ? 1 : 0;
        after[kRatio] -= softplus(-pair.log_odds);
        after[kOdds] += pair.log_odds;
        after[kRejected] += 1;
      }
      after[kTokensRejected] += t[kCounted];
      p.rewards[k + half] = static_cast<float>(reward_of(p, t));
      p.logps[k + half] = static_cast<float>(shown_logps(p, t));
    } else {
      const double kl = p.kl == nullptr ? 0 : p.kl[p.kl_per_row ? k : 0];
      Value single{0, 0};
      if (counted) single = single_loss(rule, s, p.labels[k] != 0, kl);
      loss = single.value;
      p.slopes[k] = single.slope * scale;
      after[kKlSum] += counted ? kl : 0;
    }
    // no index that is known at run time only: it would put the sums into memory
    const bool chosen = paired || p.labels[k] != 0;
    if (chosen) {
      after[kRewardChosen] += counted ? reward_of(p, s) : 0;
      after[kLogpsChosen] += counted ? shown_logps(p, s) : 0;
      after[kChosen] += counted ? 1 : 0;
      after[kTokensChosen] += s[kCounted];
    } else {
      after[kRewardRejected] += counted ? reward_of(p, s) : 0;
      after[kLogpsRejected] += counted ? shown_logps(p, s) : 0;
      after[kRejected] += counted ? 1 : 0;
      after[kTokensRejected] += s[kCounted];
    }
    after[kPreference] += loss;
    after[kNotFinite] += loss - loss == 0 ? 0 : 1;
    p.rewards[k] = static_cast<float>(reward_of(p, s));
    p.logps[k] = static_cast<float>(shown_logps(p, s));
  }
  for (int i = 0; i < rule.count; ++i) {
    if (!sorts(rule.terms[i])) continue;
    team.barrier();  // the slopes so far are written: a rank adds to those of another pair
    for (int64_t k = team.first(); k < half; k += team.step()) {
      const Ranked rank = ranked_loss(p, i, k);
      const double slope = rank.loss.slope * rule.weights[i] * scale;
      if (rank.chosen >= 0 && is_counted(p, rank.chosen)) p.slopes[rank.chosen] += slope;
      if (rank.rejected >= 0 && is_counted(p, rank.rejected - half)) p.slopes[rank.rejected] -= slope;
    }
  }
  team.template sum<kAfter>(after);
  if (!team.leads()) return;

  double sft = 0;
  bool likely = rule.nll_coef != 0, odds = false;
  for (int i = 0; i < rule.count; ++i) {
    if (rule.terms[i] == PreferenceTerm::sft) sft += rule.weights[i], likely = true;
    odds = odds || rule.terms[i] == PreferenceTerm::orpo;
  }
  const double mean_weight = number > 0 ? before[kWeight] / number : 1, coefficient = rule.nll_coef + sft * mean_weight;
  const double preference = after[kPreference] / items;
  const double chosen = after[kChosen] > 1 ? after[kChosen] : 1, rejected = after[kRejected] > 1 ? after[kRejected] : 1;
  const double loss = preference + (likely ? coefficient * -before[kNllSum] / nll_items : 0);
  *p.loss = static_cast<float>(loss * rule.factor);
  p.slopes[p.rows] = likely ? -coefficient * rule.factor / nll_items : 0;
  const double metrics[kPreferenceMetrics] = {
      after[kRewardChosen] / chosen, after[kRewardRejected] / rejected,
      after[kRewardChosen] / chosen - after[kRewardRejected] / rejected, after[kBetter] / here,
      after[kLogpsChosen] / chosen, after[kLogpsRejected] / rejected, preference,
      -before[kNllSum] / (before[kNllCount] > 1 ? before[kNllCount] : 1), odds ? after[kRatio] / here : 0,
      odds ? after[kOdds] / here : 0, mean_weight,
      p.kl == nullptr ? 0 : p.kl_per_row ? after[kKlSum] / here : *p.kl, number, after[kTokensChosen],
      after[kTokensRejected], after[kNotFinite]};
  for (int i = 0; i < kPreferenceMetrics; ++i) p.metrics[i] = static_cast<float>(metrics[i]);
}

// Where a sequence begins, and the one before it ends. Offsets that nobody checked lead to no illegal access.
RLKERNEL_BOTH int64_t preference_offset(const int64_t* cu_seqlens, int64_t length, int64_t row) {
  if (cu_seqlens == nullptr) return row * length;
  const int64_t offset = cu_seqlens[row];
  return offset < 0 ? 0 : offset > length ? length : offset;
}

// The gradient of the tokens of a row: of those before the cutoff and behind it, without and with the likelihood's.
struct RowSlopes {
  float head, tail, nll, head_nll, tail_nll;
  int64_t cutoff;
};

RLKERNEL_BOTH RowSlopes row_slopes(const PreferenceBackward& b, int64_t row) {
  const bool chosen = b.labels == nullptr ? row < b.rows / 2 : b.labels[row] != 0, whole = b.ld_alpha == 1;
  const double upstream = *b.grad_loss, head = b.slopes[row] * upstream, tail = whole ? head : head * b.ld_alpha;
  const double nll = chosen ? b.slopes[b.rows] * upstream : 0;
  return {static_cast<float>(head), static_cast<float>(tail), static_cast<float>(nll), static_cast<float>(head + nll),
          static_cast<float>(tail + nll), whole ? b.length : static_cast<int64_t>(b.stats[row * kSequenceSums + kCutoff])};
}

}  // namespace rlkernel::preference
