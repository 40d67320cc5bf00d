// Generalised advantage estimation: each row is one backward walk in double, rounded once on the way out. A row belongs to
// one thread, so its bits depend on nothing but itself.
#include "rlkernel/gae/arguments.h"

#include <algorithm>

namespace rlkernel::cpu {
namespace {

constexpr int64_t kParallel = 1 << 14;  // tokens from which waking the other threads pays

// The chain through the row is one multiplication, one addition and one selection a token; the rest runs ahead of it.
template <bool kMasked, bool kZeroHoles>
void walk(const Gae& g, int64_t row, int64_t start, int64_t length) {
  const bool packed = g.offsets != nullptr;
  const float* rewards = g.rewards + (packed ? start : row * g.rewards_stride);
  const float* values = g.values + (packed ? start : row * g.values_stride);
  const uint8_t* mask = kMasked ? g.mask + (packed ? start : row * g.mask_stride) : nullptr;
  float *advantages = g.advantages + start, *returns = g.returns + start;
  const double gamma = g.gamma, decay = g.gamma * (g.lams != nullptr ? g.lams[row] : g.lam);
  double next = g.last_values != nullptr ? g.last_values[row] : 0.0, carry = 0.0;
  for (int64_t t = length - 1; t >= 0; --t) {
    const bool kept = !kMasked || mask[t] != 0;
    const double value = !kZeroHoles || kept ? values[t] : 0.0, reward = !kZeroHoles || kept ? rewards[t] : 0.0;
    const double delta = reward + gamma * next - value;
    const double advantage = delta + decay * carry;
    advantages[t] = kept ? static_cast<float>(advantage) : 0.0f;
    returns[t] = kept ? static_cast<float>(advantage + value) : 0.0f;
    carry = kZeroHoles || kept ? advantage : carry;
    next = kZeroHoles || kept ? value : next;
  }
}

}  // namespace

int gae(const Gae& g, void*) {
  const bool parallel = g.rows > 1 && g.total >= kParallel;
#pragma omp parallel for schedule(dynamic) if (parallel)
  for (int64_t row = 0; row < g.rows; ++row) {
    int64_t start = row * g.length, end = start + g.length;
    if (g.offsets != nullptr) {
      start = std::clamp<int64_t>(g.offsets[row], 0, g.total);
      end = std::clamp<int64_t>(g.offsets[row + 1], start, g.total);
    }
    if (g.mask == nullptr) walk<false, false>(g, row, start, end - start);
    else if (g.zero_holes) walk<true, true>(g, row, start, end - start);
    else walk<true, false>(g, row, start, end - start);
  }
  return 0;
}

}  // namespace rlkernel::cpu
