// Rows of fp32, fp16 or bf16 in vectors of 16 bytes, read and written as fp32.
#pragma once

#include "rlkernel/device.h"
#include "rlkernel/dtype.h"
#include "rlkernel/math.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

struct f16 {
  uint16_t bits;
};
struct bf16 {
  uint16_t bits;
};

template <class T>
constexpr bool kIsBf16 = false;
template <>
constexpr bool kIsBf16<bf16> = true;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return from_bits(static_cast<uint32_t>(x.bits) << 16); }
__device__ __forceinline__ float to_float(f16 x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#elif defined(__HIP__)
  return static_cast<float>(__builtin_bit_cast(_Float16, x.bits));
#else
  const uint32_t magnitude = x.bits & 0x7fffu, sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  if (magnitude >= 0x7c00u) return from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  return from_bits(sign | to_bits(from_bits(magnitude << 13) * 0x1p112f));  // scales denormals too
#endif
}

template <class T>
__device__ __forceinline__ T from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
#if defined(__CUDA_ARCH__)
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#else
  const uint32_t bits = to_bits(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16)};
#endif
}

template <>
__device__ __forceinline__ f16 from_float<f16>(float x) {
#if defined(__CUDA_ARCH__)
  f16 y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
#elif defined(__HIP__)
  return {__builtin_bit_cast(uint16_t, static_cast<_Float16>(x))};
#else
  const uint32_t bits = to_bits(x), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  uint32_t half;
  if (magnitude > 0x7f800000u) half = 0x7e00u;
  else if (magnitude >= 0x477ff000u) half = 0x7c00u;  // rounds to infinity
  else if (magnitude < 0x38800000u) half = to_bits(from_bits(magnitude) + 0.5f) - 0x3f000000u;  // denormal
  else half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1)) >> 13;
  return {static_cast<uint16_t>(sign | half)};
#endif
}

// Bytes as they lie in memory. Reads are marked as streaming: a kernel reads each logit once.
struct alignas(16) Bytes16 {
  uint32_t word[4];
};

__device__ __forceinline__ Bytes16 read_streaming(const void* p) {
#if defined(__CUDA_ARCH__)
  const uint4 v = __ldcs(static_cast<const uint4*>(p));
  return {{v.x, v.y, v.z, v.w}};
#elif defined(__HIP_DEVICE_COMPILE__)
  typedef uint32_t Words __attribute__((ext_vector_type(4)));
  const Words v = __builtin_nontemporal_load(static_cast<const Words*>(p));
  return {{v.x, v.y, v.z, v.w}};
#else
  return *static_cast<const Bytes16*>(p);
#endif
}

// 16 bytes of a row whose addresses are multiples of kAlign: the same bytes by more and narrower reads, none outside them.
template <int kAlign>
__device__ __forceinline__ Bytes16 read_bytes(const char* p) {
  if constexpr (kAlign == 16) {
    return read_streaming(p);
  } else if constexpr (kAlign == 4) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(p);
    return {{words[0], words[1], words[2], words[3]}};
  } else {
    const uint32_t* middle = reinterpret_cast<const uint32_t*>(p + 2);  // the address is 2 modulo 4
    const uint32_t first = *reinterpret_cast<const uint16_t*>(p), last = *reinterpret_cast<const uint16_t*>(p + 14);
    const uint32_t a = middle[0], b = middle[1], c = middle[2];
    return {{first | a << 16, a >> 16 | b << 16, b >> 16 | c << 16, c >> 16 | last << 16}};
  }
}

// Of the addresses that `read_bytes` tells apart.
template <class T>
__device__ __forceinline__ int alignment_of(const T* p) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(p);
  return address % 16 == 0 ? 16 : address % 4 == 0 ? 4 : 2;
}

// How many elements of T are in 16 bytes.
template <class T>
constexpr int kVector = 16 / static_cast<int>(sizeof(T));

template <class T>
__device__ __forceinline__ float element(const Bytes16& bytes, int i) {
  if constexpr (sizeof(T) == 4) {
    return from_bits(bytes.word[i]);
  } else {
    const uint32_t word = bytes.word[i / 2];
    return to_float(T{static_cast<uint16_t>(i % 2 ? word >> 16 : word)});
  }
}

// The first `count` of the elements in 16 bytes; nothing behind them is read.
template <class T>
__device__ __forceinline__ Bytes16 read_part(const T* p, int count) {
  Bytes16 bytes = {};
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) {
    if (i >= count) break;
    if constexpr (sizeof(T) == 4) bytes.word[i] = to_bits(p[i]);
    else bytes.word[i / 2] |= static_cast<uint32_t>(p[i].bits) << 16 * (i % 2);
  }
  return bytes;
}

// Two elements of 16 bits in one word, the first in its low half.
template <class T>
__device__ __forceinline__ uint32_t pack(float first, float second) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  if constexpr (kIsBf16<T>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
  return word;
#else
  return from_float<T>(first).bits | static_cast<uint32_t>(from_float<T>(second).bits) << 16;
#endif
}

// One write of 4 * kWords bytes, kWords being 2 or 4. nvcc splits an assigned uint4 into four writes, __stwb stays one.
template <int kWords>
__device__ __forceinline__ void write_words(void* p, const uint32_t* word) {
#if defined(RLKERNEL_EMULATION)
  for (int i = 0; i < kWords; ++i) static_cast<uint32_t*>(p)[i] = word[i];
#elif defined(__HIP__)
  typedef uint32_t Vector __attribute__((ext_vector_type(kWords)));
  Vector v;
  for (int i = 0; i < kWords; ++i) v[i] = word[i];
  *static_cast<Vector*>(p) = v;
#else
#if defined(__CUDA_ARCH__)
  if constexpr (kWords == 4) __stwb(static_cast<uint4*>(p), make_uint4(word[0], word[1], word[2], word[3]));
  else __stwb(static_cast<uint2*>(p), make_uint2(word[0], word[1]));
#endif
#endif
}

// The alignment that `write_vector` wants.
template <class T, int kCount>
constexpr int kWriteAlign = sizeof(T) * kCount < 16 ? 8 : 16;

// kCount elements, 8 bytes or a multiple of 16. Not streaming: the next kernel, often a GEMM, reads them.
template <class T, int kCount>
__device__ __forceinline__ void write_vector(T* p, const float (&values)[kCount]) {
  constexpr int kWords = kCount * static_cast<int>(sizeof(T)) / 4;
  uint32_t words[kWords];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if constexpr (sizeof(T) == 4) words[i] = to_bits(values[i]);
    else if (i % 2) words[i / 2] = pack<T>(values[i - 1], values[i]);
  }
  constexpr int kStep = kWords < 4 ? kWords : 4;
#pragma unroll
  for (int i = 0; i < kWords; i += kStep) write_words<kStep>(reinterpret_cast<uint32_t*>(p) + i, words + i);
}

// `count` elements of a row as floats, by one read where it may be; 0 behind them.
template <class T>
__device__ __forceinline__ void read_floats(const T* p, int count, float (&x)[kVector<T>]) {
  const bool whole = count == kVector<T> && reinterpret_cast<uintptr_t>(p) % 16 == 0;
  const Bytes16 bytes = whole ? *reinterpret_cast<const Bytes16*>(p) : read_part(p, count);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i) x[i] = element<T>(bytes, i);
}

template <class T>
__device__ __forceinline__ void write_floats(T* p, int count, const float (&x)[kVector<T>]) {
  if (count == kVector<T> && reinterpret_cast<uintptr_t>(p) % 16 == 0) return write_vector(p, x);
#pragma unroll
  for (int i = 0; i < kVector<T>; ++i)
    if (i < count) p[i] = from_float<T>(x[i]);
}

// x as a T would hold it.
template <class T>
__device__ __forceinline__ float as_stored(float x) {
  return to_float(from_float<T>(x));
}

template <class Body>
__host__ inline int with_dtype(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::f32: return body(float{});
    case Dtype::f16: return body(f16{});
    case Dtype::bf16: return body(bf16{});
  }
  return kInvalidArguments;
}

}  // namespace rlkernel::RLKERNEL_DEVICE
