// Arguments of the policy loss: rows of tokens, either [rows, length] or packed with cu_seqlens, all fp32 and dense.
//
//   loss = scale * sum over sequences, sum over tokens of share_s * (weight_t * term_t + beta * kl_t - entropy_coef * H_t)
//
// share_s is 1, or 1 / tokens of the sequence. `scale` is known after the last sequence, so grad_logprobs is written
// without it: backward multiplies it by values[1] and the upstream gradient.
#pragma once
#include "rlkernel/kernel.h"
#include "rlkernel/names.h"

namespace rlkernel {

// The names are those of rlkernel/calls/policy_loss.py, which says what each field means.
RLKERNEL_ENUM(Term, clipped, cispo, reinforce, sapo, gmpo, dppo, vespo, surrogate, dro, cispo_mask)
RLKERNEL_ENUM(Level, token, sequence, sequence_token)
RLKERNEL_ENUM(Aggregation, tokens, sequence_sums, sequence_means)
RLKERNEL_ENUM(Kl, none, k1, abs, k2, k3)
RLKERNEL_ENUM(KlWeight, none, ratio, token, score, rollout)
RLKERNEL_ENUM(Divergence, none, tv, kl)
RLKERNEL_ENUM(Correction, absent, none, token, sequence, geometric)
RLKERNEL_ENUM(Verdict, truncate, mask)

struct PolicyLossRule {
  Term term;
  Level level;
  Aggregation aggregation;
  Kl kl;
  bool kl_gradient_of_k2;
  KlWeight kl_weight;
  Divergence divergence;
  Correction correction;
  Verdict verdict;
  bool shrink, normalize, stale_only;
  Divergence sign_mask;
  bool two_sided;
  float low, high, delta, dual, log_clip, tau_positive, tau_negative, beta;
  float kl_input, kl_output, entropy_coef;
  float k_positive, lambda_positive, k_negative, lambda_negative, coefficient;
  float weight_low, weight_high, log_weight_low, log_weight_high;
  float token_low, token_high, extreme_low, extreme_high, sum_k1_low, sum_k1_high, mean_k1_low, mean_k1_high;
  float sum_k2_high, mean_k2_high, sum_k3_high, mean_k3_high, tv_high, off_policy_high, sign_low, sign_high;
  float max_staleness, log_decay;
  float denominator, factor;
};
constexpr float kLogTiny = -18.420681f;  // log(1e-8), the least that vespo takes for a weight

// Sums of one sequence, doubles.
enum Sum : int {
  kLoss, kTokens, kSequences, kClippedLow, kClippedHigh, kClippedFar, kMinusLogRatio, kK3, kRatio, kEntropy, kKl, kWeight,
  kKept, kNotFinite, kOutside, kSums
};
constexpr int kPartials = kSums + 1;  // and the largest ratio
constexpr int kValues = 17;           // loss, scale, then the metrics in the order of rlkernel/calls/policy_loss.py

struct PolicyLoss {
  const float *logprobs, *old_logprobs, *advantages;
  const uint8_t* mask;
  const float *ref_logprobs, *rollout_logprobs, *entropy;  // null where not given
  const float* staleness;                                  // versions of the policy since the token was sampled
  const uint8_t* selected;                                 // tokens that clip_cov or kl_cov has picked
  const float* token_counts;                               // what the mean of each row divides by instead of its tokens
  const int64_t* cu_seqlens;                               // [rows + 1], or null: every row has `length` tokens
  int64_t rows, length;                                    // packed: `length` tokens in all
  bool advantage_per_token, staleness_per_token;           // else one for each row
  float *grad_logprobs, *grad_entropy;                     // grad_entropy may be null
  double* partials;                                        // [rows, kPartials]
  float* values;                                           // [kValues + 1]; the last is the mean weight of the batch
  PolicyLossRule rule;
};

// Which tokens kl_cov picks, or clip_cov.
struct PolicySelection {
  const float *logprobs, *old_logprobs, *advantages;  // old_logprobs may be null
  const uint8_t* mask;
  const int64_t* cu_seqlens;
  int64_t rows, length;
  bool advantage_per_token, by_hash;   // by_hash: clip_cov, else kl_cov
  double share;                        // of the tokens
  float cov_low, cov_high, low, high;  // clip_cov's candidates: the bounds of their covariance and those of their ratio
  uint32_t seed;
  uint8_t* selected;  // [tokens]
  double* partials;   // [rows + 1, kSelectionSums]; the last row is that of the batch
  uint32_t* counts;   // [kLevels, kBins]
};
constexpr int kSelectionSums = 3;
constexpr int kLevels = 3, kBins = 1 << 11;  // digits of 11, 11 and 10 bits

RLKERNEL_KERNEL(policy_loss, const PolicyLoss&)
RLKERNEL_KERNEL(policy_select, const PolicySelection&)

}  // namespace rlkernel
