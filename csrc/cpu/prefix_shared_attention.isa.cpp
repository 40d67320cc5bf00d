// Around attention over shared prefixes: merge of partial attentions, gather of keys and values, their gradients' sums.
#include "rlkernel/prefix_shared_attention/arguments.h"
#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // elements from which waking the other threads pays
constexpr int64_t kMergeRows = 4 * kWidth, kReduceRows = 16, kGatherRows = 16;  // of a thread's turn

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

struct Weights {
  Floats out, part, lse;
};

inline Floats without_empty(Floats lse) {
  const Floats none = broadcast(-__builtin_inff());
  return lse == broadcast(__builtin_inff()) ? none : lse;
}

// Of kWidth rows of a head. `exp_of` is exp; NaN in a or b comes out everywhere.
inline Weights weigh(Floats a, Floats b, Floats sink, const ScaledExp& exp_of) {
  const Floats zero = {}, none = broadcast(-__builtin_inff());
  Floats top = max(max(a, b), sink);
  top = top == none ? zero : top;  // then every x - top is -inf
  // the difference is 0 where both are +inf: a sink that takes all
  const auto share = [&](Floats x) { return exp_of(exp_of.cut(x == top ? zero : x - top)); };
  const Floats ea = share(a), eb = share(b), sum = ea + eb + share(sink);
  const Floats inverse = sum == zero ? zero : broadcast(1.0f) / sum;
  return {ea * inverse, eb * inverse, top + log(sum)};
}

template <class T>
inline void mix(T* out, const T* part, float weight, float part_weight, int64_t n) {
  const Floats zero = {}, w = broadcast(weight), u = broadcast(part_weight);
  const bool has = weight != 0, part_has = part != nullptr && part_weight != 0;  // 0 * inf would be NaN
  for (int64_t i = 0; i < n; i += kWidth) {
    const int count = static_cast<int>(smaller(kWidth, n - i));
    const bool whole = count == kWidth;
    const auto read = [&](const T* p) { return whole ? load(p + i) : load_part(p + i, count); };
    Floats x = has ? w * read(out) : zero;
    if (part_has) x = fma(u, read(part), x);
    if (whole) store(out + i, x);
    else store_part(out + i, x, count);
  }
}

template <class T>
void merge_rows(const AttentionMerge& m, int64_t head, int64_t first, int64_t end) {
  const ScaledExp exp_of(1.0);
  const Floats none = broadcast(-__builtin_inff());
  float* const lse = m.lse + head * m.lse_stride;
  T* const out = static_cast<T*>(m.out) + head * m.out_head_stride;
  const float* const part_lse = m.part != nullptr ? m.part_lse + head * m.part_lse_stride : nullptr;
  const T* const part = m.part != nullptr ? static_cast<const T*>(m.part) + head * m.part_head_stride : nullptr;
  const Floats sink = m.sinks != nullptr ? broadcast(m.sinks[head]) : none;
  for (int64_t row = first; row < end; row += kWidth) {
    const int count = static_cast<int>(smaller(kWidth, end - row));
    const Floats a = without_empty(load_part(lse + row, count));
    const Floats b = part != nullptr ? without_empty(load_part(part_lse + row, count)) : none;
    const Weights w = weigh(a, b, sink, exp_of);
    store_part(lse + row, w.lse, count);
    for (int i = 0; i < count; ++i)
      mix(out + (row + i) * m.out_stride, part != nullptr ? part + (row + i) * m.part_stride : nullptr, w.out[i], w.part[i],
          m.head_dim);
  }
}

// The sums of one row, kept in registers over its sources.
template <class T, class Out>
void reduce_row(const SegmentReduce& s, int which, int64_t row) {
  constexpr int kVectors = 4;
  const T* const source = static_cast<const T*>(s.sources[which]);
  Out* const out = static_cast<Out*>(s.outs[which]) + row * s.out_strides[which];
  const int64_t first = s.offsets[row], end = s.offsets[row + 1], stride = s.source_strides[which];
  int64_t at = 0;
  for (; at + kVectors * kWidth <= s.width; at += kVectors * kWidth) {
    Floats sum[kVectors] = {};
    for (int64_t i = first; i < end; ++i)
      for (int v = 0; v < kVectors; ++v) sum[v] += load(source + s.index[i] * stride + at + v * kWidth);
    for (int v = 0; v < kVectors; ++v) store(out + at + v * kWidth, sum[v]);
  }
  for (; at < s.width; at += kWidth) {
    const int count = static_cast<int>(smaller(kWidth, s.width - at));
    Floats sum = {};
    for (int64_t i = first; i < end; ++i) sum += load_part(source + s.index[i] * stride + at, count);
    store_part(out + at, sum, count);
  }
}

template <class T, class Out>
void reduce(const SegmentReduce& s) {
#pragma omp parallel for schedule(static, kReduceRows) collapse(2) if (s.rows * s.width >= kParallel)
  for (int which = 0; which < 2; ++which)
    for (int64_t row = 0; row < s.rows; ++row) reduce_row<T, Out>(s, which, row);
}

}  // namespace

int attention_merge(const AttentionMerge& m) {
  if (m.rows <= 0) return 0;
  const int64_t tiles = (m.rows + kMergeRows - 1) / kMergeRows;
  int error = 1;  // of a dtype that there is none of
  with_type(m.dtype, [&](auto element) {
    using T = decltype(element);
#pragma omp parallel for schedule(static) collapse(2) if (m.rows * m.heads * m.head_dim >= kParallel)
    for (int64_t tile = 0; tile < tiles; ++tile)  // a thread's rows are all heads of consecutive ones
      for (int64_t head = 0; head < m.heads; ++head)
        merge_rows<T>(m, head, tile * kMergeRows, smaller(m.rows, (tile + 1) * kMergeRows));
    error = 0;
  });
  return error;
}

int segment_reduce(const SegmentReduce& s) {
  if (s.out_dtype != Dtype::f32 && s.out_dtype != s.dtype) return 1;
  int error = 1;  // of a dtype that there is none of
  with_type(s.dtype, [&](auto element) {
    using T = decltype(element);
    if (s.out_dtype == s.dtype) reduce<T, T>(s);
    else reduce<T, float>(s);
    error = 0;
  });
  return error;
}

int gather_kv(const GatherKv& g) {
  const bool dense[2] = {g.head_strides[0] == g.head_dim, g.head_strides[1] == g.head_dim};
  const int64_t head_bytes = g.head_dim * g.bytes, row_bytes = g.heads * head_bytes;
#pragma omp parallel for schedule(static, kGatherRows) collapse(2) if (g.rows * row_bytes >= 4 * kParallel)
  for (int which = 0; which < 2; ++which)
    for (int64_t row = 0; row < g.rows; ++row) {
      const char* const from = static_cast<const char*>(g.sources[which]) + g.index[row] * g.strides[which] * g.bytes;
      char* const to = static_cast<char*>(g.outs[which]) + row * row_bytes;
      if (dense[which]) std::memcpy(to, from, row_bytes);
      else
        for (int64_t h = 0; h < g.heads; ++h)
          std::memcpy(to + h * head_bytes, from + h * g.head_strides[which] * g.bytes, head_bytes);
    }
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
