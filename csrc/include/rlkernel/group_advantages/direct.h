// The public call of plain rewards: one reward a response, groups by rows, by size or by ids, nothing over the batch.
#pragma once
#include <cmath>

#include "rlkernel/direct.h"
#include "rlkernel/group_advantages/arguments.h"

namespace rlkernel::direct {

// Those of the public call that need no whitening, and what the kernel makes of a group for each of them.
enum class Advantage { grpo, dr_grpo, rloo, grpo_loo, opo, maxrl, grpo_passk };
inline const char* names_of(Advantage) { return "grpo, dr_grpo, rloo, grpo_loo, opo, maxrl, grpo_passk"; }
constexpr Estimator kKinds[] = {Estimator::scaled, Estimator::deviation, Estimator::rloo, Estimator::leave_one_out,
                                Estimator::opo,    Estimator::maxrl,     Estimator::passk};

enum class Singletons { zero, reward };
inline const char* names_of(Singletons) { return "zero, reward"; }
enum class EpsPlace { variance, std };
inline const char* names_of(EpsPlace) { return "variance, std"; }

struct group_advantages {
  static constexpr int kPlaces = 1;
  static constexpr bool kTrains = false;
  Plain rewards;
  Maybe group_ids;
  int64_t group_size = 0;
  Absent group_offsets;
  Advantage estimator = Advantage::grpo;
  Maybe mask;
  Absent reward_weights, baselines;
  Maybe lengths;
  RewardScale scale_rewards = RewardScale::group;
  bool unbiased = true;
  double eps = 1e-4;
  Singletons singletons = Singletons::zero;
  double batch_eps = 1e-8;
  EpsPlace batch_eps_in = EpsPlace::variance;

  template <class Launch>
  py::object run(const Caller& caller, Launch launch) const {
    if (!rewards.given || rewards.elements() == 0 || !rewards.is_float() || !rewards.is_dense() || rewards.needs_gradient) return {};
    if (scale_rewards == RewardScale::batch || !(eps >= 0 && eps <= DBL_MAX) || !(batch_eps >= 0 && batch_eps <= DBL_MAX)) return {};
    const int64_t n = rewards.elements(), size = size_of_groups(n);
    if (size < 0 || !is_beside(mask, bind::type_of<bool>()) || !is_beside(lengths, bind::type_of<float>())) return {};
    if (estimator == Advantage::opo && !lengths.given) return {};
    const std::unique_ptr<float[]> wide = widened(rewards);
    const float* values = wide ? wide.get() : static_cast<const float*>(rewards.data());
    const auto* counts = static_cast<const uint8_t*>(mask.given ? mask.data() : nullptr);
    for (int64_t i = 0; i < n; ++i)
      if (!std::isfinite(values[i]) && (counts == nullptr || counts[i] != 0)) return {};
    Plain advantages;
    py::object made = caller.empty(rewards.object, advantages, true);
    GroupAdvantages a{};
    a.rewards = values, a.mask = counts, a.n = n, a.columns = 1;
    a.lengths = static_cast<const float*>(lengths.given ? lengths.data() : nullptr);
    a.ids = static_cast<const int64_t*>(group_ids.given ? group_ids.data() : nullptr);
    a.size = size, a.groups = (n + size - 1) / size;
    a.estimator = kKinds[static_cast<int>(estimator)];
    const bool scales = estimator == Advantage::grpo || estimator == Advantage::grpo_passk;
    a.scale = scales ? scale_rewards : RewardScale::none;
    a.unbiased = unbiased, a.reward_singletons = singletons == Singletons::reward, a.eps = eps;
    a.out = static_cast<float*>(advantages.data());
    launched(n, [&] { return launch(a, nullptr); });
    return made;
  }

 private:
  // 1 where ids name the groups; negative where they are not named as they must be, or otherwise.
  int64_t size_of_groups(int64_t n) const {
    const bool rows = rewards.rank() == 2;
    if (rewards.rank() != 1 && !rows) return -1;
    if (rows + group_ids.given + (group_size != 0) != 1) return -1;
    if (group_ids.given) return is_beside(group_ids, bind::type_of<int64_t>()) ? 1 : -1;
    const int64_t size = rows ? rewards.size(1) : group_size;
    return size > 0 && n % size == 0 ? size : -1;
  }

  // None, or one value for each response, one behind the other.
  bool is_beside(const Plain& x, dlpack::Type type) const {
    return !x.given || (x.holds(type) && x.has_shape_of(rewards) && x.is_dense());
  }
};

RLKERNEL_FIELDS(group_advantages, rewards, group_ids, group_size, group_offsets, estimator, mask, reward_weights, baselines, lengths,
                scale_rewards, unbiased, eps, singletons, batch_eps, batch_eps_in)

}  // namespace rlkernel::direct
