// The mathematics of group advantages, once for every device. A team works on a group: 32 lanes on a GPU, one on a CPU. It has
// `lane`, `kStride`, and sum(), least() and largest() over its lanes, whose order follows from nothing but their number; and
// `kPlain`, where it is known that there is one column without a mask or a weight.
#pragma once

#include "rlkernel/group_advantages/arguments.h"

#if defined(__CUDACC__) || defined(__HIP__)
#define RLKERNEL_TEAM_FUNCTION __device__ __forceinline__
#else
#define RLKERNEL_TEAM_FUNCTION static inline
#endif

namespace rlkernel {

constexpr int kWeightedColumn = -1;  // the column that is the weighted sum of all

template <bool kPlain>
RLKERNEL_TEAM_FUNCTION bool counts_at(const GroupAdvantages& a, int64_t response, int column) {
  if (kPlain || a.mask == nullptr) return true;
  const uint8_t* mask = a.mask + response * a.columns;
  if (column != kWeightedColumn) return mask[column] != 0;
  for (int k = 0; k < a.columns; ++k)
    if (mask[k] != 0) return true;
  return false;
}

// 0 where it does not count.
template <bool kPlain>
RLKERNEL_TEAM_FUNCTION double reward_at(const GroupAdvantages& a, int64_t response, int column) {
  if (kPlain) return a.rewards[response];
  const float* rewards = a.rewards + response * a.columns;
  const uint8_t* mask = a.mask != nullptr ? a.mask + response * a.columns : nullptr;
  if (column != kWeightedColumn) return mask == nullptr || mask[column] != 0 ? rewards[column] : 0.0;
  double total = 0;
  for (int k = 0; k < a.columns; ++k) {
    const double weight = a.reward_weights != nullptr ? a.reward_weights[k] : 1.0;
    if (mask == nullptr || mask[k] != 0) total += weight * rewards[k];
  }
  return total;
}

RLKERNEL_TEAM_FUNCTION int64_t response_at(const GroupAdvantages& a, int64_t place) {
  return a.order != nullptr ? a.order[place] : place;
}

struct GroupStatistics {
  double count, first, above;  // of the rewards that count; their mean is first + above
  double squares;              // sum of squared deviations
  double baseline;             // of opo, above `first`
  double best, second;         // of passk, above `first`
  int64_t winner;              // the place of the first of the best
};

// Differences to the group's first reward: a common offset costs no digits, and equal rewards deviate by exactly 0.
template <class Team>
RLKERNEL_TEAM_FUNCTION GroupStatistics statistics(const Team& team, const GroupAdvantages& a, int64_t start, int64_t end,
                                                  int column) {
  GroupStatistics s = {};
  int64_t first = end;
  for (int64_t p = start + team.lane; p < end; p += Team::kStride) {
    if (!counts_at<Team::kPlain>(a, response_at(a, p), column)) continue;
    s.count += 1;
    if (p < first) first = p;
  }
  s.count = team.sum(s.count);
  first = team.least(first);
  if (first == end) return s;
  s.first = reward_at<Team::kPlain>(a, response_at(a, first), column);
  double lengths = 0;
  for (int64_t p = start + team.lane; p < end; p += Team::kStride) {
    const int64_t i = response_at(a, p);
    if (!counts_at<Team::kPlain>(a, i, column)) continue;
    const double d = reward_at<Team::kPlain>(a, i, column) - s.first;
    s.above += d;
    if (a.estimator == Estimator::opo) lengths += a.lengths[i], s.baseline += a.lengths[i] * d;
  }
  s.above = team.sum(s.above) / s.count;
  if (a.estimator == Estimator::opo) {
    const double weighted = team.sum(s.baseline), tokens = team.sum(lengths);
    s.baseline = tokens == 0 ? s.above : weighted / tokens;  // without a token all lengths are alike
  }
  if (a.scale == RewardScale::group) {
    for (int64_t p = start + team.lane; p < end; p += Team::kStride) {
      const int64_t i = response_at(a, p);
      if (!counts_at<Team::kPlain>(a, i, column)) continue;
      const double d = reward_at<Team::kPlain>(a, i, column) - s.first - s.above;
      s.squares += d * d;
    }
    s.squares = team.sum(s.squares);
  }
  if (a.estimator != Estimator::passk) return s;
  const double lowest = -__builtin_huge_val();
  s.best = s.second = lowest;
  s.winner = end;
  for (int64_t p = start + team.lane; p < end; p += Team::kStride) {
    const int64_t i = response_at(a, p);
    const double d = counts_at<Team::kPlain>(a, i, column) ? reward_at<Team::kPlain>(a, i, column) - s.first : lowest;
    if (d > s.best) s.best = d;
  }
  s.best = team.largest(s.best);
  for (int64_t p = start + team.lane; p < end; p += Team::kStride) {
    const int64_t i = response_at(a, p);
    if (counts_at<Team::kPlain>(a, i, column) && reward_at<Team::kPlain>(a, i, column) - s.first == s.best && p < s.winner) s.winner = p;
  }
  s.winner = team.least(s.winner);
  for (int64_t p = start + team.lane; p < end; p += Team::kStride) {
    const int64_t i = response_at(a, p);
    const double d = counts_at<Team::kPlain>(a, i, column) && p != s.winner ? reward_at<Team::kPlain>(a, i, column) - s.first : lowest;
    if (d > s.second) s.second = d;
  }
  s.second = team.largest(s.second);
  return s;
}

RLKERNEL_TEAM_FUNCTION double root(double x) {
#if defined(__CUDACC__) || defined(__HIP__)
  return sqrt(x);
#else
  return __builtin_sqrt(x);
#endif
}

// What the deviations are multiplied by; `squares` and `count` are the group's or the batch's.
RLKERNEL_TEAM_FUNCTION double scale_of(const GroupAdvantages& a, double squares, double count) {
  const double freedom = a.unbiased ? count - 1 : count;
  return 1 / (root(squares / (freedom > 1 ? freedom : 1)) + a.eps);
}

RLKERNEL_TEAM_FUNCTION double times(double x, double scale) { return x == 0 ? 0.0 : x * scale; }

RLKERNEL_TEAM_FUNCTION double advantage(const GroupAdvantages& a, const GroupStatistics& s, double scale, int64_t place,
                                        double reward) {
  const double d = reward - s.first, deviation = d - s.above;
  const bool scales = a.scale != RewardScale::none;
  if (a.estimator == Estimator::passk) {
    if (s.above != s.above) return s.above;
    const double lead = place == s.winner && s.count > 1 ? s.best - s.second : 0.0;
    return scales ? times(lead, scale) : lead;
  }
  if (s.count == 1 && a.reward_singletons) return reward / (scales ? 1 + a.eps : 1.0);
  switch (a.estimator) {
    case Estimator::scaled:
    case Estimator::gdpo: return scales ? times(deviation, scale) : deviation;
    case Estimator::rloo: return deviation * s.count / (s.count > 2 ? s.count - 1 : 1.0);
    case Estimator::opo: return d == s.baseline ? 0.0 : d - s.baseline;
    case Estimator::maxrl: return deviation == 0 ? 0.0 : deviation / (s.first + s.above + a.eps);
    default: return deviation;
  }
}

// Above the mean of the others, over their standard deviation where they have one: differences to the first of the others, so
// that others which are all equal deviate by exactly 0.
template <class Team>
RLKERNEL_TEAM_FUNCTION double leave_one_out(const GroupAdvantages& a, int64_t start, int64_t end, int64_t place,
                                            double reward, int column) {
  const auto is_other = [&](int64_t p) {
    return p != place && counts_at<Team::kPlain>(a, response_at(a, p), column);
  };
  double number = 0, first = 0, above = 0, squares = 0;
  for (int64_t p = start; p < end; ++p) {
    if (!is_other(p)) continue;
    const double other = reward_at<Team::kPlain>(a, response_at(a, p), column);
    if (number == 0) first = other;
    number += 1;
    above += other - first;
  }
  if (number == 0) return 0;
  above /= number;
  for (int64_t p = start; p < end; ++p) {
    if (!is_other(p)) continue;
    const double d = reward_at<Team::kPlain>(a, response_at(a, p), column) - first - above;
    squares += d * d;
  }
  const double d = reward - first - above;
  return squares == 0 ? d : times(d, scale_of(a, squares, number));
}

// The places of one task: a group, or with `ends` a place, which is a task where a group starts there.
struct Places {
  int64_t start, end;
};

RLKERNEL_TEAM_FUNCTION int64_t bent(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }

RLKERNEL_TEAM_FUNCTION int64_t tasks_of(const GroupAdvantages& a) { return a.ends != nullptr ? a.n : a.groups; }

RLKERNEL_TEAM_FUNCTION Places places_of(const GroupAdvantages& a, int64_t task) {
  if (a.ends != nullptr) {
    const bool starts = task == 0 || a.ends[task - 1] <= task;
    return {task, starts ? bent(a.ends[task], task, a.n) : task};
  }
  if (a.offsets != nullptr) {
    const int64_t start = bent(a.offsets[task], 0, a.n);
    return {start, bent(a.offsets[task + 1], start, a.n)};
  }
  return {bent(task * a.size, 0, a.n), bent((task + 1) * a.size, 0, a.n)};
}

// `batch` is the moments of a column over the whole batch, where the scale is the batch's.
template <class Team, class Batch>
RLKERNEL_TEAM_FUNCTION void group(const Team& team, const GroupAdvantages& a, int64_t task, Batch batch) {
  const Places at = places_of(a, task);
  if (at.start == at.end) return;
  const bool by_column = a.estimator == Estimator::gdpo;
  for (int k = 0; k < (by_column ? a.columns : 1); ++k) {
    const int column = by_column ? k : kWeightedColumn;
    GroupStatistics s = {};
    double scale = 1;
    if (a.estimator != Estimator::total) s = statistics(team, a, at.start, at.end, column);
    if (a.scale == RewardScale::group) scale = scale_of(a, s.squares, s.count);
    if (a.scale == RewardScale::batch) {
      const Moments m = batch(k);
      scale = scale_of(a, m.squares, m.count);
    }
    for (int64_t p = at.start + team.lane; p < at.end; p += Team::kStride) {
      const int64_t i = response_at(a, p);
      const bool counts = counts_at<Team::kPlain>(a, i, column);
      const double reward = reward_at<Team::kPlain>(a, i, column);
      double result = 0;
      if (a.estimator == Estimator::total) result = a.baselines != nullptr ? reward - a.baselines[i] : reward;
      else if (a.estimator != Estimator::leave_one_out) result = advantage(a, s, scale, p, reward);
      else if (s.count == 1 && a.reward_singletons) result = reward;
      else result = leave_one_out<Team>(a, at.start, at.end, p, reward, column);
      if (by_column && a.reward_weights != nullptr) result *= a.reward_weights[k];
      if (!counts) result = 0;
      if (a.out != nullptr) {
        a.out[i] = static_cast<float>(result);
        continue;
      }
      a.wide[i] = k == 0 ? result : a.wide[i] + result;
      if (k == 0) a.counts[i] = counts_at<Team::kPlain>(a, i, kWeightedColumn);
    }
  }
}

}  // namespace rlkernel
