// Which tokens kl_cov and clip_cov pick, by the batch's covariance of log-probability and advantage.
//
// kl_cov wants the largest: their covariances become integers of the same order, of which the least that is wanted is found
// digit by digit, by counts. clip_cov counts its candidates, of which a hash takes as many as are wanted on average. Counts
// are integers, so the order of the tokens is free; the means are summed in a fixed one, in fp64, and so are hardly ever those
// of another order: every backend picks the same.
#pragma once
#include <cmath>

#include "rlkernel/policy_loss_sequence.h"

namespace RLKERNEL_SPACE {

template <class F>
using BitsOf = decltype(raw(F{}));

template <class Team>
RLKERNEL_INLINE void selection_sums(const PolicySelection& p, int64_t row, Team& team) {
  using F = typename Team::Value;
  const F one = spread<F>(1.0f), of_row = spread<F>(p.advantage_per_token ? 0.0f : p.advantages[row]);
  typename Team::template Sums<kSelectionSums> sums;
  team.each(sums, [&](auto at) {
    const auto present = at.mask(p.mask);
    sums.add_wide(0, keep(present, one));
    sums.add_wide(1, keep(present, at.load(p.logprobs)));
    sums.add_wide(2, keep(present, p.advantage_per_token ? at.load(p.advantages) : of_row));
  });
  team.finish(sums);
  if (team.leads())
    for (int k = 0; k < kSelectionSums; ++k) p.partials[row * kSelectionSums + k] = sums.total(k);
}

// What the sums of the batch say.
struct Batch {
  double wanted;
  float logprob, advantage;  // their means
};

RLKERNEL_INLINE Batch batch_of(const PolicySelection& p) {
  const double* sums = p.partials + p.rows * kSelectionSums;
  const double wanted = floor(sums[0] * p.share);
  return {wanted > 1 ? wanted : 1, static_cast<float>(sums[1] / sums[0]), static_cast<float>(sums[2] / sums[0])};
}

template <class F>
struct Scored {
  MaskOf<F> present;
  F logprob, advantage, covariance;
};

template <class F, class At>
RLKERNEL_INLINE Scored<F> scored(const PolicySelection& p, const Batch& batch, int64_t row, At at) {
  const MaskOf<F> present = at.mask(p.mask);
  const F logprob = keep(present, at.load(p.logprobs));
  const F advantage = keep(present, p.advantage_per_token ? at.load(p.advantages) : spread<F>(p.advantages[row]));
  return {present, logprob, advantage, (advantage - batch.advantage) * (logprob - batch.logprob)};
}

// An integer for each covariance, of the same order: -0 is 0, and NaN is above all.
template <class F>
RLKERNEL_INLINE BitsOf<F> rank_of(F covariance) {
  using U = BitsOf<F>;
  const U bits = raw(keep(covariance != F{}, covariance)), sign = U{} - (bits >> 31);
  return covariance == covariance ? bits ^ (sign | 0x80000000u) : U{} - 1u;
}

template <class F, class At>
RLKERNEL_INLINE MaskOf<F> is_candidate(const PolicySelection& p, const Scored<F>& x, At at) {
  const F old = p.old_logprobs == nullptr ? x.logprob : keep(x.present, at.load(p.old_logprobs));
  const F ratio = exp_of(x.logprob - old).exp;
  const MaskOf<F> clipped = ratio * x.advantage > clamped(ratio, p.low, p.high) * x.advantage;
  return both<MaskOf<F>>(both<MaskOf<F>>(x.present, not_(clipped)),
                         both<MaskOf<F>>(x.covariance > p.cov_low, x.covariance < p.cov_high));
}

// murmur3's finaliser of the token's log-probability, its position in the sequence and the seed.
template <class F, class At>
RLKERNEL_INLINE BitsOf<F> hash_of(const PolicySelection& p, const Scored<F>& x, int64_t begin, At at) {
  const F logprob = p.old_logprobs == nullptr ? x.logprob : keep(x.present, at.load(p.old_logprobs));
  BitsOf<F> h = raw(logprob) ^ (at.position(begin) * 0x9E3779B1u + p.seed * 0x85EBCA77u);
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

constexpr RLKERNEL_INLINE int shift_of(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }
constexpr RLKERNEL_INLINE uint32_t bins_of(int level) { return level == 2 ? kBins / 2 : kBins; }

// Counts the tokens of a sequence whose rank begins with `prefix`, by their next digit; or all candidates in the first bin.
template <class Team>
RLKERNEL_INLINE void selection_count(const PolicySelection& p, int64_t row, Team& team, int level, uint32_t prefix,
                                     uint32_t* counts) {
  using F = typename Team::Value;
  const Batch batch = batch_of(p);
  typename Team::template Sums<1> none;
  team.each(none, [&](auto at) {
    const Scored<F> x = scored<F>(p, batch, row, at);
    if (p.by_hash) return at.tally(counts, is_candidate(p, x, at), BitsOf<F>{});
    const BitsOf<F> rank = rank_of(x.covariance);
    const MaskOf<F> counted = level == 0 ? x.present : both<MaskOf<F>>(x.present, rank >> shift_of(level - 1) == prefix);
    at.tally(counts, counted, (rank >> shift_of(level)) & (bins_of(level) - 1));
  });
}

// Writes what is picked: from the rank `least` on, or of `candidates` as many as are wanted.
template <class Team>
RLKERNEL_INLINE void selection_write(const PolicySelection& p, int64_t row, Team& team, uint32_t least, uint32_t candidates) {
  using F = typename Team::Value;
  const Batch batch = batch_of(p);
  const double range = 4294967296.0, hashes = ceil(batch.wanted / candidates * range);
  const int last = static_cast<int>((hashes < range ? hashes : range) - 2147483649.0);
  typename Team::template Sums<1> none;
  team.each(none, [&](auto at) {
    const Scored<F> x = scored<F>(p, batch, row, at);
    const F c = x.covariance;
    at.store(p.selected,
             p.by_hash ? both<MaskOf<F>>(is_candidate(p, x, at), decltype(bits_of(c))(hash_of(p, x, team.begin, at)) <= last)
                       : both<MaskOf<F>>(both<MaskOf<F>>(x.present, c == c), rank_of(c) >= least));
  });
}

}  // namespace RLKERNEL_SPACE
