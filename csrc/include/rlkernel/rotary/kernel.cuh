// Rotary position embedding: one launch for queries and keys. A thread takes 16 bytes of a head, where halves are pairs 16 bytes of
// each half; no pair sees another.
//
// Floor: q and k read and written; 8192 tokens of 32 + 8 heads of 128 in bf16 are 168 MB, 50 us at 3.35 TB/s.
#pragma once

#include "rlkernel/rotary/arguments.h"
#include "rlkernel/vec.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kRotaryThreads = 256;

__device__ __forceinline__ float table_at(const void* table, Dtype dtype, int64_t i) {
  return dtype == Dtype::f32    ? static_cast<const float*>(table)[i]
         : dtype == Dtype::bf16 ? to_float(static_cast<const bf16*>(table)[i])
                                : to_float(static_cast<const f16*>(table)[i]);
}

// A token's angle at element i of a head.
template <class T>
struct Angle {
  float cos, sin;

  __device__ __forceinline__ Angle(const Rotary& r, int64_t cos_row, int64_t sin_row, int64_t i) {
    const int64_t column = rotary_column(r, i);
    cos = table_at(r.cos.start, r.table_dtype, cos_row + column);
    sin = table_at(r.sin.start, r.table_dtype, sin_row + column);
    if (r.round_each) cos = as_stored<T>(cos), sin = as_stored<T>(sin);
  }
};

template <class T>
__device__ __forceinline__ float turned(const Rotary& r, float x, float cos, float partner, float sin) {
  return r.round_each ? as_stored<T>(x * cos) + as_stored<T>(partner * sin) : x * cos + partner * sin;
}

// Of a pair, in place.
template <class T>
__device__ __forceinline__ void turn_pair(const Rotary& r, const Angle<T>& first, const Angle<T>& second, float& a, float& b) {
  const float of_a = r.inverse ? second.sin : -first.sin, of_b = r.inverse ? -first.sin : second.sin;
  const float turned_a = turned<T>(r, a, first.cos, b, of_a);
  b = turned<T>(r, b, second.cos, a, of_b);
  a = turned_a;
}

template <class T>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kRotaryThreads, 2) rotary_kernel(Rotary r, int64_t turning, int64_t all_of_head) {
  constexpr int kSize = kVector<T>;
  const int64_t half = r.rotary_dim / 2, of_token = (r.q.heads + r.k.heads) * all_of_head, all = r.outer * r.inner * of_token;
  const int64_t step = int64_t{gridDim.x} * kRotaryThreads;
  for (int64_t at = int64_t{blockIdx.x} * kRotaryThreads + threadIdx.x; at < all; at += step) {
    const int64_t token = at / of_token, piece = at % all_of_head;
    int64_t head = at % of_token / all_of_head;
    const RotaryHeads& h = head < r.q.heads ? r.q : r.k;
    if (head >= r.q.heads) head -= r.q.heads;
    const int64_t outer = token / r.inner, inner = token % r.inner;
    const T* x = static_cast<const T*>(h.x) + outer * h.x_outer + inner * h.x_inner + head * h.x_head;
    T* out = static_cast<T*>(h.out) + outer * h.out_outer + inner * h.out_inner + head * h.out_head;
    float a[kSize], b[kSize];
    if (piece >= turning) {  // what does not turn
      const int64_t i = r.rotary_dim + (piece - turning) * kSize;
      const int count = static_cast<int>(r.length - i < kSize ? r.length - i : kSize);
      read_floats(x + i, count, a);
      write_floats(out + i, count, a);
      continue;
    }
    const int64_t cos_row = rotary_row(r, r.cos, token), sin_row = rotary_row(r, r.sin, token), i = piece * kSize;
    const int64_t end = r.interleaved ? r.rotary_dim : half;
    const int count = static_cast<int>(end - i < kSize ? end - i : kSize);
    read_floats(x + i, count, a);
    if (r.interleaved) {
#pragma unroll
      for (int k = 0; k < kSize; k += 2) {
        if (k >= count) continue;
        turn_pair<T>(r, {r, cos_row, sin_row, i + k}, {r, cos_row, sin_row, i + k + 1}, a[k], a[k + 1]);
      }
    } else {
      read_floats(x + half + i, count, b);
#pragma unroll
      for (int k = 0; k < kSize; ++k) {
        if (k >= count) continue;
        turn_pair<T>(r, {r, cos_row, sin_row, i + k}, {r, cos_row, sin_row, half + i + k}, a[k], b[k]);
      }
      write_floats(out + half + i, count, b);
    }
    write_floats(out + i, count, a);
  }
}

int rotary(const Rotary& r, void* stream) {
  return with_dtype(r.dtype, [&](auto type) {
    using T = decltype(type);
    const auto vectors = [](int64_t elements) { return (elements + kVector<T> - 1) / kVector<T>; };
    const int64_t turning = vectors(r.interleaved ? r.rotary_dim : r.rotary_dim / 2);
    const int64_t of_head = turning + (r.q.out == r.q.x ? 0 : vectors(r.length - r.rotary_dim));
    const int64_t threads = r.outer * r.inner * (r.q.heads + r.k.heads) * of_head;
    if (threads == 0) return 0;
    const int64_t blocks = (threads + kRotaryThreads - 1) / kRotaryThreads;
    RLKERNEL_LAUNCH((rotary_kernel<T>), static_cast<unsigned>(blocks < 1 << 20 ? blocks : 1 << 20), kRotaryThreads, stream, r,
                    turning, of_head);
    return launch_error();
  });
}

}  // namespace rlkernel::RLKERNEL_DEVICE
