// The public call of plain rewards: one reward a response, and groups by rows, by size or by ids.
#pragma once
#include <cmath>
#include <limits>

#include "rlkernel/direct.h"
#include "rlkernel/group_advantages/arguments.h"
#include "rlkernel/whiten/arguments.h"

namespace rlkernel::direct {

// Those of the public call, and what the kernel makes of a group for each of them.
enum class Advantage { grpo, dr_grpo, rloo, grpo_loo, opo, maxrl, grpo_passk, gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax };
inline const char* names_of(Advantage) {
  return "grpo, dr_grpo, rloo, grpo_loo, opo, maxrl, grpo_passk, gdpo, reinforce_plus_plus, reinforce_plus_plus_baseline, remax";
}
constexpr Estimator kKinds[] = {Estimator::scaled, Estimator::deviation, Estimator::rloo, Estimator::leave_one_out,
                                Estimator::opo,    Estimator::maxrl,     Estimator::passk, Estimator::gdpo,
                                Estimator::total,  Estimator::deviation, Estimator::total};

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
  Absent reward_weights;
  Maybe baselines, lengths;
  RewardScale scale_rewards = RewardScale::group;
  bool unbiased = true;
  double eps = 1e-4;
  Singletons singletons = Singletons::zero;
  double batch_eps = 1e-8;
  EpsPlace batch_eps_in = EpsPlace::variance;

  template <class Kernels>
  py::object run(const Caller& caller, Kernels kernels) const {
    if (!rewards.given || rewards.elements() == 0 || !rewards.is_float() || !rewards.is_dense() || rewards.needs_gradient) return {};
    if (!(eps >= 0 && eps <= DBL_MAX) || !(batch_eps >= 0 && batch_eps <= DBL_MAX)) return {};
    const int64_t n = rewards.elements(), size = size_of_groups(n);
    if (size < 0 || !is_beside(mask, bind::type_of<bool>())) return {};
    if (!is_beside(lengths, bind::type_of<float>()) || !is_beside(baselines, bind::type_of<float>())) return {};
    if ((estimator == Advantage::opo && !lengths.given) || (estimator == Advantage::remax) != baselines.given) return {};
    const std::unique_ptr<float[]> wide = widened(rewards);
    GroupAdvantages a{};
    a.rewards = wide ? wide.get() : static_cast<const float*>(rewards.data());
    a.mask = static_cast<const uint8_t*>(mask.given ? mask.data() : nullptr);
    for (int64_t i = 0; i < n; ++i)
      if (!std::isfinite(a.rewards[i]) && (a.mask == nullptr || a.mask[i] != 0)) return {};
    a.n = n, a.columns = 1;
    a.baselines = static_cast<const float*>(baselines.given ? baselines.data() : nullptr);
    a.lengths = static_cast<const float*>(lengths.given ? lengths.data() : nullptr);
    a.ids = static_cast<const int64_t*>(group_ids.given && !is_alone() ? group_ids.data() : nullptr);
    a.size = size, a.groups = (n + size - 1) / size;
    a.estimator = kKinds[static_cast<int>(estimator)];
    const bool scales = estimator == Advantage::grpo || estimator == Advantage::grpo_passk || estimator == Advantage::gdpo;
    a.scale = scales ? scale_rewards : RewardScale::none;
    a.unbiased = unbiased, a.reward_singletons = singletons == Singletons::reward, a.eps = eps;
    Plain advantages;
    py::object made = caller.empty(rewards.object, advantages, true);
    a.out = static_cast<float*>(advantages.data());
    launched(n, [&] { return is_whitened() ? whitened(a, kernels) : kernels.advantages(a); });
    return made;
  }

 private:
  static constexpr int64_t kAlone = 32;  // responses that are worked on together where none sees another

  bool is_alone() const { return estimator == Advantage::reinforce_plus_plus || estimator == Advantage::remax; }
  bool is_whitened() const {
    return estimator == Advantage::gdpo || estimator == Advantage::reinforce_plus_plus ||
           estimator == Advantage::reinforce_plus_plus_baseline;
  }

  // In fp64 between the two kernels.
  template <class Kernels>
  int whitened(GroupAdvantages& a, Kernels kernels) const {
    const std::unique_ptr<double[]> between(new double[a.n]);
    const std::unique_ptr<uint8_t[]> counts(new uint8_t[a.n]);
    const std::unique_ptr<Moments[]> partials(new Moments[chunks_of(a.n)]);
    float* out = a.out;
    a.out = nullptr, a.wide = between.get(), a.counts = counts.get();
    if (const int error = kernels.advantages(a)) return error;
    Whiten w{};
    w.x = between.get(), w.wide = true, w.mask = counts.get(), w.weights = a.lengths, w.n = a.n, w.update = true;
    w.shift_mean = true, w.unbiased = unbiased, w.eps_in_std = batch_eps_in == EpsPlace::std, w.eps = batch_eps;
    w.clip = std::numeric_limits<double>::infinity(), w.partials = partials.get(), w.out = out;
    return kernels.whiten(w);
  }

  // 1 where ids name the groups; negative where they are not named as they must be, or are in another way.
  int64_t size_of_groups(int64_t n) const {
    const bool rows = rewards.rank() == 2;
    if (rewards.rank() != 1 && !rows) return -1;
    const int named = rows + group_ids.given + (group_size != 0);
    if (named > 1 || (named == 0 && !is_alone())) return -1;
    if (group_ids.given && !is_beside(group_ids, bind::type_of<int64_t>())) return -1;
    const int64_t size = rows ? rewards.size(1) : group_size != 0 ? group_size : 1;
    if (size < 1 || n % size != 0) return -1;
    return is_alone() ? kAlone : size;
  }

  // None, or one value for each response, one behind the other.
  bool is_beside(const Plain& x, dlpack::Type type) const {
    return !x.given || (x.holds(type) && x.has_shape_of(rewards) && x.is_dense());
  }
};

RLKERNEL_FIELDS(group_advantages, rewards, group_ids, group_size, group_offsets, estimator, mask, reward_weights, baselines, lengths,
                scale_rewards, unbiased, eps, singletons, batch_eps, batch_eps_in)

}  // namespace rlkernel::direct
