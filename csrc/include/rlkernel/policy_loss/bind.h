// The arguments of the policy loss in Python; its rule is rlkernel.calls.policy_loss.PolicyRule, field by field.
#pragma once
#include "rlkernel/batch.h"
#include "rlkernel/policy_loss/arguments.h"

namespace rlkernel {

RLKERNEL_FIELDS(PolicyLossRule, term, level, aggregation, kl, kl_gradient_of_k2, kl_weight, divergence, correction, verdict,
                shrink, normalize, stale_only, sign_mask, two_sided, low, high, delta, dual, log_clip, tau_positive,
                tau_negative, beta, kl_input, kl_output, entropy_coef, k_positive, lambda_positive, k_negative, lambda_negative,
                coefficient, weight_low, weight_high, log_weight_low, log_weight_high, token_low, token_high, extreme_low,
                extreme_high, sum_k1_low, sum_k1_high, mean_k1_low, mean_k1_high, sum_k2_high, mean_k2_high, sum_k3_high,
                mean_k3_high, tv_high, off_policy_high, sign_low, sign_high, max_staleness, log_decay, denominator, factor)
inline const char* annotation(const PolicyLossRule&) { return "PolicyRule"; }

}  // namespace rlkernel

namespace rlkernel::calls {

struct policy_loss {
  Tensor logprobs;
  Optional old_logprobs;
  Tensor advantages, mask;
  Optional ref_logprobs, rollout_logprobs, entropy, staleness, selected, token_counts, cu_seqlens;
  PolicyLossRule rule;
  Tensor grad_logprobs;
  Optional grad_entropy;
  Tensor partials, values;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(logprobs, cu_seqlens);
    const int64_t rows = batch.rows, total = batch.total;
    const bool advantage_per_token = advantages.has_shape_of(logprobs);
    const bool staleness_per_token = staleness.given && staleness.has_shape_of(logprobs);
    const auto floats = [&](const Tensor& x, bool per_token = true) { return x.dense<const float>(per_token ? total : rows); };
    return launch({floats(logprobs), floats(old_logprobs), floats(advantages, advantage_per_token),
                   mask.dense<const uint8_t>(total), floats(ref_logprobs), floats(rollout_logprobs), floats(entropy),
                   floats(staleness, staleness_per_token), selected.dense<const uint8_t>(total), floats(token_counts, false),
                   batch.offsets(), rows, batch.length, advantage_per_token, staleness_per_token,
                   grad_logprobs.dense<float>(total), grad_entropy.dense<float>(total), partials.dense<double>(rows * kPartials),
                   values.dense<float>(kValues + 1), rule},
                  stream);
  }
};

RLKERNEL_FIELDS(policy_loss, logprobs, old_logprobs, advantages, mask, ref_logprobs, rollout_logprobs, entropy, staleness,
                selected, token_counts, cu_seqlens, rule, grad_logprobs, grad_entropy, partials, values)

// rlkernel.calls.policy_loss.CovariancePick.
struct CovariancePick {
  bool by_hash;
  double share;
  float cov_low, cov_high, low, high;
  uint32_t seed;
};

RLKERNEL_FIELDS(CovariancePick, by_hash, share, cov_low, cov_high, low, high, seed)
inline const char* annotation(const CovariancePick&) { return "CovariancePick"; }

struct policy_select {
  Tensor logprobs;
  Optional old_logprobs;
  Tensor advantages, mask;
  Optional cu_seqlens;
  CovariancePick pick;
  Tensor selected, partials, counts;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(logprobs, cu_seqlens);
    const int64_t total = batch.total;
    const bool per_token = advantages.has_shape_of(logprobs);
    return launch({logprobs.dense<const float>(total), old_logprobs.dense<const float>(total),
                   advantages.dense<const float>(per_token ? total : batch.rows), mask.dense<const uint8_t>(total),
                   batch.offsets(), batch.rows, batch.length, per_token, pick.by_hash, pick.share, pick.cov_low, pick.cov_high,
                   pick.low, pick.high, pick.seed, selected.dense<uint8_t>(total),
                   partials.dense<double>((batch.rows + 1) * kSelectionSums), counts.dense<uint32_t>(kLevels * kBins)},
                  stream);
  }
};

RLKERNEL_FIELDS(policy_select, logprobs, old_logprobs, advantages, mask, cu_seqlens, pick, selected, partials, counts)

}  // namespace rlkernel::calls
