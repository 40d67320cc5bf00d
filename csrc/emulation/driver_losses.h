// The kernels of advantages and losses for driver.cpp: every array is a heap block of exactly its size.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "emulation.h"
#include "rlkernel/gae/arguments.h"
#include "rlkernel/group_advantages/arguments.h"
#include "rlkernel/kl_shaped_rewards/arguments.h"
#include "rlkernel/policy_loss/arguments.h"
#include "rlkernel/value_loss/arguments.h"
#include "rlkernel/whiten/arguments.h"

namespace losses {

using namespace rlkernel;

// A block of its own, so that the sanitizer sees the first element behind it.
template <class T>
struct Block {
  explicit Block(int64_t size, T fill = T()) : size(size), data(new T[size]) { std::fill_n(data.get(), size, fill); }
  T* get() const { return data.get(); }
  T& operator[](int64_t i) const { return data[i]; }

  int64_t size;
  std::unique_ptr<T[]> data;
};

// Tokens of `rows` sequences of up to `length`, padded or packed; a third of them does not count.
struct Batch {
  Batch(int64_t rows, int64_t length, bool packed, uint64_t seed)
      : rows(rows), length(length), offsets(rows + 1), total(rows * length), random(seed) {
    for (int64_t r = 0; r < rows; ++r) offsets[r + 1] = offsets[r] + (packed ? random() % (length + 1) : length);
    if (packed) total = offsets[rows];
    this->packed = packed ? offsets.get() : nullptr;
  }

  Block<float> floats(int64_t size) {
    Block<float> x(size);
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size; ++i) x[i] = normal(random);
    return x;
  }

  Block<uint8_t> mask(int64_t size) {
    Block<uint8_t> x(size);
    for (int64_t i = 0; i < size; ++i) x[i] = random() % 3 != 0;
    return x;
  }

  Sequences sequences() const { return {rows, packed != nullptr ? total : length, packed, 8}; }
  int64_t begin(int64_t row) const { return packed != nullptr ? offsets[row] : row * length; }
  int64_t end(int64_t row) const { return packed != nullptr ? offsets[row + 1] : (row + 1) * length; }

  int64_t rows, length;
  Block<int64_t> offsets;
  int64_t total;
  std::mt19937_64 random;
  const int64_t* packed;
};

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

inline bool near(double got, double want) { return std::fabs(got - want) <= 1e-5 + 1e-5 * std::fabs(want); }

inline bool gae(Batch& b) {
  const auto rewards = b.floats(b.total), values = b.floats(b.total), last = b.floats(b.rows);
  const auto mask = b.mask(b.total);
  const Block<float> advantages(b.total, kNan), returns(b.total, kNan);
  emulated::gae({rewards.get(), b.length, values.get(), b.length, mask.get(), b.length, b.packed, b.rows, b.length,
                 b.total, last.get(), 0.99, 0.9, nullptr, false, advantages.get(), returns.get()}, nullptr);
  bool right = true;
  for (int64_t r = 0; r < b.rows; ++r) {
    double carry = 0, next = last[r];
    for (int64_t t = b.end(r) - 1; t >= b.begin(r); --t) {
      if (mask[t]) {
        carry = rewards[t] + 0.99 * next - values[t] + 0.99 * 0.9 * carry;
        next = values[t];
      }
      right &= near(advantages[t], mask[t] ? carry : 0);
    }
  }
  return right;
}

inline bool kl_shaped_rewards(Batch& b) {
  const auto rewards = b.floats(b.rows), logprobs = b.floats(b.total), ref = b.floats(b.total);
  const auto mask = b.mask(b.total);
  const Block<float> out(b.total, kNan);
  emulated::kl_shaped_rewards({rewards.get(), logprobs.get(), ref.get(), true, mask.get(), 0, b.length, b.length,
                               b.length, b.sequences(), 0.5f, 0.75f, 0.25f, KlEstimator::k2, out.get()}, nullptr);
  bool right = true;
  for (int64_t r = 0; r < b.rows; ++r) {
    bool paid = false;
    for (int64_t t = b.end(r) - 1; t >= b.begin(r); --t) {
      const double d = std::min(std::abs(static_cast<double>(logprobs[t]) - ref[t]), 0.75);
      const double reward = mask[t] && !paid ? rewards[r] : 0.0;
      right &= near(out[t], mask[t] ? reward - 0.5 * std::min(0.5 * d * d, 0.25) : 0);
      paid |= mask[t] != 0;
    }
  }
  return right;
}

inline bool whiten(Batch& b) {
  const auto x = b.floats(b.total), weights = b.floats(b.total);
  for (int64_t i = 0; i < b.total; ++i) weights[i] = std::fabs(weights[i]);
  const auto mask = b.mask(b.total);
  const Block<Moments> partials(chunks_of(b.total)), states(2), state(1);
  const Block<float> out(b.total, kNan);
  emulated::whiten({x.get(), false, mask.get(), weights.get(), b.total, states.get(), 2, true, true, true, false, false,
                    0.0, 10.0, partials.get(), out.get(), state.get()}, nullptr);
  double sum = 0, squares = 0, count = 0;
  for (int64_t i = 0; i < b.total; ++i) {
    if (!mask[i] && out[i] != 0) return false;
    if (!mask[i]) continue;
    count += weights[i], sum += weights[i] * out[i], squares += weights[i] * out[i] * out[i];
  }
  return near(state[0].count, count) && (count < 2 || (near(sum / count, 0) && near(squares / count, 1)));
}

// The mean of a group's advantages is 0, whichever way the group is named.
inline bool group_advantages(Batch& b) {
  if (b.packed == nullptr) return true;
  const int64_t n = b.total;
  bool right = true;
  for (const bool by_ends : {false, true}) {
    for (const RewardScale scale : {RewardScale::group, RewardScale::batch}) {
      const auto rewards = b.floats(n * 2), lengths = b.floats(n), weights = b.floats(2);
      const Block<int64_t> order(n), ends(n);
      std::iota(order.get(), order.get() + n, 0);
      for (int64_t r = 0; r < b.rows; ++r) std::fill(ends.get() + b.begin(r), ends.get() + b.end(r), b.end(r));
      const Block<Moments> batch(chunks_of(n));
      const Block<float> out(n, kNan);
      GroupAdvantages a = {};
      a.rewards = rewards.get(), a.n = n, a.columns = 2, a.reward_weights = weights.get();
      if (by_ends) a.order = order.get(), a.ends = ends.get();
      else a.offsets = b.packed, a.groups = b.rows;
      a.estimator = Estimator::scaled, a.scale = scale, a.eps = 1e-4, a.batch = batch.get(), a.out = out.get();
      emulated::group_advantages(a, nullptr);
      for (int64_t r = 0; r < b.rows; ++r)
        right &= std::fabs(std::accumulate(out.get() + b.begin(r), out.get() + b.end(r), 0.0)) < 1e-3;
    }
  }
  return right;
}

inline bool value_loss(Batch& b) {
  const auto values = b.floats(b.total), returns = b.floats(b.total), old_values = b.floats(b.total);
  const auto mask = b.mask(b.total);
  const Sequences sequences = b.sequences();
  const Block<ValueSums> partials(slots_of(sequences));
  const Block<float> slope(b.total, kNan), scale(b.rows, kNan), loss(1, kNan), metrics(kValueMetrics, kNan), out(b.total, kNan);
  ValueLossForward f = {};
  f.values = values.get(), f.returns = returns.get(), f.old_values = old_values.get(), f.mask = mask.get();
  f.dtype = f.other_dtype = Dtype::f32, f.sequences = sequences, f.cliprange = 0.2f, f.unit = Unit::token, f.factor = 1;
  f.values_stride = f.returns_stride = f.old_stride = f.mask_stride = b.packed != nullptr ? 0 : b.length;
  f.slope = slope.get(), f.partials = partials.get(), f.scale = scale.get(), f.loss = loss.get(), f.metrics = metrics.get();
  emulated::value_loss_forward(f, nullptr);
  const Block<float> one(1, 1.0f);
  emulated::value_loss_backward({one.get(), slope.get(), scale.get(), sequences, out.get(), Dtype::f32}, nullptr);
  double total = 0, count = 0;
  for (int64_t t = 0; t < b.total; ++t) {
    if (!mask[t] && out[t] != 0) return false;
    if (!mask[t]) continue;
    const double clipped = std::fmin(std::fmax(values[t], old_values[t] - 0.2f), old_values[t] + 0.2f);
    total += 0.5 * std::fmax(std::pow(values[t] - returns[t], 2), std::pow(clipped - returns[t], 2)), count += 1;
  }
  return near(loss[0], count > 0 ? total / count : 0);
}

inline bool policy_loss(Batch& b) {
  const auto logprobs = b.floats(b.total), old_logprobs = b.floats(b.total), advantages = b.floats(b.rows);
  const auto mask = b.mask(b.total);
  const Block<float> grad(b.total, kNan), values(kValues, kNan);
  const Block<double> partials(b.rows * kPartials);
  const float infinite = std::numeric_limits<float>::infinity();
  PolicyLoss p = {};
  p.logprobs = logprobs.get(), p.old_logprobs = old_logprobs.get(), p.advantages = advantages.get(), p.mask = mask.get();
  p.cu_seqlens = b.packed, p.rows = b.rows, p.length = b.packed != nullptr ? b.total : b.length;
  p.grad_logprobs = grad.get(), p.partials = partials.get(), p.values = values.get();
  p.rule.low = 0.8f, p.rule.high = 1.2f, p.rule.delta = p.rule.dual = p.rule.log_clip = infinite;
  p.rule.kl_input = p.rule.kl_output = infinite;
  p.rule.factor = 1;
  emulated::policy_loss(p, nullptr);
  double total = 0, count = 0;
  for (int64_t r = 0; r < b.rows; ++r) {
    for (int64_t t = b.begin(r); t < b.end(r); ++t) {
      if (!mask[t] && grad[t] != 0) return false;
      if (!mask[t]) continue;
      const double ratio = std::exp(static_cast<double>(logprobs[t]) - old_logprobs[t]), a = advantages[r];
      total -= std::fmin(ratio * a, std::fmin(std::fmax(ratio, 0.8), 1.2) * a), count += 1;
    }
  }
  return near(values[0], count > 0 ? total / count : 0);
}

// kl_cov picks the largest covariances, clip_cov with a share of 1 all within its bounds.
inline bool policy_select(Batch& b) {
  const auto logprobs = b.floats(b.total), advantages = b.floats(b.rows);
  const auto mask = b.mask(b.total);
  const Block<uint8_t> selected(b.total, 2);
  const Block<double> partials((b.rows + 1) * kSelectionSums);
  const Block<uint32_t> counts(kLevels * kBins, ~0u);
  PolicySelection p = {};
  p.logprobs = logprobs.get(), p.advantages = advantages.get(), p.mask = mask.get();
  p.cu_seqlens = b.packed, p.rows = b.rows, p.length = b.packed != nullptr ? b.total : b.length;
  p.low = 0.8f, p.high = 1.2f, p.cov_low = 0.1f, p.cov_high = 1.0f;
  p.selected = selected.get(), p.partials = partials.get(), p.counts = counts.get();
  const Block<float> equal(b.rows, 0.5f);
  p.advantages = equal.get(), p.share = 0.3;  // all covariances tie: the first are picked
  emulated::policy_select(p, nullptr);
  int64_t left_of = std::count_if(mask.get(), mask.get() + b.total, [](uint8_t m) { return m != 0; });
  left_of = std::max<int64_t>(1, static_cast<int64_t>(0.3 * static_cast<double>(left_of)));
  for (int64_t t = 0; t < b.total; ++t)
    if (selected[t] != (mask[t] != 0 && left_of-- > 0)) return false;
  p.advantages = advantages.get();
  for (const bool by_hash : {false, true}) {
    p.by_hash = by_hash, p.share = by_hash ? 1 : 0.3;
    emulated::policy_select(p, nullptr);
    const double* sums = p.partials + b.rows * kSelectionSums;
    const float logprob = static_cast<float>(sums[1] / sums[0]), advantage = static_cast<float>(sums[2] / sums[0]);
    int64_t tokens = 0, picked = 0;
    float least = std::numeric_limits<float>::infinity(), left = -least;
    for (int64_t r = 0; r < b.rows; ++r) {
      for (int64_t t = b.begin(r); t < b.end(r); ++t) {
        const float covariance = (advantages[r] - advantage) * (logprobs[t] - logprob);
        if (selected[t] > (mask[t] != 0)) return false;
        if (by_hash && mask[t] && selected[t] != (covariance > p.cov_low && covariance < p.cov_high)) return false;
        tokens += mask[t] != 0, picked += selected[t];
        if (selected[t]) least = std::fmin(least, covariance);
        else if (mask[t]) left = std::fmax(left, covariance);
      }
    }
    const int64_t wanted = static_cast<int64_t>(0.3 * static_cast<double>(tokens));
    if (!by_hash && tokens > 0 && (picked != (wanted > 1 ? wanted : 1) || least <= left)) return false;
  }
  return true;
}

inline bool run_all(uint64_t seed) {
  struct Named {
    const char* name;
    bool (*run)(Batch&);
  };
  bool right = true;
  for (const Named& op : {Named{"gae", gae}, {"kl_shaped_rewards", kl_shaped_rewards}, {"whiten", whiten},
                          {"group_advantages", group_advantages}, {"value_loss", value_loss}, {"policy_loss", policy_loss},
                          {"policy_select", policy_select}}) {
    for (const bool packed : {false, true}) {
      for (const int64_t length : {1, 37, 2049, 4099}) {
        Batch batch(3, length, packed, seed + length);
        if (batch.total == 0 || op.run(batch)) continue;
        std::printf("wrong: %s, length %ld, packed %d\n", op.name, long(length), packed);
        right = false;
      }
    }
  }
  return right;
}

}  // namespace losses
