// The arguments of the preference losses in Python; the rule is rlkernel.calls.preference_loss.PreferenceRule by its fields.
#pragma once
#include "rlkernel/batch.h"
#include "rlkernel/preference_loss/arguments.h"

namespace rlkernel::calls {

struct preference_sums {
  Tensor logprobs;
  Optional ref_logprobs;
  Tensor mask;
  Optional nll_mask, log_sum_sq_probs, cu_seqlens;
  bool paired;
  double ld_alpha;
  Tensor stats;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(logprobs, cu_seqlens);
    const int64_t total = batch.total;
    const bool per_token = ref_logprobs.given && ref_logprobs.has_shape_of(logprobs);
    return launch({logprobs.dense<const float>(total), ref_logprobs.dense<const float>(per_token ? total : batch.rows),
                   per_token, mask.dense<const uint8_t>(total), nll_mask.dense<const uint8_t>(total),
                   log_sum_sq_probs.dense<const float>(total), batch.offsets(), batch.rows, batch.length, paired, ld_alpha,
                   stats.dense<double>(batch.rows * kSequenceSums)},
                  stream);
  }
};

RLKERNEL_FIELDS(preference_sums, logprobs, ref_logprobs, mask, nll_mask, log_sum_sq_probs, cu_seqlens, paired, ld_alpha, stats)

struct Rule {
  Several<PreferenceTerm, kMaxTerms> terms;
  Several<double, kMaxTerms> weights, smoothing;
  bool paired, per_token;
  PreferenceDivergence divergence;
  bool weighting;
  double beta, gamma, discopop_tau, exponent, ld_alpha, nll_coef, desirable_weight, undesirable_weight, factor;
  double items, nll_items;

  operator PreferenceRule() const {
    PreferenceRule rule{terms.count, {}, {}, {}, paired, per_token, divergence, weighting, beta, gamma, discopop_tau, exponent,
                        ld_alpha, nll_coef, desirable_weight, undesirable_weight, factor, items, nll_items};
    if (weights.count != terms.count || smoothing.count != terms.count)
      throw std::invalid_argument("preference_loss: each term of rule must have a weight and a smoothing");
    std::copy_n(terms.items, terms.count, rule.terms);
    std::copy_n(weights.items, terms.count, rule.weights);
    std::copy_n(smoothing.items, terms.count, rule.smoothing);
    return rule;
  }
};

RLKERNEL_FIELDS(Rule, terms, weights, smoothing, paired, per_token, divergence, weighting, beta, gamma, discopop_tau, exponent,
                ld_alpha, nll_coef, desirable_weight, undesirable_weight, factor, items, nll_items)
inline const char* annotation(const Rule&) { return "PreferenceRule"; }

struct preference_loss {
  Tensor stats;
  Optional labels, kl, order, items, nll_items, running_delta;
  Rule rule;
  Tensor loss, metrics, slopes, rewards, logps;
  Optional new_delta;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    stats.want_rank(2);
    const int64_t rows = stats.size(0);
    const bool kl_per_row = kl.given && kl.elements() != 1;
    if (running_delta.given && !new_delta.given) new_delta.refuse("be given with running_delta", "None");
    return launch({stats.dense<const double>(rows * kSequenceSums), rows, labels.dense<const uint8_t>(rows),
                   kl.dense<const float>(kl_per_row ? rows : 1), kl_per_row, order.dense<const int64_t>(4 * (rows / 2)),
                   items.dense<const double>(1), nll_items.dense<const double>(1), running_delta.dense<const float>(2),
                   loss.dense<float>(1), metrics.dense<float>(kPreferenceMetrics), slopes.dense<double>(rows + 1),
                   rewards.dense<float>(rows), logps.dense<float>(rows), new_delta.dense<float>(2), rule},
                  stream);
  }
};

RLKERNEL_FIELDS(preference_loss, stats, labels, kl, order, items, nll_items, running_delta, rule, loss, metrics, slopes,
                rewards, logps, new_delta)

struct preference_backward {
  Tensor grad_loss, slopes, stats, mask;
  Optional nll_mask, labels, cu_seqlens;
  double ld_alpha;
  Tensor grad;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(mask, cu_seqlens);
    const int64_t rows = batch.rows, total = batch.total;
    return launch({grad_loss.dense<const float>(1), slopes.dense<const double>(rows + 1),
                   stats.dense<const double>(rows * kSequenceSums), mask.dense<const uint8_t>(total),
                   nll_mask.dense<const uint8_t>(total), labels.dense<const uint8_t>(rows), batch.offsets(), rows, batch.length,
                   ld_alpha, grad.dense<float>(total)},
                  stream);
  }
};

RLKERNEL_FIELDS(preference_backward, grad_loss, slopes, stats, mask, nll_mask, labels, cu_seqlens, ld_alpha, grad)

}  // namespace rlkernel::calls
