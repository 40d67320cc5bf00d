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

template <bool kPlain>
void run(const GroupAdvantages& a, const std::vector<Moments>& batch) {
  const int64_t tasks = tasks_of(a);
  const bool parallel = tasks > 1 && a.n * a.columns >= kParallel;
#pragma omp parallel for schedule(static) if (parallel)
  for (int64_t task = 0; task < tasks; ++task) group(Alone<kPlain>{}, a, task, [&](int k) { return batch[k]; });
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
