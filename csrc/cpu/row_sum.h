// The sum of a row: element i belongs to lane i % 8 of chain i / 8 % 4, each in ascending order, then (0 + 1) + (2 + 3) of the
// chains and the lanes' sum. The order follows from the row's length alone; one chain would wait for its own additions.
#pragma once

#include "lanes.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

constexpr int kChains = 4;

// `add(lanes, i, count)` adds elements i up to i + count, one in each lane, and leaves the other lanes as they are. The count
// is a constant where it is kLanes.
template <class Add>
inline float row_sum(int64_t length, Add add) {
  Lanes chains[kChains] = {};
  int64_t i = 0;
  for (; i + kChains * kLanes <= length; i += kChains * kLanes)
    for (int chain = 0; chain < kChains; ++chain) add(chains[chain], i + chain * kLanes, kLanes);
  for (int chain = 0; i < length; i += kLanes, ++chain) {
    if (i + kLanes <= length) add(chains[chain], i, kLanes);
    else add(chains[chain], i, static_cast<int>(length - i));
  }
  return sum_of((chains[0] + chains[1]) + (chains[2] + chains[3]));
}

template <class T>
inline Lanes lanes_at(const T* p, int64_t i, int count) {
  return count == kLanes ? load_lanes(p + i) : load_lanes(p + i, count);
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
