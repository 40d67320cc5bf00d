// Around attention over shared prefixes: the merge of partial attentions, the gather of keys and values, and the sum of
// their gradients in a fixed order. All three move bytes and do little else.
//
// Floors, b bytes an element: the merge reads two rows of heads * head_dim * b and writes one, with 12 bytes a head of lse;
// 8192 rows of 32 heads of 128 in bf16 are 201 MB, 60 us at 3.35 TB/s. The gather of n rows reads and writes 2 * n * Hkv * D
// * b each, and 8 bytes of index; 36,864 rows of 8 heads of 128 in bf16 are 302 MB, 90 us. The reduction reads as much and
// writes its rows once.
#pragma once

#include "rlkernel/math.cuh"
#include "rlkernel/prefix_shared_attention/arguments.h"
#include "rlkernel/vec.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kPrefixThreads = 256;
constexpr int kMergeRows = 64;               // of one head, a block's turn
constexpr int64_t kPrefixBlocks = 1 << 20;  // a grid is at most that, blocks go on to further turns

inline bool lies_on_16(const void* p, int64_t stride_bytes, int64_t other_stride_bytes = 0) {
  return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride_bytes % 16 == 0 && other_stride_bytes % 16 == 0;
}

__host__ inline unsigned prefix_grid(int64_t turns) {
  return static_cast<unsigned>(turns < kPrefixBlocks ? turns : kPrefixBlocks);
}

// kCount elements from p on: 16 bytes, or one.
template <class T, int kCount>
__device__ __forceinline__ void read_floats(const T* p, float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    x[0] = to_float(*p);
  } else {
    const Bytes16 bytes = read_streaming(p);
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = element<T>(bytes, i);
  }
}

template <class T, int kCount>
__device__ __forceinline__ void write_floats(T* p, const float (&x)[kCount]) {
  if constexpr (kCount == 1) *p = from_float<T>(x[0]);
  else write_vector(p, x);
}

// merge

__device__ __forceinline__ float without_empty(float lse) { return lse == infinity() ? -infinity() : lse; }

// exp(lse - top). It is 1 where both are +inf: a sink that takes all.
__device__ __forceinline__ float share_of(float lse, float top) {
  if (lse == top) return 1.0f;
  const float d = lse - top;
  return d < -87.0f ? 0.0f : exp_exact(d);
}

struct MergeWeights {
  float out, part, lse;
};

__device__ __forceinline__ MergeWeights merge_weights(float a, float b, float sink) {
  float top = max_or_nan(max_or_nan(a, b), sink);
  if (top == -infinity()) top = 0.0f;  // then every share is 0
  const float ea = share_of(a, top), eb = share_of(b, top), sum = ea + eb + share_of(sink, top);
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  return {ea * inverse, eb * inverse, top + log_exact(sum)};
}

template <class T, int kCount>
static __global__ void RLKERNEL_LAUNCH_BOUNDS(kPrefixThreads, 4) merge_kernel(AttentionMerge m) {
  using Rows = MergeWeights[kMergeRows];
  RLKERNEL_SHARED(Rows, weights);
  const int64_t tiles = (m.rows + kMergeRows - 1) / kMergeRows, turns = tiles * m.heads;
  const int per_row = static_cast<int>(m.head_dim / kCount);
  for (int64_t turn = blockIdx.x; turn < turns; turn += gridDim.x) {
    // all heads of a tile follow one another: their rows lie side by side in `out`
    const int64_t head = turn % m.heads, first = turn / m.heads * kMergeRows;
    const int rows = static_cast<int>(m.rows - first < kMergeRows ? m.rows - first : kMergeRows);
    if (threadIdx.x < static_cast<unsigned>(rows)) {
      float* const lse = m.lse + head * m.lse_stride + first + threadIdx.x;
      const float part_lse = m.part != nullptr ? m.part_lse[head * m.part_lse_stride + first + threadIdx.x] : -infinity();
      const float sink = m.sinks != nullptr ? m.sinks[head] : -infinity();
      const MergeWeights w = merge_weights(without_empty(*lse), without_empty(part_lse), sink);
      weights[threadIdx.x] = w;
      *lse = w.lse;
    }
    __syncthreads();  // the rows' weights are written
    for (int i = static_cast<int>(threadIdx.x); i < rows * per_row; i += kPrefixThreads) {
      const int row = i / per_row, at = i % per_row * kCount;
      const float w = weights[row].out, part_w = weights[row].part;
      T* const out = static_cast<T*>(m.out) + (first + row) * m.out_stride + head * m.out_head_stride + at;
      float x[kCount] = {}, y[kCount] = {};
      if (w != 0.0f) read_floats(out, x);  // 0 * inf would be NaN
      if (m.part != nullptr && part_w != 0.0f)
        read_floats(static_cast<const T*>(m.part) + (first + row) * m.part_stride + head * m.part_head_stride + at, y);
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k] = fmaf(part_w, y[k], w * x[k]);
      write_floats(out, x);
    }
    __syncthreads();  // the rows' weights are read: the next turn may overwrite them
  }
}

int attention_merge(const AttentionMerge& m, void* stream) {
  if (m.rows <= 0 || m.heads <= 0) return 0;
  const unsigned grid = prefix_grid((m.rows + kMergeRows - 1) / kMergeRows * m.heads);
  return with_dtype(m.dtype, [&](auto sample) {
    using T = decltype(sample);
    constexpr int64_t kBytes = sizeof(T);
    const bool vectors = m.head_dim * kBytes % 16 == 0 &&
                         lies_on_16(m.out, m.out_stride * kBytes, m.out_head_stride * kBytes) &&
                         (m.part == nullptr || lies_on_16(m.part, m.part_stride * kBytes, m.part_head_stride * kBytes));
    if (vectors) RLKERNEL_LAUNCH((merge_kernel<T, kVector<T>>), grid, kPrefixThreads, stream, m);
    else RLKERNEL_LAUNCH((merge_kernel<T, 1>), grid, kPrefixThreads, stream, m);
    return launch_error();
  });
}

// segment_reduce

// Rows that a block takes in one turn, so that narrow ones do not leave its threads idle.
__host__ __device__ inline int rows_of_turn(int64_t units_per_row) {
  const int rows = static_cast<int>(4 * kPrefixThreads / (units_per_row > 0 ? units_per_row : 1));
  return rows > 1 ? rows : 1;
}

// Of a pair in a kernel's arguments: an index that the compiler does not know would move them all to local memory.
template <class X>
__device__ __forceinline__ X of_pair(const X (&pair)[2], bool second) {
  return second ? pair[1] : pair[0];
}

template <class T, class Out, int kCount>
static __global__ void RLKERNEL_LAUNCH_BOUNDS(kPrefixThreads, 4) reduce_kernel(SegmentReduce s) {
  const int per_row = static_cast<int>(s.width / kCount), rows_a_turn = rows_of_turn(per_row);
  const int64_t tiles = (s.rows + rows_a_turn - 1) / rows_a_turn;
  for (int64_t turn = blockIdx.x; turn < 2 * tiles; turn += gridDim.x) {
    const bool values = turn % 2 != 0;
    const int64_t first = turn / 2 * rows_a_turn, stride = of_pair(s.source_strides, values);
    const int rows = static_cast<int>(s.rows - first < rows_a_turn ? s.rows - first : rows_a_turn);
    for (int i = static_cast<int>(threadIdx.x); i < rows * per_row; i += kPrefixThreads) {
      const int64_t row = first + i / per_row, end = s.offsets[row + 1];
      const int at = i % per_row * kCount;
      const T* const source = static_cast<const T*>(of_pair(s.sources, values)) + at;
      float sum[kCount] = {};
#pragma unroll 4
      for (int64_t k = s.offsets[row]; k < end; ++k) {  // in this order, whatever runs beside it
        float x[kCount];
        read_floats(source + s.index[k] * stride, x);
#pragma unroll
        for (int j = 0; j < kCount; ++j) sum[j] += x[j];
      }
      write_floats(static_cast<Out*>(of_pair(s.outs, values)) + row * of_pair(s.out_strides, values) + at, sum);
    }
  }
}

template <class T, class Out>
__host__ inline int launch_reduce(const SegmentReduce& s, void* stream) {
  bool vectors = s.width * static_cast<int64_t>(sizeof(T)) % 16 == 0;
  for (int which = 0; which < 2; ++which)
    vectors = vectors && lies_on_16(s.sources[which], s.source_strides[which] * static_cast<int64_t>(sizeof(T))) &&
              lies_on_16(s.outs[which], s.out_strides[which] * static_cast<int64_t>(sizeof(Out)));
  const auto turns = [&](int64_t count) {
    const int rows = rows_of_turn(s.width / count);
    return prefix_grid((s.rows + rows - 1) / rows * 2);
  };
  if (vectors) RLKERNEL_LAUNCH((reduce_kernel<T, Out, kVector<T>>), turns(kVector<T>), kPrefixThreads, stream, s);
  else RLKERNEL_LAUNCH((reduce_kernel<T, Out, 1>), turns(1), kPrefixThreads, stream, s);
  return launch_error();
}

int segment_reduce(const SegmentReduce& s, void* stream) {
  if (s.out_dtype != Dtype::f32 && s.out_dtype != s.dtype) return kInvalidArguments;
  if (s.rows <= 0 || s.width <= 0) return 0;
  return with_dtype(s.dtype, [&](auto sample) {
    using T = decltype(sample);
    return s.out_dtype == s.dtype ? launch_reduce<T, T>(s, stream) : launch_reduce<T, float>(s, stream);
  });
}

// gather_kv

// Unit is what moves at once: 16 bytes, or an element. Rows and heads are counted in units.
template <class Unit>
static __global__ void RLKERNEL_LAUNCH_BOUNDS(kPrefixThreads, 4) gather_kernel(GatherKv g) {
  const int head_units = static_cast<int>(g.head_dim), per_row = static_cast<int>(g.heads) * head_units;
  const int rows_a_turn = rows_of_turn(per_row);
  const int64_t tiles = (g.rows + rows_a_turn - 1) / rows_a_turn;
  for (int64_t turn = blockIdx.x; turn < 2 * tiles; turn += gridDim.x) {
    const bool values = turn % 2 != 0;
    const int64_t first = turn / 2 * rows_a_turn;
    const int64_t stride = of_pair(g.strides, values), head_stride = of_pair(g.head_strides, values);
    const int rows = static_cast<int>(g.rows - first < rows_a_turn ? g.rows - first : rows_a_turn);
    const Unit* const source = static_cast<const Unit*>(of_pair(g.sources, values));
    Unit* const out = static_cast<Unit*>(of_pair(g.outs, values)) + first * per_row;
#pragma unroll 4
    for (int i = static_cast<int>(threadIdx.x); i < rows * per_row; i += kPrefixThreads) {
      const int at = i % per_row, head = at / head_units;
      const Unit* const from = source + g.index[first + i / per_row] * stride + head * head_stride + at % head_units;
      if constexpr (sizeof(Unit) == 16) write_words<4>(out + i, read_streaming(from).word);
      else out[i] = *from;
    }
  }
}

template <class Unit>
__host__ inline int launch_gather(GatherKv g, void* stream) {
  const int64_t bytes = g.bytes, size = sizeof(Unit);
  g.head_dim = g.head_dim * bytes / size;
  for (int which = 0; which < 2; ++which) {
    g.strides[which] = g.strides[which] * bytes / size;
    g.head_strides[which] = g.head_strides[which] * bytes / size;
  }
  if (g.head_strides[0] == g.head_dim && g.head_strides[1] == g.head_dim) {
    g.head_dim *= g.heads;  // heads side by side are one
    g.heads = 1;
  }
  const int rows = rows_of_turn(g.heads * g.head_dim);
  RLKERNEL_LAUNCH((gather_kernel<Unit>), prefix_grid((g.rows + rows - 1) / rows * 2), kPrefixThreads, stream, g);
  return launch_error();
}

int gather_kv(const GatherKv& g, void* stream) {
  if (g.rows <= 0 || g.heads <= 0 || g.head_dim <= 0) return 0;
  bool vectors = g.head_dim * g.bytes % 16 == 0;
  for (int which = 0; which < 2; ++which)
    vectors = vectors && lies_on_16(g.sources[which], g.strides[which] * g.bytes, g.head_strides[which] * g.bytes) &&
              lies_on_16(g.outs[which], 0);
  if (vectors) return launch_gather<Bytes16>(g, stream);
  switch (g.bytes) {
    case 2: return launch_gather<uint16_t>(g, stream);
    case 4: return launch_gather<uint32_t>(g, stream);
    case 8: return launch_gather<uint64_t>(g, stream);
  }
  return kInvalidArguments;
}

}  // namespace rlkernel::RLKERNEL_DEVICE
