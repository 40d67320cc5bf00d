// Arguments of the sampling kernels: a token, its log-probabilities and the set that a filter keeps, from logits [rows, vocab].
//
// Pass A (sampling_statistics) reads the logits once and leaves one record for each 4096 tokens of a row; pass B
// (sampling_finish) puts the records of a row together and, where a filter is on or a rank is wanted, reads again the groups of
// 64 tokens that can matter. Splits and groups are counted from the start of the vocabulary, so a row's bits do not depend on
// the tiles it comes in, nor on the rows around it.
#pragma once
#include <cmath>

#include "rlkernel/dtype.h"
#include "rlkernel/kernel.h"
#include "rlkernel/names.h"

namespace rlkernel {

constexpr int64_t kSamplingSplit = 4096;
constexpr int64_t kSamplingGroup = 64;

// What a split leaves, as doubles: [rows, splits, kRecord].
enum SamplingRecord : int {
  kMaxZ = 0,       // -inf where nothing is finite
  kArgmax = 1,     // its lowest id
  kSumZ = 2,       // sum of e = exp((z - max z) / T); NaN where x or z holds NaN or +inf
  kWeighted = 3,   // sum of e * (z - max z) / T
  kFinite = 4,     // number of z > -inf
  kMean = 5,       // of the finite z
  kM2 = 6,         // sum of (z - mean)^2 over them
  kMaxX = 7,       // of the logits as given
  kSumX = 8,       // sum of exp(x - max x)
  kKey = 9,        // of the draw, relative to max z / T; +inf: this split has the forced token; -inf: nothing to draw
  kToken = 10,
  kTokenZ = 11,
  kTokenX = 12,
  kRecord = 13,
};

// Of which tokens top_p takes its share: those that all other filters keep, all of them, or the first top_k, of which what is
// left is cut by the thresholds.
RLKERNEL_ENUM(FilterOrder, sequential, joint, top_k_first)

// The rank of tokens that are as likely: one for each, by id; that of the last of them; that of the last one that is kept, of a
// token that is.
RLKERNEL_ENUM(RankTies, first, max, kept)

// Thresholds of the tempered probability of a row, whose likeliest token is kept whatever they say: at least epsilon; at least
// min(eta, sqrt(eta) * exp(-entropy)); at least top_a times the largest one squared.
enum SamplingThreshold : int { kEpsilon = 0, kEta = 1, kTopA = 2, kThresholds = 3 };

// Of what all others keep, typical-p keeps the share nearest to the mean logit, with ties: a surprise less the entropy is the
// mean of z / T less the token's. Of what is left XTC drops what is likelier than the least likely one that has the threshold
// of it; where it was not drawn, its threshold is 1.
enum SamplingBand : int { kTypical = 0, kExclude = 1, kBand = 2 };

// A value for each row, or one for all where `each` is null.
template <class T>
struct PerRow {
  const T* each;
  T all;
};

struct SamplingInputs {
  const void* logits;            // row r starts r * row_stride elements on; may be null in pass B when nothing is read again
  Dtype dtype;
  int64_t rows, row_stride;
  int64_t vocab, vocab_start;    // of this tile; vocab_start is a multiple of the split
  int64_t whole_vocab;
  const float* adjusted;         // z, at the same places as the logits; null: z is x
  int64_t adjusted_stride;
  const int32_t* bitmask;        // bit i % 32 of word i / 32: token i (of the whole vocabulary) is allowed; null: all are
  int64_t bitmask_stride;
  PerRow<float> temperature;     // 0: greedy; else from kColdest to kHottest
  PerRow<int64_t> top_k;         // off below 1 and from V on
  PerRow<float> top_p;           // off from 1 on
  PerRow<float> min_p;           // off from 0 down
  PerRow<float> top_n_sigma;     // off at infinity
  const float* thresholds;       // [rows, kThresholds], each off at 0; null: none
  const float* band;             // [rows, kBand], each off at 1; null: none
  const int64_t *seeds, *positions;  // [rows]; null with token_ids; positions also where all are 0
  const int64_t* token_ids;      // forced tokens; null: draw
  const uint8_t* skip;           // rows that are neither read nor written; null: none
  FilterOrder order;
  RankTies rank_ties;
  bool gumbel;
  bool greedy_softmax;           // processed log-probabilities of a row with T = 0 are the tempered ones, not those of its token
  bool raw, entropy, sigma;      // what pass A computes beyond the sums of z
  double* records;               // [rows, splits of whole_vocab, kRecord]
  float* group_max;              // [rows, groups of whole_vocab]; null: there is no second read
};

// Normal numbers: their inverse is finite, and they are not 0 where denormal ones are.
constexpr float kColdest = 0x1p-126f, kHottest = 0x1.fffffep127f;

// Static, as what follows: the files for each instruction set must not share one copy.
RLKERNEL_HOST_DEVICE static inline bool is_temperature(float t) { return t >= kColdest && t <= kHottest; }

template <class T>
RLKERNEL_HOST_DEVICE static inline T of_row(const PerRow<T>& value, int64_t r) {
  return value.each != nullptr ? value.each[r] : value.all;
}

// Whether the row's parameters mean something: on a GPU nobody has looked at them. A row of others is not valid.
RLKERNEL_HOST_DEVICE static inline bool parameters_hold(const SamplingInputs& in, int64_t r) {
  const float t = of_row(in.temperature, r), p = of_row(in.top_p, r), m = of_row(in.min_p, r);
  for (int i = 0; in.thresholds != nullptr && i < kThresholds; ++i) {
    const float threshold = in.thresholds[r * kThresholds + i];
    if (!(threshold >= 0 && threshold <= 1)) return false;
  }
  for (int i = 0; in.band != nullptr && i < kBand; ++i) {
    const float share = in.band[r * kBand + i];
    if (!(share > 0 && share <= 1)) return false;
  }
  return (t == 0 || is_temperature(t)) && p > 0 && p <= 1 && m >= 0 && m <= 1 && of_row(in.top_n_sigma, r) > 0 &&
         of_row(in.top_k, r) >= -1;
}

RLKERNEL_HOST_DEVICE static inline int64_t position_of(const SamplingInputs& in, int64_t row) {
  return in.positions == nullptr ? 0 : in.positions[row];
}

// The least (z - max z) / T that a row's thresholds keep, from log(sum exp((z - max z) / T)) and the entropy.
RLKERNEL_HOST_DEVICE static inline double least_of(const float* thresholds, double log_sum, double entropy) {
  double least = -HUGE_VAL;
  if (thresholds[kEpsilon] > 0) least = log(static_cast<double>(thresholds[kEpsilon])) + log_sum;
  if (thresholds[kEta] > 0) {
    const double eta = log(static_cast<double>(thresholds[kEta])), lower = 0.5 * eta - entropy;
    least = fmax(least, (lower < eta ? lower : eta) + log_sum);
  }
  if (thresholds[kTopA] > 0) least = fmax(least, log(static_cast<double>(thresholds[kTopA])) - log_sum);
  return fmin(least, 0.0);
}

// The row's part of the band, null where it is off.
RLKERNEL_HOST_DEVICE static inline const float* band_of(const SamplingInputs& in, int64_t r) {
  if (in.band == nullptr) return nullptr;
  const float* const band = in.band + r * kBand;
  return band[kTypical] < 1 || band[kExclude] < 1 ? band : nullptr;
}

// The least z - max z at which XTC sees a token: from the threshold's share of the kept mass on, and never where integer masses
// end, so that what it leaves has one.
RLKERNEL_HOST_DEVICE static inline float exclusion_of(float threshold, int64_t mass, double temperature) {
  const double share = log(static_cast<double>(threshold) * (static_cast<double>(mass) * 0x1p-40));
  return static_cast<float>(temperature * fmax(share, -27.0));
}

struct SamplingOutputs {
  int64_t* token_ids;
  float *raw_logprobs, *tempered_logprobs, *processed_logprobs, *kept_mass;  // raw_logprobs may be null
  int64_t* kept_count;
  float* entropy;                // or null
  int64_t* rank;                 // or null
  int32_t* support;              // [rows, support_size], or null
  int64_t support_size;
  bool* valid;
  float *row_max, *log_sum;      // or null
};

RLKERNEL_KERNEL(sampling_statistics, const SamplingInputs&)
RLKERNEL_KERNEL(sampling_finish, const SamplingInputs&, const SamplingOutputs&)

}  // namespace rlkernel
