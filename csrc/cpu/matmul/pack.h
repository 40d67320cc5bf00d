// Operands of the matrix product as the kernels read them: panels [groups of K][parts of a group][rows of the panel][8], with
// zeros for what lies behind the last row and behind K.
#pragma once

#include <algorithm>

#include "order.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

template <class Order>
int64_t groups_of(int64_t K) { return (K + Order::kDepth - 1) / Order::kDepth; }

// Some rows of an operand.
template <class T>
struct Rows {
  const T* first;
  int64_t row, step;  // strides
  int64_t count, K;
};

// Panels of `wide` rows, one behind the other.
template <class Order>
struct Panels {
  float* first;
  int64_t wide, groups;

  // The first part of the first group of a row; the next part is a `step` behind it.
  float* row(int64_t r) const { return first + (r / wide * groups * Order::kParts * wide + r % wide) * kLanes; }
  int64_t step() const { return wide * kLanes; }
  int64_t group() const { return step() * Order::kParts; }
};

// Groups of a row from `group` on, an element at a time.
template <class Order, class T>
void pack_row(const Rows<T>& x, int64_t row, int64_t group, const Panels<Order>& to) {
  float* out = to.row(row);
  for (; group < to.groups; ++group) {
    T part[Order::kDepth] = {};
    const int64_t k = group * Order::kDepth, count = std::min<int64_t>(Order::kDepth, x.K - k);
    for (int64_t i = 0; i < count; ++i) part[i] = x.first[row * x.row + (k + i) * x.step];
    Order::put(out + group * to.group(), to.step(), Order::along(part));
  }
}

// The whole groups of rows whose K is dense.
template <class Order, class T>
void pack_along(const Rows<T>& x, int64_t groups, const Panels<Order>& to) {
  for (int64_t first = 0; first < x.count; first += to.wide) {
    const int64_t rows = std::min(to.wide, x.count - first);
    const T* in = x.first + first * x.row;
    float* out = to.row(first);
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t r = 0; r < rows; ++r)
        Order::put(out + g * to.group() + r * kLanes, to.step(), Order::along(in + r * x.row + g * Order::kDepth));
  }
}

// Those of eight rows or more that are next to each other for every k. Each line of memory is read once.
template <class Order, class T>
void pack_across(const Rows<T>& x, int64_t groups, const Panels<Order>& to) {
  constexpr int64_t kMost = 256;
  for (int64_t first = 0; first < x.count; first += kMost) {
    if (first > 0 && x.count - first < kLanes) first = x.count - kLanes;
    const int64_t count = std::min(kMost, x.count - first);
    float* place[kMost];
    for (int64_t r = 0; r < count; ++r) place[r] = to.row(first + r);
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t begin = 0; begin < count; begin += kLanes) {
        const int64_t r = std::min(begin, count - kLanes);  // of a broken eight some rows are packed again
        Eight block[kLanes];
        const T* corner = x.first + first + r + g * Order::kDepth * x.step;
        for (int i = 0; i < kLanes; ++i) block[i] = Order::across(corner, x.step, i);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) Order::put(place[r + i] + g * to.group(), to.step(), block[i]);
      }
  }
}

template <class Order, class T>
inline void pack(const Rows<T>& x, const Panels<Order>& to) {
  const int64_t whole = x.K / Order::kDepth;
  const bool along = x.step == 1, across = !along && x.row == 1 && x.count >= kLanes;
  if (along) pack_along(x, whole, to);
  if (across) pack_across(x, whole, to);
  if (const int64_t packed = along || across ? whole : 0; packed < to.groups)
    for (int64_t r = 0; r < x.count; ++r) pack_row(x, r, packed, to);
  const int64_t all = (x.count + to.wide - 1) / to.wide * to.wide;
  for (int64_t r = x.count; r < all; ++r)
    for (int64_t g = 0; g < to.groups; ++g) Order::put(to.row(r) + g * to.group(), to.step(), Eight{});
}

// Rows `begin` to `end` of matrix z of an operand.
template <class T>
inline Rows<T> rows_of(const Operand& x, int64_t z, int64_t begin, int64_t end, int64_t K) {
  return {static_cast<const T*>(x.first) + z * x.batch + begin * x.row, x.row, x.step, end - begin, K};
}

template <class Order>
void pack(const Operand& x, int64_t z, int64_t begin, int64_t end, int64_t K, const Panels<Order>& to) {
  with_operand<Order>(x.dtype, [&](auto t) { pack(rows_of<decltype(t)>(x, z, begin, end, K), to); });
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
