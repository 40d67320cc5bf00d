// The running softmax of a row. With fused multiply-adds its bits are those of every instruction set.
#pragma once

#include <type_traits>

#include "../factor_exp.h"
#include "../half_range.h"
#include "../shuffles.h"
#include "row.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kBlock = 4096;  // logits whose maximum is taken before their exp: they stay in the L1 cache
constexpr int64_t kNarrow = 1024;  // exponentials that are summed in fp32: 64 in each lane

typedef double Doubles __attribute__((vector_size(kWidth * 8)));

// max y, sum e, sum e * (y - max) / T with e = exp((y - max) / T).
struct Softmax {
  float max = -kInf;
  double sum = 0, weighted = 0;

  // Not inlined: forward with and without entropy must round alike, and a compiler may contract each copy differently.
  __attribute__((noinline)) void raise(float to, double inverse_temperature) {
    if (max != -kInf) {  // else sum is 0, or NaN
      const double shift = (static_cast<double>(max) - to) * inverse_temperature;
      const double factor = std::exp(shift);
      weighted = factor == 0 ? 0 : (weighted + sum * shift) * factor;
      sum *= factor;
    }
    max = to;
  }
};

// A sum of sixteen lanes in fp32 for a while, then in fp64.
struct LaneSum {
  Floats narrow[kParts] = {};
  Doubles wide[kParts] = {};

  void flush() {
    for (int k = 0; k < kParts; ++k) {
      wide[k] += __builtin_convertvector(narrow[k], Doubles);
      narrow[k] = Floats{};
    }
  }
  // Lanes i and i + 8, then i and i + 4, and so on.
  template <class T>
  double total() const {
    double as_added[kLanes], lane[kLanes];
    std::memcpy(as_added, wide, sizeof as_added);
    for (int i = 0; i < kLanes; ++i) lane[Lanes<T>::place(i)] = as_added[i];
    for (int half = kLanes / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }
};

// max(y, peak) is peak where y is NaN: the sum reports those.
template <class T>
Floats peaks_of(const T* x, int64_t whole) {
  constexpr int kPeaks = 8, kSteps = kPeaks / kParts;
  Floats peaks[kPeaks];
  for (Floats& peak : peaks) peak = broadcast(-kInf);
  int64_t i = 0;
  const auto look = [&](int place) {
    const Lanes<T> logits(x + i);
    for (int k = 0; k < kParts; ++k) peaks[place * kParts + k] = max(logits.v[k], peaks[place * kParts + k]);
    i += kLanes;
  };
  while (i + kSteps * kLanes <= whole)
    for (int place = 0; place < kSteps; ++place) look(place);
  while (i < whole) look(0);
  for (int half = kPeaks / 2; half > 0; half /= 2)
    for (int k = 0; k < half; ++k) peaks[k] = max(peaks[k], peaks[k + half]);
  return peaks[0];
}

// Where whole logits lie.
template <class T>
Range range_of(const T* x, int64_t whole) {
#if defined(__AVX2__)
  if constexpr (sizeof(T) == 2) {
    HalfRange chains[2];  // one would wait for itself
    constexpr int64_t kEach = HalfRange::kElements;
    int64_t i = 0;
    for (; i + 2 * kEach <= whole; i += 2 * kEach)
      for (int k = 0; k < 2; ++k) chains[k].look(HalfRange::read(x + i + k * kEach));
    chains[0].look(chains[1]);
    Range range;
    if (chains[0].find<T>(range)) {
      if (i < whole) range = {-kInf, std::fmax(range.most, largest_lane(peaks_of(x + i, whole - i)))};
      return range;
    }
  }
#endif
  return {-kInf, largest_lane(peaks_of(x, whole))};
}

template <class T>
bool has_nan(const T* x, int64_t whole) {
  Bits nan{};
  for (int64_t i = 0; i < whole; i += kLanes)
    for (const Floats v : Lanes<T>(x + i).v) nan |= (Bits)(v != v);
  return any(nan);
}

// Up to kBlock logits join the softmax; `next` is what will be read after them.
template <class T, bool kEntropy>
void accumulate(const T* x, int64_t count, const T* next, double inverse_temperature, const FactorExp& exp_of_row,
                Softmax& state) {
  const FactorExp exp = exp_of_row;  // the compiler cannot know that nothing here writes to it
  const int64_t whole = count / kLanes * kLanes, rest = count - whole;
  const Padded<T> tail(x + whole, rest);
  const Range range = range_of(x, whole);
  const float peak = rest != 0 ? std::fmax(range.most, largest_lane(peaks_of(tail.logits, kLanes))) : range.most;
  if (peak == -kInf) {  // contributes 0, unless it hides a NaN
    if (has_nan(x, whole) || has_nan(tail.logits, kLanes)) state.sum = kNan;
    return;
  }
  if (peak > state.max) state.raise(peak, inverse_temperature);

  const Floats max_y = broadcast(state.max);
  LaneSum sum, weighted;
  const auto add = [&](const T* logits, auto cuts) {
    const Lanes<T> lanes(logits);
    for (int k = 0; k < kParts; ++k) {
      Floats d = lanes.v[k] - max_y;
      if constexpr (cuts) d = exp.cut(d);
      const Floats e = exp(d);
      sum.narrow[k] += e;
      if constexpr (kEntropy) weighted.narrow[k] = fma(e, d, weighted.narrow[k]);
    }
  };
  const auto flush = [&] {
    sum.flush();
    if constexpr (kEntropy) weighted.flush();
  };
  const auto add_whole = [&](auto cuts) {
    for (int64_t i = 0; i < whole;) {
      const int64_t stop = whole - i < kNarrow ? whole : i + kNarrow;
      for (; i < stop; i += kLanes) {
        prefetch(next + i);  // the next block streams in while this one is computed
        add(x + i, cuts);
      }
      flush();
    }
  };
  if (exp.is_uncut(range.least - state.max)) add_whole(std::false_type{});
  else add_whole(std::true_type{});
  if (rest != 0) {
    add(tail.logits, std::true_type{});
    flush();
  }
  state.sum += sum.total<T>();
  if constexpr (kEntropy) state.weighted += weighted.total<T>() * inverse_temperature;
}

template <class T, bool kMapped, bool kEntropy>
void accumulate(const Row<T, kMapped>& row, int64_t vocab, double inverse_temperature, const FactorExp& exp, Softmax& state) {
  alignas(64) float mapped[kMapped ? kBlock : 1];
  for (int64_t start = 0; start < vocab; start += kBlock) {
    const int64_t count = vocab - start < kBlock ? vocab - start : kBlock;
    if constexpr (kMapped) {
      int64_t i = 0;
      for (; i + kWidth <= count; i += kWidth) {
        prefetch(row.x + start + kBlock + i);
        store(mapped + i, row.at(start + i).y);
      }
      if (i < count) store_part(mapped + i, row.part(start + i, static_cast<int>(count - i)).y, static_cast<int>(count - i));
      accumulate<float, kEntropy>(mapped, count, mapped, inverse_temperature, exp, state);
    } else {
      accumulate<T, kEntropy>(row.x + start, count, row.x + start + kBlock, inverse_temperature, exp, state);
    }
  }
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
