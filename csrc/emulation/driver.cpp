// The device kernels on heap blocks of exactly the size of their data, for a build under the address and
// undefined-behaviour sanitizers: a read or write one element too far ends the program. Exit status 1: a wrong result.
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "driver_losses.h"
#include "driver_prefix.h"
#include "driver_sampling.h"
#include "rlkernel/logprob/arguments.h"
#include "rlkernel/policy_loss/arguments.h"
#include "rlkernel/preference_loss/arguments.h"
#include "rlkernel/vec.cuh"

namespace {

using namespace rlkernel;
using emulated::from_float;
using emulated::to_float;

// Rows at `offset` elements behind a 16-byte boundary, so that each alignment of a row comes up.
template <class T>
struct Case {
  int64_t rows, vocab, offset;
  bool mapped;
};

template <class T>
constexpr Dtype kDtype = sizeof(T) == 4 ? Dtype::f32 : emulated::kIsBf16<T> ? Dtype::bf16 : Dtype::f16;

bool close(double got, double want) { return std::fabs(got - want) <= 2e-5 + 2e-5 * std::fabs(want); }

template <class T>
bool run(const Case<T>& c, uint64_t seed) {
  const int64_t size = c.offset + c.rows * c.vocab;
  const std::unique_ptr<T[]> logits(new T[size]);
  const std::unique_ptr<float[]> bias(new float[c.vocab]);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < size; ++i) logits[i] = from_float<T>(3 * normal(random));
  for (int64_t i = 0; i < c.vocab; ++i) bias[i] = normal(random);
  std::vector<int64_t> target_ids(c.rows);
  for (auto& id : target_ids) id = static_cast<int64_t>(random() % c.vocab);
  target_ids[0] = -100;

  const float temperature = 0.8f;
  const LogprobTile tile{logits.get() + c.offset, kDtype<T>, c.rows, c.rows, 0, c.vocab, c.vocab, 0, target_ids.data(), -100,
                         nullptr, temperature, c.mapped ? bias.get() : nullptr, c.mapped ? 0.5f : 1.0f, c.mapped ? 5.0f : 0.0f};
  std::vector<float> logprobs(c.rows), entropy(c.rows), lse(c.rows), row_max(c.rows), log_sum(c.rows), ones(c.rows, 1.0f);
  emulated::logprob_forward({tile, nullptr, nullptr, nullptr, nullptr, true, true, logprobs.data(), entropy.data(), lse.data(),
                             row_max.data(), log_sum.data()}, nullptr);
  std::vector<double> want(c.rows, 0.0);
  for (int64_t r = 1; r < c.rows; ++r) {
    const auto z = [&](int64_t i) {
      double y = to_float(logits[c.offset + r * c.vocab + i]);
      if (c.mapped) y = 5 * std::tanh((y + bias[i]) * 0.5 / 5);
      return y / temperature;
    };
    double max = z(0), sum = 0;
    for (int64_t i = 1; i < c.vocab; ++i) max = std::fmax(max, z(i));
    for (int64_t i = 0; i < c.vocab; ++i) sum += std::exp(z(i) - max);
    want[r] = z(target_ids[r]) - max - std::log(sum);
  }
  emulated::logprob_backward({tile, ones.data(), ones.data(), nullptr, entropy.data(), row_max.data(), log_sum.data(),
                              logits.get() + c.offset, tile.dtype, 0, c.vocab}, nullptr);
  bool right = true;
  for (int64_t r = 0; r < c.rows; ++r) right &= close(logprobs[r], want[r]);
  for (int64_t i = 0; i < c.vocab; ++i) right &= to_float(logits[c.offset + i]) == 0;  // the ignored row
  if (!right) std::printf("wrong: rows %ld vocab %ld offset %ld\n", long(c.rows), long(c.vocab), long(c.offset));
  return right;
}

template <class T>
bool run_all(uint64_t seed) {
  bool right = true;
  for (const int64_t vocab : {1, 5, 250, 2051})
    for (const int64_t offset : {0, 1, 2})
      for (const bool mapped : {false, true}) right &= run<T>({4, vocab, offset, mapped}, seed);
  return right;
}

// Supports of no token, one, some and all, with an id outside the vocabulary in the last row.
template <class T>
bool run_support(int64_t vocab, uint64_t seed) {
  const int64_t rows = 5, few = vocab < 3 ? 1 : vocab / 2, entries = 1 + few + vocab + 1;
  const std::unique_ptr<T[]> logits(new T[rows * vocab]), values(new T[entries]), grad(new T[rows * vocab]);
  const std::unique_ptr<int32_t[]> ids(new int32_t[entries]);
  const std::unique_ptr<int64_t[]> offsets(new int64_t[rows + 1]), target_ids(new int64_t[rows]);
  const std::unique_ptr<float[]> gathered(new float[entries]), ones(new float[rows]);
  const std::unique_ptr<float[]> logprobs(new float[rows]), entropy(new float[rows]), lse(new float[rows]),
      row_max(new float[rows]), log_sum(new float[rows]);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * vocab; ++i) logits[i] = from_float<T>(3 * normal(random)), grad[i] = from_float<T>(0);
  const int64_t sizes[] = {0, 1, few, vocab, 1};
  offsets[0] = 0;
  for (int64_t r = 0; r < rows; ++r) {
    offsets[r + 1] = offsets[r] + sizes[r], ones[r] = 1;
    for (int64_t i = 0; i < sizes[r]; ++i) ids[offsets[r] + i] = static_cast<int32_t>(vocab - 1 - i);
    target_ids[r] = vocab - 1;
  }
  ids[entries - 1] = static_cast<int32_t>(vocab);
  const LogprobSupport support{rows, vocab, target_ids.get(), -100, nullptr, 0.8f, ids.get(), offsets.get()};
  emulated::logprob_support_forward({support, logits.get(), kDtype<T>, rows, 0, vocab, values.get(), logprobs.get(),
                                     entropy.get(), lse.get(), row_max.get(), log_sum.get()}, nullptr);
  emulated::logprob_support_backward({support, values.get(), kDtype<T>, ones.get(), ones.get(), nullptr, logprobs.get(),
                                      entropy.get(), row_max.get(), log_sum.get(), grad.get(), kDtype<T>, true, rows, 0, vocab},
                                     nullptr);
  emulated::logprob_support_backward({support, values.get(), kDtype<T>, ones.get(), nullptr, ones.get(), logprobs.get(),
                                      nullptr, row_max.get(), log_sum.get(), gathered.get(), Dtype::f32, false, rows, 0, 0},
                                     nullptr);
  bool right = logprobs[0] == 0 && logprobs[1] == 0 && logprobs[4] != logprobs[4];
  for (const int64_t r : {2, 3}) {
    const auto z = [&](int64_t i) { return to_float(logits[(r + 1) * vocab - 1 - i]) / 0.8; };
    double max = z(0), sum = 0;
    for (int64_t i = 1; i < sizes[r]; ++i) max = std::fmax(max, z(i));
    for (int64_t i = 0; i < sizes[r]; ++i) sum += std::exp(z(i) - max);
    right &= close(logprobs[r], z(0) - max - std::log(sum));
  }
  for (int64_t i = 0; i < vocab; ++i) right &= to_float(grad[i]) == 0;  // the whole row is another kernel's
  if (!right) std::printf("wrong: support, vocab %ld\n", long(vocab));
  return right;
}

// Two pairs, padded or packed, with every input that may be there; the gradient of a pair's sides adds up to nothing.
bool run_preference(int64_t length, bool packed, uint64_t seed) {
  const int64_t rows = 4, tokens = packed ? 3 * length + 2 : rows * length;
  const std::unique_ptr<float[]> logprobs(new float[tokens]), ref(new float[tokens]), grad(new float[tokens]);
  const std::unique_ptr<uint8_t[]> mask(new uint8_t[tokens]), nll_mask(new uint8_t[tokens]);
  const std::unique_ptr<int64_t[]> offsets(new int64_t[rows + 1]), order(new int64_t[2 * rows]);
  const std::unique_ptr<double[]> stats(new double[rows * kSequenceSums]), slopes(new double[rows + 1]);
  const std::unique_ptr<float[]> rewards(new float[rows]), logps(new float[rows]), metrics(new float[kPreferenceMetrics]);
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < tokens; ++i) {
    logprobs[i] = -static_cast<float>(random() % 100) / 50, ref[i] = -static_cast<float>(random() % 100) / 50;
    mask[i] = random() % 4 != 0, nll_mask[i] = 1;
  }
  for (int64_t r = 0; r <= rows; ++r) offsets[r] = r < 2 ? r * length : (r - 1) * length;  // the second is empty
  for (int64_t k = 0; k < 2 * rows; ++k) order[k] = k % 2;
  const float upstream = 1, delta[2] = {0.5f, 3};
  float loss = 0, new_delta[2];
  const int64_t* cu_seqlens = packed ? offsets.get() : nullptr;
  PreferenceRule rule{4, {PreferenceTerm::sigmoid, PreferenceTerm::aot, PreferenceTerm::bco_pair, PreferenceTerm::sft},
                      {1, 1, 1, 1}, {}, true, false, PreferenceDivergence::reverse_kl, true, 0.1, 0.5, 0.05, -0.5, 0.5, 0.1, 1, 1, 1, 0, 0};
  emulated::preference_sums({logprobs.get(), ref.get(), true, mask.get(), nll_mask.get(), ref.get(), cu_seqlens, rows,
                             packed ? tokens : length, true, 0.5, stats.get()}, nullptr);
  emulated::preference_loss({stats.get(), rows, nullptr, nullptr, false, order.get(), nullptr, nullptr, delta, &loss,
                             metrics.get(), slopes.get(), rewards.get(), logps.get(), new_delta, rule}, nullptr);
  emulated::preference_backward({&upstream, slopes.get(), stats.get(), mask.get(), nll_mask.get(), nullptr, cu_seqlens,
                                 rows, packed ? tokens : length, 0.5, grad.get()}, nullptr);
  bool right = std::isfinite(loss) && metrics[15] == 0;
  for (int64_t i = 0; i < tokens; ++i) right &= std::isfinite(grad[i]);
  if (packed) right &= grad[tokens - 1] == 0;  // padding
  if (!right) std::printf("wrong: preference loss, length %ld packed %d\n", long(length), packed);
  return right;
}

// Packed sequences whose lengths straddle the block; with everything that a rule may read, and without.
bool policy_loss(uint64_t seed, bool everything) {
  const int64_t offsets[] = {0, 1, 1, 258, 300};
  const int64_t rows = 4, tokens = offsets[rows];
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  const auto noise = [&](int64_t count) {
    std::unique_ptr<float[]> x(new float[count]);
    for (int64_t i = 0; i < count; ++i) x[i] = 0.1f * normal(random);
    return x;
  };
  const auto logprobs = noise(tokens), old = noise(tokens), advantages = noise(tokens), ref = noise(tokens),
             rollout = noise(tokens), entropy = noise(tokens), staleness = noise(rows), counts = noise(rows), grad = noise(tokens),
             grad_entropy = noise(tokens);
  const std::unique_ptr<uint8_t[]> mask(new uint8_t[tokens]), selected(new uint8_t[tokens]);
  for (int64_t i = 0; i < tokens; ++i) mask[i] = random() % 8 != 0, selected[i] = random() % 8 == 0;
  for (int64_t r = 0; r < rows; ++r) counts[r] = static_cast<float>(r);  // also none
  const std::unique_ptr<double[]> partials(new double[rows * kPartials]);
  const std::unique_ptr<float[]> values(new float[kValues + 1]);
  const float inf = __builtin_huge_valf();
  PolicyLossRule rule{};
  rule.low = 0.8f, rule.high = 1.2f, rule.denominator = 1, rule.factor = 1;
  rule.delta = rule.dual = rule.log_clip = rule.kl_input = rule.kl_output = inf;
  if (everything) {
    rule.term = Term::dppo, rule.level = Level::sequence, rule.aggregation = Aggregation::sequence_means;
    rule.kl = Kl::k3, rule.kl_weight = KlWeight::rollout, rule.divergence = rule.sign_mask = Divergence::kl;
    rule.correction = Correction::token, rule.shrink = rule.normalize = true;
    rule.beta = rule.entropy_coef = 0.1f, rule.weight_high = rule.sign_high = rule.max_staleness = inf;
    rule.sign_low = rule.log_weight_low = rule.token_low = rule.extreme_low = rule.sum_k1_low = rule.mean_k1_low = -inf;
    rule.log_weight_high = rule.token_high = rule.extreme_high = rule.sum_k1_high = rule.mean_k1_high = inf;
    rule.sum_k2_high = rule.mean_k2_high = rule.sum_k3_high = rule.mean_k3_high = rule.off_policy_high = rule.tv_high = 100;
  }
  PolicyLoss p{};
  p.logprobs = logprobs.get(), p.old_logprobs = old.get(), p.advantages = advantages.get(), p.mask = mask.get();
  p.cu_seqlens = offsets, p.rows = rows, p.length = tokens, p.advantage_per_token = true;
  p.grad_logprobs = grad.get(), p.partials = partials.get(), p.values = values.get(), p.rule = rule;
  if (everything) {
    p.ref_logprobs = ref.get(), p.rollout_logprobs = rollout.get(), p.entropy = entropy.get();
    p.staleness = staleness.get(), p.token_counts = counts.get(), p.selected = selected.get(), p.grad_entropy = grad_entropy.get();
  }
  emulated::policy_loss(p, nullptr);
  for (int64_t i = 0; i < tokens; ++i) {
    const double r = std::exp(static_cast<double>(logprobs[i]) - old[i]), a = advantages[i];
    const bool clipped = a > 0 ? r > 1.2 : r < 0.8;
    const double want = mask[i] && !clipped ? -r * a : 0;
    if (everything ? !std::isfinite(grad[i]) : !close(grad[i], want)) {
      std::printf("policy loss, token %d: gradient %g, want %g\n", static_cast<int>(i), grad[i], want);
      return false;
    }
  }
  return std::isfinite(values[0]);
}

}  // namespace

int main() {
  bool right = true;
  for (const uint64_t seed : {0, 1}) {
    emulation::settings() = {seed, 3};
    right &= run_all<float>(seed) & run_all<emulated::f16>(seed) & run_all<emulated::bf16>(seed);
    right &= losses::run_all(seed);
    right &= prefix::run_all(seed);
    if (seed) right &= sampling::run_all(seed);
    for (const int64_t length : {1, 37, 300}) right &= run_preference(length, false, seed) & run_preference(length, true, seed);
    right &= policy_loss(seed, false) & policy_loss(seed, true);
    for (const int64_t vocab : {1, 5, 130, 301})
      right &= run_support<float>(vocab, seed) & run_support<emulated::f16>(vocab, seed) & run_support<emulated::bf16>(vocab, seed);
  }
  return right ? 0 : 1;
}
