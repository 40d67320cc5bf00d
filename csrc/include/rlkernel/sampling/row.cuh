// One row of logits as the sampling kernels see it: x as given, and z, from which the token is drawn.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/math.cuh"
#include "rlkernel/sampling/arguments.h"
#include "rlkernel/sampling/stream.h"
#include "rlkernel/vec.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kSplit = static_cast<int>(kSamplingSplit), kGroup = static_cast<int>(kSamplingGroup);

// u at and below this has 2^u = 0 and a finite product with anything a row can hold.
constexpr float kLowestPower = -200.0f;

// Greedy rows have the statistics of T = 1, and so have those of a T that is none: no number overflows, no id is left over.
__device__ __forceinline__ float softmax_temperature(float temperature) {
  return is_temperature(temperature) ? temperature : 1.0f;
}

// 2^(this * (z - max)) = exp((z - max) / T), as the kernels of logprob have it.
__device__ __forceinline__ float power_scale(float temperature) { return kLog2E / temperature; }

// A logit of a tile, whatever its type.
__device__ __forceinline__ float logit_at(const SamplingInputs& in, int64_t r, int64_t place) {
  const int64_t i = r * in.row_stride + place;
  if (in.dtype == Dtype::f32) return static_cast<const float*>(in.logits)[i];
  if (in.dtype == Dtype::f16) return to_float(static_cast<const f16*>(in.logits)[i]);
  return to_float(static_cast<const bf16*>(in.logits)[i]);
}

// z of a tile's row, read as T: the logits themselves, or the adjusted ones.
template <class T>
struct Logits {
  const T* z;
  const uint32_t* mask;  // of the whole vocabulary; null: every token is allowed
  int vocab, start;      // of the tile

  __device__ __forceinline__ Logits(const SamplingInputs& in, const void* first, int64_t stride, int64_t r)
      : z(static_cast<const T*>(first) + r * stride),
        mask(in.bitmask == nullptr ? nullptr : reinterpret_cast<const uint32_t*>(in.bitmask) + r * in.bitmask_stride),
        vocab(static_cast<int>(in.vocab)), start(static_cast<int>(in.vocab_start)) {}

  // Bit i says whether token place + i may be drawn; a vector of tokens never straddles two words.
  __device__ __forceinline__ uint32_t allowed(int place) const {
    const uint32_t token = static_cast<uint32_t>(start + place);
    return mask == nullptr ? ~0u : mask[token / 32] >> token % 32;
  }

  // -inf behind the row's end.
  __device__ __forceinline__ float at(int place) const {
    return place < vocab && (allowed(place) & 1u) ? to_float(z[place]) : -infinity();
  }
};

__device__ __forceinline__ float gumbel_noise(uint32_t prefix, uint32_t token) {
  const auto log = [](float x) { return log_exact(x); };
  return -log(stream_exponential(stream_uniform(stream_word(prefix, token)), log));
}

// 16 bytes that are read a second time, soon: unlike those of vec.cuh they stay in the caches.
template <int kAlign>
__device__ __forceinline__ Bytes16 read_again(const char* p) {
#if defined(__CUDA_ARCH__)
  if constexpr (kAlign == 16) {
    const uint4 v = __ldg(reinterpret_cast<const uint4*>(p));
    return {{v.x, v.y, v.z, v.w}};
  }
#endif
  if constexpr (kAlign == 16) return *reinterpret_cast<const Bytes16*>(p);
  else return read_bytes<kAlign>(p);
}

// The larger, or smaller, of the floats in two words, each half by itself where they have 16 bits; a number where the other is
// NaN.
template <class T, bool kMax>
__device__ __forceinline__ uint32_t pick(uint32_t a, uint32_t b) {
  if constexpr (sizeof(T) == 4) {
    return to_bits(kMax ? fmaxf(from_bits(a), from_bits(b)) : fminf(from_bits(a), from_bits(b)));
  } else {
#if defined(__CUDA_ARCH__)
    uint32_t c;
    if constexpr (kIsBf16<T>) {
      if constexpr (kMax) asm("max.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
      else asm("min.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    } else {
      if constexpr (kMax) asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
      else asm("min.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    }
    return c;
#else
    const auto of_half = [&](int shift) {
      const T first{static_cast<uint16_t>(a >> shift)}, second{static_cast<uint16_t>(b >> shift)};
      const float x = to_float(first), y = to_float(second);
      const bool takes_second = x != x || (kMax ? y > x : y < x);
      return static_cast<uint32_t>(takes_second ? second.bits : first.bits) << shift;
    };
    return of_half(0) | of_half(16);
#endif
  }
}

// The largest, or the smallest, of a vector; NaN only where there is nothing else.
template <class T, bool kMax>
__device__ __forceinline__ float extreme_of(const Bytes16& bytes) {
  const uint32_t* w = bytes.word;
  const uint32_t word = pick<T, kMax>(pick<T, kMax>(w[0], w[1]), pick<T, kMax>(w[2], w[3]));
  if constexpr (sizeof(T) == 4) {
    return from_bits(word);
  } else {
    const Bytes16 ends = {{word, 0, 0, 0}};
    const float first = element<T>(ends, 0), second = element<T>(ends, 1);
    return kMax ? fmaxf(first, second) : fminf(first, second);
  }
}

// 16 bytes of -inf.
template <class T>
__device__ __forceinline__ Bytes16 nothing() {
  constexpr uint32_t kWord = sizeof(T) == 4 ? 0xff800000u : kIsBf16<T> ? 0xff80ff80u : 0xfc00fc00u;
  return {{kWord, kWord, kWord, kWord}};
}

// The `count` elements at a row's end, and -inf behind them.
template <class T>
__device__ __forceinline__ Bytes16 read_end(const T* p, int count) {
  Bytes16 bytes = read_part(p, count);
  const Bytes16 behind = nothing<T>();
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    constexpr int kPerWord = 4 / static_cast<int>(sizeof(T));
    const uint32_t half = kPerWord == 1 ? ~0u : i % 2 != 0 ? 0xffff0000u : 0xffffu;
    if (i >= count) bytes.word[i / kPerWord] |= behind.word[i / kPerWord] & half;  // what is not read is 0
  }
  return bytes;
}

// The first `count` elements of a vector, which may start anywhere, and -inf behind them: a read for each, none waits for another.
template <class T>
__device__ __forceinline__ Bytes16 read_few(const T* p, int count) {
  Bytes16 bytes = nothing<T>();
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if (i < count) {
      uint32_t& word = bytes.word[i * static_cast<int>(sizeof(T)) / 4];
      if constexpr (sizeof(T) == 4) word = to_bits(p[i]);
      else word = i % 2 != 0 ? (word & 0xffffu) | static_cast<uint32_t>(p[i].bits) << 16 : (word & 0xffff0000u) | p[i].bits;
    }
  }
  return bytes;
}

// Reduces kCount values of each of kSpan lanes, both powers of 2. Lane l of the kSpan gets value l / (kSpan / kCount). Each
// step sends half of the values that are left: about kCount shuffles, where a butterfly for each value takes kCount *
// log2(kSpan). The tree does not depend on the lane.
template <int kSpan, int kCount, class T, class Op>
__device__ __forceinline__ T fold(const T (&values)[kCount], Op op) {
  if constexpr (kCount == 1) {
    T value = values[0];
#pragma unroll
    for (int distance = kSpan / 2; distance > 0; distance /= 2) value = op(value, shuffle_xor(value, distance));
    return value;
  } else {
    const bool upper = (static_cast<int>(threadIdx.x) & kSpan / 2) != 0;
    T half[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const T given = upper ? values[i] : values[i + kCount / 2], kept = upper ? values[i + kCount / 2] : values[i];
      half[i] = op(kept, shuffle_xor(given, kSpan / 2));
    }
    return fold<kSpan / 2>(half, op);
  }
}

struct Add {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Larger {  // drops NaN
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Least {
  template <class T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return b < a ? b : a;
  }
};

// Over the 32 lanes; every lane gets the same bits. `op` must not care which operand comes first.
template <class T, class Op>
__device__ __forceinline__ T reduce_lanes(T value, Op op) {
#pragma unroll
  for (int distance = kLanes / 2; distance > 0; distance /= 2) value = op(value, shuffle_xor(value, distance));
  return value;
}

// Over the 32 lanes; NaN counts as -inf.
__device__ __forceinline__ float max_of_lanes(float value) {
#if defined(__CUDA_ARCH__)
  // one instruction does it for integers, and floats are in their order once those below 0 are turned round
  const auto turned = [](int x) { return x ^ (x >> 31 & 0x7fffffff); };
  const int bits = static_cast<int>(to_bits(fmaxf(value, -infinity())));
  return from_bits(static_cast<uint32_t>(turned(__reduce_max_sync(0xffffffffu, turned(bits)))));
#else
  return reduce_lanes(fmaxf(value, -infinity()), Larger());
#endif
}

__device__ __forceinline__ int min_of_lanes(int value) {
#if defined(__CUDA_ARCH__)
  return __reduce_min_sync(0xffffffffu, value);
#else
  return reduce_lanes(value, Least());
#endif
}

// The sum of the lanes up to this one.
template <class T>
__device__ __forceinline__ T running_sum(T value) {
  const int lane = threadIdx.x % kLanes;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    const T before = shuffle(value, lane >= distance ? lane - distance : lane);
    if (lane >= distance) value += before;
  }
  return value;
}

}  // namespace rlkernel::RLKERNEL_DEVICE
