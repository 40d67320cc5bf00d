// The arguments of the group advantages in Python.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/group_advantages/arguments.h"

namespace rlkernel::calls {

using namespace bind;

struct group_advantages {
  Tensor rewards;
  Optional mask, reward_weights, baselines, lengths, ids, order, ends, offsets;
  int64_t size;
  Estimator estimator;
  RewardScale scale;
  bool unbiased, reward_singletons;
  double eps;
  Optional batch, out, wide, counts;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    rewards.want_rank(2);
    const int64_t n = rewards.size(0), columns = rewards.size(1);
    if (columns < 1) rewards.refuse("have a column", "none");
    if (columns > 1 && !reward_weights.given) reward_weights.refuse("be given with several columns", "None");
    if (size < 1 && !offsets.given) offsets.refuse("be given where size is 0", "None");
    if (!out.given && !(wide.given && counts.given)) out.refuse("be given, or wide and counts", "None");
    const int64_t groups = offsets.given ? offsets.intervals() : (n + size - 1) / size;
    const int64_t batches = scale != RewardScale::batch ? 0 : estimator == Estimator::gdpo ? columns : 1;
    if (batches && !batch.given) batch.refuse("be given where the batch scales", "None");
    return launch({rewards.dense<const float>(n * columns), mask.dense<const uint8_t>(n * columns), n,
                   static_cast<int>(columns), reward_weights.dense<const float>(columns), baselines.dense<const float>(n),
                   lengths.dense<const float>(n), ids.dense<const int64_t>(n), order.dense<const int64_t>(n),
                   ends.dense<const int64_t>(n), offsets.dense<const int64_t>(groups + 1), groups, size, estimator, scale,
                   unbiased, reward_singletons, eps, batch.dense<Moments>(batches * chunks_of(n)), out.dense<float>(n),
                   wide.dense<double>(n), counts.dense<uint8_t>(n)},
                  stream);
  }
};

RLKERNEL_FIELDS(group_advantages, rewards, mask, reward_weights, baselines, lengths, ids, order, ends, offsets, size, estimator,
                scale, unbiased, reward_singletons, eps, batch, out, wide, counts)

}  // namespace rlkernel::calls
