// A strip of the product: a few rows by a block of columns, in which all of the arithmetic happens.
#pragma once

#include <algorithm>

#include "pack.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

// Registers for the chains of a tile, beside those for its operands: of 32, of 16, and of none in particular.
#if defined(__AVX512F__)
constexpr int kMostRegisters = 6;
#elif defined(__AVX2__)
constexpr int kMostRegisters = 3;
#else
constexpr int kMostRegisters = 2;
#endif
constexpr int kColumns = 4;                            // of a tile
constexpr int kMostRows = kMostRegisters * kChains;    // of a strip
// Of K at a time, for a strip of most rows: its part of `a` stays in L1. Any number gives the same bits.
constexpr int64_t kParts = 48;

// Columns of the product that are next to each other.
template <class T>
struct Columns {
  const T* first;
  int64_t row, group;     // strides, of a column within its tile and of a group of K
  int64_t panel;          // stride of a tile of columns
  int64_t count;
  const float* rest;      // panels of the last, broken group of K, where `first` does not hold it: [tiles][parts][4][8]
};

struct Strip {
  const float* a;   // one panel
  int64_t groups;   // of K
  Register* state;  // chains of all tiles between two parts of K
  float* results;   // [rows of the strip][stride]
  int64_t stride;
};

// With kFetch the columns that are `ahead` come to L2 meanwhile, one after the other: memory is fast from one end to the other, and
// slow where four rows of a weight are read side by side.
template <class Order, bool kFetch, int kRegisters, class T>
inline void run_chains(const float* a, const T* const (&column)[kColumns], int64_t step, int64_t groups, int64_t ahead,
                       Register (&chain)[kRegisters][kColumns]) {
  constexpr int kTurns = kFetch ? kColumns : 1;
  constexpr int64_t kLine = 64 / sizeof(T), kLines = kColumns * Order::kDepth / kLine;
  for (int turn = 0; turn < kTurns; ++turn) {
    const T* fetched = column[turn] + ahead;
    for (int64_t g = groups * turn / kTurns; g < groups * (turn + 1) / kTurns; ++g) {
      if constexpr (kFetch)
        for (int i = 0; i < kLines; ++i, fetched += kLine) prefetch(fetched);
      for (int part = 0; part < Order::kParts; ++part) {
        Register x[kRegisters];
        for (int r = 0; r < kRegisters; ++r)
          x[r] = packed(a + ((g * Order::kParts + part) * kRegisters + r) * kChains * kLanes);
        for (int n = 0; n < kColumns; ++n) {
          const Register y = Order::spread_part(column[n] + g * step, part, kColumns * kLanes);
          for (int r = 0; r < kRegisters; ++r) chain[r][n] = Order::added(x[r], y, chain[r][n]);
        }
      }
    }
  }
}

template <class Order, bool kFetch, int kRegisters, class T>
void run_strip(const Strip& s, const Columns<T>& b) {
  constexpr int64_t kGroup = Order::kParts * kRegisters * kChains * kLanes;
  constexpr int64_t kGroups = kParts * kMostRegisters * kChains * kLanes / kGroup;
  const int64_t whole = b.rest == nullptr ? s.groups : s.groups - 1;
  const int64_t tiles = (b.count + kColumns - 1) / kColumns;
  for (int64_t begin = 0, end; begin == 0 || begin < whole; begin = end) {
    end = whole - begin > kGroups + kGroups / 2 ? begin + kGroups : whole;
    const float* a = s.a + begin * kGroup;
    for (int64_t t = 0; t < tiles; ++t) {
      Register chain[kRegisters][kColumns];
      Register* state = s.state + t * kRegisters * kColumns;
      for (int r = 0; r < kRegisters; ++r)
        for (int n = 0; n < kColumns; ++n) chain[r][n] = begin == 0 ? Register{} : state[r * kColumns + n];
      const T* column[kColumns];
      for (int n = 0; n < kColumns; ++n) {
        const int64_t inside = std::min<int64_t>(n, b.count - t * kColumns - 1);  // of a broken tile the last is read again
        column[n] = b.first + t * b.panel + inside * b.row + begin * b.group;
      }
      run_chains<Order, kFetch>(a, column, b.group, end - begin, b.panel, chain);
      if (end < whole) {
        for (int r = 0; r < kRegisters; ++r)
          for (int n = 0; n < kColumns; ++n) state[r * kColumns + n] = chain[r][n];
        continue;
      }
      if (b.rest != nullptr) {
        const float* rest[kColumns];
        for (int n = 0; n < kColumns; ++n) rest[n] = b.rest + (t * Order::kParts * kColumns + n) * kLanes;
        run_chains<Order, false>(s.a + whole * kGroup, rest, 0, 1, 0, chain);
      }
      for (int r = 0; r < kRegisters; r += 2) {  // of an odd number the last is summed twice
        float sums[2 * kChains * kColumns];
        total(chain[r], chain[std::min(r + 1, kRegisters - 1)], sums);
        const int rows = std::min(2, kRegisters - r) * kChains;
        for (int c = 0; c < rows; ++c)
          std::memcpy(s.results + (r * kChains + c) * s.stride + t * kColumns, sums + c * kColumns, kColumns * 4);
      }
    }
    if (whole == 0) break;
  }
}

template <class Order, bool kFetch, class T, int kRegisters = kMostRegisters>
inline void run_strip(int registers, const Strip& s, const Columns<T>& b) {
  if constexpr (kRegisters > 1)
    if (registers < kRegisters) return run_strip<Order, kFetch, T, kRegisters - 1>(registers, s, b);
  run_strip<Order, kFetch, kRegisters>(s, b);
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
