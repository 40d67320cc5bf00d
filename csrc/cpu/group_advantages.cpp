// Group advantages: each group is one thread's, in double, rounded once on the way out.
#include <cstddef>
#include <vector>

#include "rlkernel/group_advantages/terms.h"

namespace rlkernel::cpu {
namespace {

constexpr int64_t kParallel = 1 << 14;  // rewards from which waking the other threads pays

template <bool kPlainRewards>
struct Alone {
  static constexpr int kStride = 1;
  static constexpr bool kPlain = kPlainRewards;
  int lane = 0;

  double sum(double x) const { return x; }
  int64_t least(int64_t x) const { return x; }
  double largest(double x) const { return x; }
};

// Of a column over the batch: the batch as one group.
Moments batch_moments(const GroupAdvantages& a, int column) {
  GroupAdvantages whole = a;
  whole.order = nullptr;
  whole.estimator = Estimator::scaled;
  whole.scale = RewardScale::group;
  const GroupStatistics s = statistics(Alone<false>{}, whole, 0, a.n, column);
  return {s.count, s.first + s.above, s.squares};
}

struct Groups {
  std::vector<int64_t> order, offsets;
};

// Responses by group, in the order in which they stand there: a hash table from id to group, then a counting sort.
Groups grouped(const int64_t* ids, int64_t n) {
  std::size_t size = 16;
  while (size < 2 * static_cast<std::size_t>(n)) size *= 2;
  std::vector<int64_t> table(size, -1), group(n), first;  // table: a group; first: its first response
  Groups result;
  result.offsets.push_back(0);
  for (int64_t i = 0; i < n; ++i) {
    if (i > 0 && ids[i] == ids[i - 1]) {
      group[i] = group[i - 1];
    } else {
      uint64_t hash = static_cast<uint64_t>(ids[i]) * 0x9e3779b97f4a7c15u;
      std::size_t slot = (hash ^ hash >> 32) & (size - 1);
      while (table[slot] >= 0 && ids[first[table[slot]]] != ids[i]) slot = (slot + 1) & (size - 1);
      if (table[slot] < 0) {
        table[slot] = static_cast<int64_t>(first.size());
        first.push_back(i);
        result.offsets.push_back(0);
      }
      group[i] = table[slot];
    }
    ++result.offsets[group[i] + 1];
  }
  for (std::size_t g = 1; g < result.offsets.size(); ++g) result.offsets[g] += result.offsets[g - 1];
  std::vector<int64_t> next(result.offsets.begin(), result.offsets.end() - 1);
  result.order.resize(n);
  for (int64_t i = 0; i < n; ++i) result.order[next[group[i]]++] = i;
  return result;
}

constexpr int64_t kSide = 8;
typedef double Doubles __attribute__((vector_size(kSide * 8)));

// The rewards at one place of groups that lie side by side.
Doubles rewards_at(const float* rewards, int64_t size) {
  Doubles x;
  for (int64_t g = 0; g < kSide; ++g) x[g] = rewards[g * size];
  return x;
}

// What `group` makes of each of kSide groups, a lane for each: the same sums in the same order.
template <Estimator kEstimator>
void side_by_side(const GroupAdvantages& a, int64_t task, double batch_scale) {
  const double count = static_cast<double>(a.size);
  const float* rewards = a.rewards + task * a.size;
  const Doubles first = rewards_at(rewards, a.size), zero = {};
  Doubles above = zero, squares = zero, scale = zero + batch_scale;
  for (int64_t p = 0; p < a.size; ++p) above += rewards_at(rewards + p, a.size) - first;
  above /= count;
  if (a.scale == RewardScale::group) {
    for (int64_t p = 0; p < a.size; ++p) {
      const Doubles d = rewards_at(rewards + p, a.size) - first - above;
      squares += d * d;
    }
    const double freedom = a.unbiased ? count - 1 : count;
    Doubles root = squares / freedom;
    for (int64_t g = 0; g < kSide; ++g) root[g] = __builtin_sqrt(root[g]);
    scale = 1 / (root + a.eps);
  }
  const Doubles mean = first + above + a.eps;
  for (int64_t p = 0; p < a.size; ++p) {
    const Doubles deviation = rewards_at(rewards + p, a.size) - first - above;
    Doubles y = deviation;
    if constexpr (kEstimator == Estimator::scaled) {
      if (a.scale != RewardScale::none) y = deviation == 0 ? zero : deviation * scale;
    } else if constexpr (kEstimator == Estimator::rloo) {
      y = deviation * count / (count > 2 ? count - 1 : 1.0);
    } else if constexpr (kEstimator == Estimator::maxrl) {
      y = deviation == 0 ? zero : deviation / mean;
    }
    for (int64_t g = 0; g < kSide; ++g) {
      const int64_t i = (task + g) * a.size + p;
      if (a.out != nullptr) a.out[i] = static_cast<float>(y[g]);
      else a.wide[i] = y[g], a.counts[i] = 1;
    }
  }
}

// Those that the lanes of a vector can take; null where they cannot.
auto beside(const GroupAdvantages& a) -> void (*)(const GroupAdvantages&, int64_t, double) {
  if (a.order != nullptr || a.offsets != nullptr || a.size < 2) return nullptr;
  switch (a.estimator) {
    case Estimator::scaled: return side_by_side<Estimator::scaled>;
    case Estimator::deviation: return side_by_side<Estimator::deviation>;
    case Estimator::rloo: return side_by_side<Estimator::rloo>;
    case Estimator::maxrl: return side_by_side<Estimator::maxrl>;
    default: return nullptr;
  }
}

template <bool kPlain>
void run(const GroupAdvantages& a, const std::vector<Moments>& batch) {
  const int64_t tasks = tasks_of(a);
  const bool parallel = tasks > 1 && a.n * a.columns >= kParallel;
  const auto some = kPlain ? beside(a) : nullptr;
  const int64_t whole = some == nullptr ? 0 : a.n / a.size / kSide * kSide;
  const double scale = batch.empty() ? 1 : scale_of(a, batch[0].squares, batch[0].count);
#pragma omp parallel if (parallel)
  {
#pragma omp for schedule(static) nowait
    for (int64_t task = 0; task < whole; task += kSide) some(a, task, scale);
#pragma omp for schedule(static)
    for (int64_t task = whole; task < tasks; ++task) group(Alone<kPlain>{}, a, task, [&](int k) { return batch[k]; });
  }
}

}  // namespace

int group_advantages(const GroupAdvantages& given, void*) {
  GroupAdvantages a = given;
  Groups groups;
  if (a.ids != nullptr) {
    groups = grouped(a.ids, a.n);
    a.order = groups.order.data();
    a.offsets = groups.offsets.data();
    a.groups = static_cast<int64_t>(groups.offsets.size()) - 1;
  }
  std::vector<Moments> batch;
  if (a.scale == RewardScale::batch) {
    const bool by_column = a.estimator == Estimator::gdpo;
    for (int k = 0; k < (by_column ? a.columns : 1); ++k) batch.push_back(batch_moments(a, by_column ? k : kWeightedColumn));
  }
  const bool plain = a.columns == 1 && a.mask == nullptr && a.reward_weights == nullptr;
  plain ? run<true>(a, batch) : run<false>(a, batch);
  return 0;
}

}  // namespace rlkernel::cpu
