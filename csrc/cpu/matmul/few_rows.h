// A few rows by columns that are next to each other for every k, as of a weight [K, N]: to pack these would cost more than the
// product. The lanes of all columns of a block stay in L1, and each line of `b` is read once, from one end to the other.
#pragma once

#include "pack.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

constexpr int64_t kFewRows = 3, kFewColumns = 256, kAhead = 8;  // lines: too far apart to be fetched ahead unasked

// `a` is one panel; `state` holds [a.wide][8][stride], `results` [a.wide][stride].
template <class Order, class T>
void run_few_rows(const Panels<Order>& a, const Rows<T>& columns, int64_t rows, float* state, float* results, int64_t stride) {
  std::fill(state, state + rows * kLanes * stride, 0.0f);
  for (int64_t j = 0; j < a.groups * Order::kDepth; ++j) {
    const int64_t k = Order::taken(j);
    const T* line = columns.first + k * columns.step;
    const int64_t ahead = std::min<int64_t>(kAhead, columns.K - 1 - k) * columns.step;
    const float* group = a.first + k / Order::kDepth * a.group();
    for (int64_t n = 0; n < columns.count; n += kWidth) {
      __builtin_prefetch(line + ahead + n, 0, 3);
      const int64_t left = columns.count - n;
      const Floats y = k >= columns.K  ? Floats{}
                       : left >= kWidth ? load(line + n)
                                        : load_part(line + n, static_cast<int>(left));
      for (int64_t r = 0; r < rows; ++r) {
        float* lane = state + (r * kLanes + Order::lane(k)) * stride + n;
        store(lane, fused(broadcast(Order::element(group + r * kLanes, a.step(), k)), y, load(lane)));
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t n = 0; n < columns.count; n += kWidth) {
      const auto lane = [&](int i) { return load(state + (r * kLanes + i) * stride + n); };
      const Floats even = (lane(0) + lane(4)) + (lane(2) + lane(6)), odd = (lane(1) + lane(5)) + (lane(3) + lane(7));
      store(results + r * stride + n, even + odd);
    }
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
