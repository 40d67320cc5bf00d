// Rows in vectors of floats, the last of which may be a part of one.
#pragma once

#include <type_traits>

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
#if defined(RLKERNEL_FUSED)  // as simd.h
inline namespace fused {
#endif

constexpr int64_t kParallel = 1 << 15;  // elements from which waking the other threads pays

// Calls body(i, count) for vectors of a row; the count is a constant where it is kWidth.
template <class Body>
inline void each_vector(int64_t length, Body body) {
  int64_t i = 0;
  for (; i + kWidth <= length; i += kWidth) body(i, kWidth);
  if (i < length) body(i, static_cast<int>(length - i));
}

template <class T>
inline Floats load(const T* p, int count) {
  return count == kWidth ? load(p) : load_part(p, count);
}

template <class T>
inline void store(T* p, Floats x, int count) {
  if (count == kWidth) store(p, x);
  else store_part(p, x, count);
}

// x as a T would hold it.
template <class T>
inline Floats rounded(Floats x) {
  if constexpr (sizeof(T) == sizeof(float)) return x;
  if constexpr (std::is_same_v<T, bf16>) {  // as round_to, without the halves
    const Bits b = (Bits)x, quiet = b | 0x400000u, near = b + 0x7fffu + ((b >> 16) & 1u);
    return (Floats)((Bits)(x != x ? (Ints)quiet : (Ints)near) & 0xffff0000u);
  }
  T buffer[kWidth];
  store(buffer, x);
  return load(buffer);
}

#if defined(RLKERNEL_FUSED)
}  // namespace fused
#endif
}  // namespace rlkernel::cpu::RLKERNEL_ISA
