// The sum of a row: element i belongs to lane i % 8 of chain i / 8 % 4, each in ascending order, then (0 + 1) + (2 + 3) of the
// chains and the lanes' sum. The order follows from the row's length alone; one chain would wait for its own additions.
#pragma once

#include <array>

#include "lanes.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

constexpr int kChains = 4;

// Several sums of one pass. `add(sums, i, count)` adds elements i up to i + count, one in each lane of each sum, and leaves the
// other lanes as they are. The count is a constant where it is kLanes.
template <int kSums, class Add>
inline std::array<float, kSums> row_sums(int64_t length, Add add) {
  Lanes chains[kChains][kSums] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= length; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) add(chains[chain], i + chain * kLanes, kLanes);
  for (int chain = 0; i < length; i += kLanes, ++chain) {
    if (i + kLanes <= length) add(chains[chain], i, kLanes);
    else add(chains[chain], i, static_cast<int>(length - i));
  }
  std::array<float, kSums> sums;
  for (int k = 0; k < kSums; ++k) sums[k] = sum_of((chains[0][k] + chains[1][k]) + (chains[2][k] + chains[3][k]));
  return sums;
}

template <class Add>
inline float row_sum(int64_t length, Add add) {
  return row_sums<1>(length, [&](Lanes (&sums)[1], int64_t i, int count) { add(sums[0], i, count); })[0];
}

template <class T>
inline Lanes lanes_at(const T* p, int64_t i, int count) {
  return count == kLanes ? load_lanes(p + i) : load_lanes(p + i, count);
}

// The lanes in front of `count`; 0 in the others.
inline Lanes first_lanes(Lanes x, int count) {
  for (int i = count; i < kLanes; ++i) x[i] = 0;
  return x;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
