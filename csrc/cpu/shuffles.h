// Lanes of vectors that change places, and what combines the lanes of one.
#pragma once

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

#if defined(__clang__)
#define RLKERNEL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define RLKERNEL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Ints{__VA_ARGS__})
#endif

template <int... I>
struct Shuffles {
  template <int kStep>
  static Floats own(Floats a, Floats b) {  // lanes whose bit kStep is set from b
    return RLKERNEL_SHUFFLE(a, b, ((I & kStep) != 0 ? kWidth + I : I)...);
  }
  template <int kStep>
  static Floats other(Floats a, Floats b) {  // the same, each from the lane across
    return RLKERNEL_SHUFFLE(a, b, ((I & kStep) != 0 ? kWidth + (I ^ kStep) : (I ^ kStep))...);
  }
  template <int kStep>
  static Floats low(Floats a, Floats b) {  // lanes whose bit kStep is set from b, where it is not
    return RLKERNEL_SHUFFLE(a, b, ((I & kStep) != 0 ? kWidth + (I ^ kStep) : I)...);
  }
  template <int kStep>
  static Floats high(Floats a, Floats b) {  // lanes whose bit kStep is not set from a, where it is
    return RLKERNEL_SHUFFLE(a, b, ((I & kStep) != 0 ? kWidth + I : (I ^ kStep))...);
  }
};
#if defined(__AVX512F__)
using AllLanes = Shuffles<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using AllLanes = Shuffles<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using AllLanes = Shuffles<0, 1, 2, 3>;
#endif
#undef RLKERNEL_SHUFFLE

// Halves of x with each other, then quarters, until one lane is left, in as many steps as the width has bits.
template <int kStep = kWidth / 2, class Combine>
inline float folded(Floats x, Combine combine) {
  if constexpr (kStep == 0) return x[0];
  else return folded<kStep / 2>(combine(AllLanes::other<kStep>(x, x), x), combine);
}

// largest() of simd.h, faster.
inline float largest_lane(Floats x) {
  return folded(x, [](Floats a, Floats b) { return max(a, b); });
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
