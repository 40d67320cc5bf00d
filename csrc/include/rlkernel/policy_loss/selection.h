// Which tokens kl_cov and clip_cov pick, by the batch's covariance of log-probability and advantage.
//
// kl_cov wants those with the largest covariance, clip_cov the candidates with the least hash. Either becomes an integer, of
// which the least that is wanted is found digit by digit, by counts; of the tokens that have it the first in the batch are
// picked, so that there are never more than are wanted. Counts are integers, so the order of the tokens is free; the means
// are summed in a fixed one, in fp64, and so are hardly ever those of another order: every backend picks the same.
#pragma once
#include <cmath>

#include "rlkernel/policy_loss/sequence.h"

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

// An integer for each covariance that is a number, of the same order: -0 is 0.
template <class F>
RLKERNEL_INLINE BitsOf<F> rank_of(F covariance) {
  using U = BitsOf<F>;
  const U bits = raw(keep(covariance != F{}, covariance)), sign = U{} - (bits >> 31);
  return bits ^ (sign | 0x80000000u);
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

// The tokens that may be picked; the largest ranks are.
template <class F>
struct Ranked {
  MaskOf<F> among;
  BitsOf<F> rank;
};

template <class F, class At>
RLKERNEL_INLINE Ranked<F> ranked(const PolicySelection& p, const Batch& batch, int64_t row, int64_t begin, At at) {
  const Scored<F> x = scored<F>(p, batch, row, at);
  if (p.by_hash) return {is_candidate(p, x, at), hash_of(p, x, begin, at) ^ 0x7fffffffu};  // the least as an int32
  return {both<MaskOf<F>>(x.present, x.covariance == x.covariance), rank_of(x.covariance)};
}

constexpr RLKERNEL_INLINE int shift_of(int level) { return level == 0 ? 21 : level == 1 ? 10 : 0; }
constexpr RLKERNEL_INLINE uint32_t bins_of(int level) { return level == 2 ? kBins / 2 : kBins; }

// Counts the tokens of a sequence whose rank begins with `prefix`, by their next digit.
template <class Team>
RLKERNEL_INLINE void selection_count(const PolicySelection& p, int64_t row, Team& team, int level, uint32_t prefix,
                                     uint32_t* counts) {
  using F = typename Team::Value;
  const Batch batch = batch_of(p);
  typename Team::template Sums<1> none;
  team.each(none, [&](auto at) {
    const Ranked<F> x = ranked<F>(p, batch, row, team.begin, at);
    const MaskOf<F> counted = level == 0 ? x.among : both<MaskOf<F>>(x.among, x.rank >> shift_of(level - 1) == prefix);
    at.tally(counts, counted, (x.rank >> shift_of(level)) & (bins_of(level) - 1));
  });
}

// The least rank that is picked, and how many of the tokens that have it.
struct Cut {
  uint32_t rank, wanted;
};

// Whether more tokens have the least rank than are wanted of them.
RLKERNEL_INLINE bool is_tied(const PolicySelection& p, const Cut& cut) {
  return p.counts[(kLevels - 1) * kBins + cut.rank % bins_of(kLevels - 1)] > cut.wanted;
}

// How many tokens of `part` have the least rank; `part` belongs to the sequence that begins at `begin`.
template <class Team>
RLKERNEL_INLINE double ties_of(const PolicySelection& p, int64_t row, int64_t begin, const Team& part, const Cut& cut) {
  using F = typename Team::Value;
  const Batch batch = batch_of(p);
  typename Team::template Sums<1> ties;
  part.each(ties, [&](auto at) {
    const Ranked<F> x = ranked<F>(p, batch, row, begin, at);
    ties.add(0, keep(both<MaskOf<F>>(x.among, x.rank == cut.rank), spread<F>(1.0f)));
  });
  part.finish(ties);
  return ties.total(0);
}

// For the order among the sequences: how many of its tokens have the least rank.
template <class Team>
RLKERNEL_INLINE void selection_ties(const PolicySelection& p, int64_t row, Team& team, const Cut& cut) {
  const double ties = ties_of(p, row, team.begin, team, cut);
  if (team.leads()) p.partials[row * kSelectionSums] = ties;
}

// The place behind the last token with the least rank that is picked, `left` of them in this sequence. Each step counts half
// of what the one before it has counted.
template <class Team>
RLKERNEL_INLINE int64_t end_of_ties(const PolicySelection& p, int64_t row, const Team& team, const Cut& cut, double left) {
  if (left <= 0) return team.begin;
  if (p.partials[row * kSelectionSums] <= left) return team.end;
  int64_t begin = team.begin, end = team.end;
  while (end - begin > 1) {
    const int64_t middle = begin + (end - begin) / 2;
    const double ties = ties_of(p, row, team.begin, Team{begin, middle}, cut);
    if (ties >= left) {
      end = middle;
    } else {
      left -= ties;
      begin = middle;
    }
  }
  return end;
}

// Writes what is picked of a sequence; of its tokens with the least rank those before `end`.
template <class Team>
RLKERNEL_INLINE void selection_write(const PolicySelection& p, int64_t row, Team& team, const Cut& cut, int64_t end) {
  using F = typename Team::Value;
  const Batch batch = batch_of(p);
  const uint32_t places = static_cast<uint32_t>(end - team.begin);
  typename Team::template Sums<1> none;
  team.each(none, [&](auto at) {
    const Ranked<F> x = ranked<F>(p, batch, row, team.begin, at);
    const MaskOf<F> first = both<MaskOf<F>>(x.rank == cut.rank, at.position(team.begin) < places);
    at.store(p.selected, both<MaskOf<F>>(x.among, either<MaskOf<F>>(x.rank > cut.rank, first)));
  });
}

}  // namespace RLKERNEL_SPACE
