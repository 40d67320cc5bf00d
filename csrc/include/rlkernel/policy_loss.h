// Arguments of the policy loss: rows of tokens, either [rows, length] or packed with cu_seqlens, all fp32 and dense.
//
//   loss = scale * sum over sequences, sum over tokens of share_s * (weight_t * term_t + beta * kl_t - entropy_coef * H_t)
//
// share_s is 1, or 1 / tokens of the sequence. `scale` is known after the last sequence, so grad_logprobs is written
// without it: backward multiplies it by values[1] and the upstream gradient.
#pragma once
#include <cstdint>

namespace rlkernel {

// The numbers are those of rlkernel/types.py.
enum class Term : int { clipped, cispo, reinforce, sapo, gmpo, dppo_tv };
enum class Level : int { token, sequence, sequence_token };
enum class Aggregation : int { tokens, sequence_sums, sequence_means };
enum class Kl : int { none, k1, abs, k2, k3 };
enum class Correction : int { none, token, sequence, geometric };
enum class Verdict : int { truncate, mask, reject };

struct PolicyLossRule {
  Term term;
  Level level;
  Aggregation aggregation;
  Kl kl;
  bool kl_gradient_of_k2;   // the "+" forms: the value of one estimator, the gradient of k2
  bool kl_times_ratio;
  Correction correction;
  Verdict verdict;
  bool shrink;              // tokens that the correction rejects leave the mask, and so the denominator
  float low, high;          // bounds of the ratio; of its logarithm for gmpo; of the change of probability for dppo
  float delta, dual;        // infinite where not used
  float log_clip;           // bound of the logarithm of the importance ratio; infinite where not used
  float tau_positive, tau_negative;
  float beta, entropy_coef;
  float weight_low, weight_high, log_veto;  // log_veto is -infinity where not used
  float denominator;        // tokens or sequences of the whole batch; 0: those that are here
  float factor;             // times this: data-parallel size over a normaliser
};

// Sums of one sequence, doubles.
enum Sum : int {
  kLoss, kTokens, kSequences, kClippedLow, kClippedHigh, kClippedFar, kMinusLogRatio, kK3, kRatio, kEntropy, kKl, kWeight,
  kKept, kNotFinite, kSums
};
constexpr int kPartials = kSums + 1;  // and the largest ratio
constexpr int kValues = 16;           // loss, scale, then the metrics in the order of rlkernel/types.py

struct PolicyLoss {
  const float *logprobs, *old_logprobs, *advantages;
  const uint8_t* mask;
  const float *ref_logprobs, *rollout_logprobs, *entropy;  // null where not given
  const int64_t* cu_seqlens;                               // [rows + 1], or null: every row has `length` tokens
  int64_t rows, length;                                    // packed: `length` tokens in all
  bool advantage_per_token;                                // else one for each row
  float *grad_logprobs, *grad_entropy;                     // grad_entropy may be null
  double* partials;                                        // [rows, kPartials]
  float* values;                                           // [kValues]
  PolicyLossRule rule;
};

namespace cpu {
int policy_loss(const PolicyLoss&, void* stream);
}
namespace cuda {
int policy_loss(const PolicyLoss&, void* stream);
}
namespace hip {
int policy_loss(const PolicyLoss&, void* stream);
}

}  // namespace rlkernel
