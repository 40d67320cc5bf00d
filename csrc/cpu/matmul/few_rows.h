// A few rows by columns that are next to each other for every k, as of a weight [K, N]: to pack these would cost more than the
// product. The lanes of all columns of a block stay in L1, and each line of `b` is read once, beside a few others.
#pragma once

#include "pack.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

constexpr int64_t kFewRows = 6, kFewColumns = 256;
constexpr int64_t kTogether = 4;  // elements that a lane takes between a read and a write of it
constexpr int64_t kAhead = 2;     // lanes from here to the one whose lines are fetched: too far apart to come unasked

// All lanes of the columns take kGroups groups from `group` on.
template <class Order, int64_t kGroups, int kRows, class T>
void take_groups(const Panels<Order>& a, const Rows<T>& columns, int64_t group, float* state, int64_t stride) {
  constexpr int64_t kEach = Order::kDepth / kLanes, kTaken = kGroups * kEach;
  for (int64_t l = 0; l < kLanes; ++l) {
    const T *line[kTaken], *ahead[kTaken];
    Floats x[kTaken][kRows];
    for (int64_t i = 0; i < kTaken; ++i) {
      const int64_t g = group + i / kEach, k = g * Order::kDepth + Order::taken(l * kEach + i % kEach);
      const int64_t later = k + (l + kAhead < kLanes ? kAhead * kEach : kGroups * Order::kDepth - (kLanes - kAhead) * kEach);
      line[i] = k < columns.K ? columns.first + k * columns.step : nullptr;
      ahead[i] = columns.first + std::min(later, columns.K - 1) * columns.step;
      for (int r = 0; r < kRows; ++r) x[i][r] = broadcast(Order::element(a.first + g * a.group() + r * kLanes, a.step(), k));
    }
    for (int64_t n = 0; n < columns.count; n += kWidth) {
      const int64_t left = columns.count - n;
      Floats y[kTaken];
      for (int64_t i = 0; i < kTaken; ++i) {
        prefetch(ahead[i] + n);
        y[i] = line[i] == nullptr ? Floats{} : left >= kWidth ? load(line[i] + n) : load_part(line[i] + n, static_cast<int>(left));
      }
      for (int r = 0; r < kRows; ++r) {
        float* lane = state + (r * kLanes + l) * stride + n;
        Floats sum = load(lane);
        for (int64_t i = 0; i < kTaken; ++i) sum = fused(x[i][r], y[i], sum);
        store(lane, sum);
      }
    }
  }
}

template <class Order, int kRows, class T>
void run_few_rows(const Panels<Order>& a, const Rows<T>& columns, float* state, float* results, int64_t stride) {
  constexpr int64_t kGroups = kTogether * kLanes / Order::kDepth;
  std::fill(state, state + kRows * kLanes * stride, 0.0f);
  int64_t g = 0;
  for (; (g + kGroups) * Order::kDepth <= columns.K; g += kGroups) take_groups<Order, kGroups, kRows>(a, columns, g, state, stride);
  for (; g < a.groups; ++g) take_groups<Order, 1, kRows>(a, columns, g, state, stride);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t n = 0; n < columns.count; n += kWidth) {
      const auto lane = [&](int i) { return load(state + (r * kLanes + i) * stride + n); };
      const Floats even = (lane(0) + lane(4)) + (lane(2) + lane(6)), odd = (lane(1) + lane(5)) + (lane(3) + lane(7));
      store(results + r * stride + n, even + odd);
    }
}

// `a` is one panel; `state` holds [a.wide][8][stride], `results` [a.wide][stride].
template <class Order, class T, int kRows = kFewRows>
inline void run_few_rows(const Panels<Order>& a, const Rows<T>& columns, int64_t rows, float* state, float* results, int64_t stride) {
  if constexpr (kRows > 1)
    if (rows < kRows) return run_few_rows<Order, T, kRows - 1>(a, columns, rows, state, results, stride);
  run_few_rows<Order, kRows>(a, columns, state, results, stride);
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
