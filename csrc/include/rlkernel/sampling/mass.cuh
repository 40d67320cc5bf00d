// What a search for the end of a kept set counts in: the ordered bits of a float, and integer masses.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/math.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// Unsigned integers in the order of the floats, which must not be -0.
__device__ __forceinline__ uint32_t key_of(float z) {
  const uint32_t bits = to_bits(z);
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
// The key of a z of the row: -0 counts as 0.
__device__ __forceinline__ uint32_t ordered(float z) { return key_of(z + 0.0f); }
__device__ __forceinline__ float from_key(uint32_t key) { return from_bits(key >> 31 != 0 ? key & 0x7fffffffu : ~key); }
constexpr uint32_t kLowestKey = 0x00800000u;  // of -FLT_MAX: -inf is never kept

// The integer mass of a token, e * 2^40 to the nearest, as high * 2^20 + low with |low| <= 2^19. Adding 1.5 * 2^23 leaves the
// nearest integer in the low bits; no conversion, of which a multiprocessor has but 16 a clock.
struct Mass {
  static constexpr uint32_t kZero = 0x4B400000u;  // the bits of 1.5 * 2^23
  uint32_t high, low;                             // plus kZero each

  __device__ __forceinline__ explicit Mass(float e) {
    const float shift = from_bits(kZero);
    const float a = fmaf(e, 0x1p20f, shift), rest = fmaf(e, 0x1p20f, shift - a);  // exact
    high = to_bits(a);
    low = to_bits(fmaf(rest, 0x1p20f, shift));
  }
  __device__ __forceinline__ static int64_t value(uint32_t high, uint32_t low) {
    return (static_cast<int64_t>(static_cast<int32_t>(high)) << 20) + static_cast<int32_t>(low);
  }
  __device__ __forceinline__ int64_t value() const { return value(high - kZero, low - kZero); }
};

struct Sums {
  int count;  // of tokens of a row
  int64_t mass;

  __device__ __forceinline__ void add(const Sums& other) {
    count += other.count;
    mass += other.mass;
  }
};

// What a search ended with: the key at which the running sum reaches the target.
struct Crossing {
  bool found;
  uint32_t key;
  Sums above, at;  // of tokens with a larger key, and of those with this one; above: of all where it is not found
};

// All tokens above `key` and the first `ties` of those at it. Sums are -1 where they are not known.
struct Prefix {
  uint32_t key;
  int ties, at;  // at: how many there are
  Sums sums;
};

}  // namespace rlkernel::RLKERNEL_DEVICE
