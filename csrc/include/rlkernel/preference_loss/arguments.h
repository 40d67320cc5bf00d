// The preference losses in three steps, each one launch: the sums of every sequence; the loss of the sums, its metrics and
// its derivative by the sums; in backward, that derivative spread over the tokens. Tokens are [rows, length] or packed with
// cu_seqlens, all fp32 and dense; of pairs, the first half of the rows is chosen. Whatever follows from a sum is fp64: a
// log-ratio is the small difference of two sums.
#pragma once
#include "rlkernel/kernel.h"
#include "rlkernel/names.h"

namespace rlkernel {

// The names are those of rlkernel/calls/preference_loss.py.
RLKERNEL_ENUM(PreferenceTerm, sft, sigmoid, hinge, ipo, exo_pair, nca_pair, robust, bco_pair, sppo_hard, aot, aot_unpaired,
              apo_zero, apo_down, discopop, sigmoid_norm, orpo, simpo, kto, apo_zero_unpaired, ipo_sum)
RLKERNEL_ENUM(PreferenceDivergence, reverse_kl, forward_kl, js_divergence, alpha_divergence)

// Columns of the sums of a sequence: SEQUENCE_SUMS of rlkernel/calls/preference_loss.py.
enum SequenceSum : int { kLogps, kRefLogps, kCounted, kNll, kNllTokens, kAligned, kCutoff, kSequenceSums };

constexpr int kMaxTerms = 16;
constexpr int kPreferenceMetrics = 16;

struct PreferenceSums {
  const float *logprobs, *ref_logprobs;  // ref_logprobs may be null
  bool ref_per_token;                    // else one sum for each row
  const uint8_t *mask, *nll_mask;        // nll_mask null: mask
  const float* log_sum_sq_probs;         // may be null
  const int64_t* cu_seqlens;             // [rows + 1], or null
  int64_t rows, length;                  // packed: `length` tokens in all
  bool paired;
  double ld_alpha;                       // weight of the tokens beyond the length of the other side; 1: none has one
  double* stats;                         // [rows, kSequenceSums]
};

struct PreferenceRule {
  int count;  // of terms
  PreferenceTerm terms[kMaxTerms];
  double weights[kMaxTerms], smoothing[kMaxTerms];
  bool paired, per_token;
  PreferenceDivergence divergence;
  bool weighting;
  double beta, gamma, discopop_tau, exponent, ld_alpha, nll_coef, desirable_weight, undesirable_weight, factor;
  double items, nll_items;  // 0: those that are here
};

struct PreferenceLoss {
  const double* stats;
  int64_t rows;
  const uint8_t* labels;            // null: pairs
  const float* kl;                  // null: 0
  bool kl_per_row;
  const int64_t* order;             // [4, rows / 2], null where no loss sorts
  const double *items, *nll_items;  // null: those of the rule
  const float* running_delta;       // [2], may be null
  float *loss, *metrics;            // [kPreferenceMetrics]
  double* slopes;                   // [rows + 1]: d loss / d logps, and that of a token of the likelihood
  float *rewards, *logps;           // [rows]
  float* new_delta;                 // [2], where running_delta is given
  PreferenceRule rule;
};

struct PreferenceBackward {
  const float* grad_loss;
  const double *slopes, *stats;
  const uint8_t *mask, *nll_mask, *labels;
  const int64_t* cu_seqlens;
  int64_t rows, length;
  double ld_alpha;
  float* grad;
};

RLKERNEL_KERNEL(preference_sums, const PreferenceSums&)
RLKERNEL_KERNEL(preference_loss, const PreferenceLoss&)
RLKERNEL_KERNEL(preference_backward, const PreferenceBackward&)

}  // namespace rlkernel
