// Group advantages: each group is one thread's, in double, rounded once on the way out.
#include <vector>

#include "rlkernel/group_advantages_terms.h"

namespace rlkernel::cpu {
namespace {

constexpr int64_t kParallel = 1 << 14;  // rewards from which waking the other threads pays

struct Alone {
  static constexpr int kStride = 1;
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
  const GroupStatistics s = statistics(Alone{}, whole, 0, a.n, column);
  return {s.count, s.first + s.above, s.squares};
}

}  // namespace

int group_advantages(const GroupAdvantages& a, void*) {
  std::vector<Moments> batch;
  if (a.scale == RewardScale::batch) {
    const bool by_column = a.estimator == Estimator::gdpo;
    for (int k = 0; k < (by_column ? a.columns : 1); ++k) batch.push_back(batch_moments(a, by_column ? k : kWeighted));
  }
  const int64_t tasks = tasks_of(a);
  const bool parallel = tasks > 1 && a.n * a.columns >= kParallel;
#pragma omp parallel for schedule(static) if (parallel)
  for (int64_t task = 0; task < tasks; ++task) group(Alone{}, a, task, [&](int k) { return batch[k]; });
  return 0;
}

}  // namespace rlkernel::cpu
