// Operands of the matrix product as the kernels read them: panels [groups of K][rows of the panel][8] of fp32, with zeros for
// what lies behind the last row and behind K.
#pragma once

#include <algorithm>

#include "lanes.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

inline int64_t groups_of(int64_t K) { return (K + kLanes - 1) / kLanes; }

// Some rows of an operand.
template <class T>
struct Rows {
  const T* first;
  int64_t row, step;  // strides
  int64_t count, K;
};

// Panels of `wide` rows, one behind the other.
struct Panels {
  float* first;
  int64_t wide, groups;

  float* place(int64_t row, int64_t group) const {
    return first + ((row / wide * groups + group) * wide + row % wide) * kLanes;
  }
};

template <class T>
inline void pack_part(const Rows<T>& x, int64_t row, int64_t group, const Panels& to) {
  T part[kLanes] = {};
  const int64_t k = group * kLanes, count = std::min<int64_t>(kLanes, x.K - k);
  for (int64_t i = 0; i < count; ++i) part[i] = x.first[row * x.row + (k + i) * x.step];
  put(to.place(row, group), eight(part));
}

template <class T>
inline void pack(const Rows<T>& x, const Panels& to) {
  const int64_t whole = x.K / kLanes;
  int64_t packed_rows = 0;  // in their whole groups
  if (x.step == 1) {
    for (int64_t first = 0; first < x.count; first += to.wide) {
      const int64_t end = std::min(first + to.wide, x.count);
      for (int64_t g = 0; g < whole; ++g)
        for (int64_t r = first; r < end; ++r) put(to.place(r, g), eight(x.first + r * x.row + g * kLanes));
    }
    packed_rows = x.count;
  } else if (x.row == 1) {
    packed_rows = x.count / kLanes * kLanes;
    for (int64_t g = 0; g < whole; ++g)
      for (int64_t r = 0; r < packed_rows; r += kLanes) {
        Eight block[kLanes];
        for (int i = 0; i < kLanes; ++i) block[i] = eight(x.first + r + (g * kLanes + i) * x.step);
        transpose(block);
        for (int i = 0; i < kLanes; ++i) put(to.place(r + i, g), block[i]);
      }
  }
  for (int64_t r = 0; r < x.count; ++r)
    for (int64_t g = r < packed_rows ? whole : 0; g < to.groups; ++g) pack_part(x, r, g, to);
  const int64_t all = (x.count + to.wide - 1) / to.wide * to.wide;
  for (int64_t r = x.count; r < all; ++r)
    for (int64_t g = 0; g < to.groups; ++g) put(to.place(r, g), Eight{});
}

// Rows `begin` to `end` of matrix z of an operand.
template <class T>
inline Rows<T> rows_of(const Operand& x, int64_t z, int64_t begin, int64_t end, int64_t K) {
  return {static_cast<const T*>(x.first) + z * x.batch + begin * x.row, x.row, x.step, end - begin, K};
}

inline void pack(const Operand& x, int64_t z, int64_t begin, int64_t end, int64_t K, const Panels& to) {
  with_type(x.dtype, [&](auto t) { pack(rows_of<decltype(t)>(x, z, begin, end, K), to); });
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
