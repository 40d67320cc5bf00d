// Keys and values of a tile as the products want them: keys across vectors, each in fp32. What an item does not have is
// never read and stands as 0.
#pragma once

#include "../shuffles.h"
#include "rlkernel/paged_prefix_attention/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int kTile = kPagedTile;
constexpr int64_t kLine = 16;  // floats that rows of values are padded to

inline int64_t padded(int64_t n) { return (n + kLine - 1) / kLine * kLine; }

// Where the keys [from, to) of a tile lie.
struct Places {
  int from, to;
  int64_t block[kTile], token[kTile];

  bool has(int first, int end) const { return from <= first && end <= to; }
  // Null where there is none.
  template <class T>
  const T* row(const T* head, const int64_t* strides, int key) const {
    return has(key, key + 1) ? head + block[key] * strides[0] + token[key] * strides[1] : nullptr;
  }
  // Whether keys first to first + count, which there are, lie one behind the other in a block.
  bool is_run(int first, int count) const { return token[first] + count - 1 == token[first + count - 1]; }
};

// Lane l of v[i] and lane i of v[l] change places.
template <int kStep = 1>
inline void transpose(Floats (&v)[kWidth]) {
  if constexpr (kStep < kWidth) {
    for (int i = 0; i < kWidth; ++i)
      if ((i & kStep) == 0) {
        const Floats a = v[i], b = v[i | kStep];
        v[i] = AllLanes::low<kStep>(a, b);
        v[i | kStep] = AllLanes::high<kStep>(a, b);
      }
    transpose<2 * kStep>(v);
  }
}

// `count` elements that stand `step` apart, or a vector of them; 0 behind the last.
template <class T>
inline Floats load_up_to(const T* p, int64_t step, int64_t count) {
  if (step == 1) return count >= kWidth ? load(p) : load_part(p, static_cast<int>(count));
  T each[kWidth] = {};
  for (int i = 0; i < kWidth && i < count; ++i) each[i] = p[i * step];
  return load(each);
}

// tile[d][key] of those of the keys first to first + kWidth that there are, one at least. What the next tile has there is asked for meanwhile: heads stand apart in
// the cache, which no processor foresees.
template <class T>
void load_keys(const T* head, const int64_t* strides, int64_t dim, const Places& at, const Places& next, int first, float* tile) {
  const int64_t step = strides[3];
  const int count = at.to - first < kWidth ? at.to - first : kWidth;
  if (strides[1] == 1 && at.from <= first && at.is_run(first, count)) {
    const T* const from = head + at.block[first] * strides[0] + at.token[first];
    const T* const ahead = next.has(first, first + 1) ? head + next.block[first] * strides[0] + next.token[first] : from;
    for (int64_t d = 0; d < dim; ++d) {
      prefetch(ahead + d * step);
      store(tile + d * kTile + first, load_up_to(from + d * step, 1, count));
    }
    return;
  }
  const T *key[kWidth], *ahead[kWidth];
  for (int i = 0; i < kWidth; ++i) {
    key[i] = at.row(head, strides, first + i);
    ahead[i] = next.row(head, strides, first + i);
  }
  const Floats zero = {};
  for (int64_t d = 0; d < dim; d += kWidth) {
    Floats x[kWidth];
    for (int i = 0; i < kWidth; ++i) {
      if (ahead[i] != nullptr) prefetch(ahead[i] + d * step);
      x[i] = key[i] == nullptr ? zero : load_up_to(key[i] + d * step, step, dim - d);
    }
    transpose(x);
    for (int i = 0; i < kWidth && d + i < dim; ++i) store(tile + (d + i) * kTile + first, x[i]);
  }
}

// Rows of values in fp32, each of the keys that a tile has, and where those of the next tile can be asked for.
struct Values {
  const float* row[kTile];
  const float* ahead[kTile];
};

// Copied to `tile`, or, where they are wanted `once` and can be read as they are, left in the cache.
template <class T>
void load_values(const T* head, const int64_t* strides, int64_t dim, const Places& at, const Places& next, bool once, float* tile,
                 Values& out) {
  const int64_t step = strides[3], width = padded(dim);
  for (int j = at.from; j < at.to; ++j) {
    const T *const from = at.row(head, strides, j), *const there = next.row(head, strides, j), *const ahead = there ? there : from;
    if constexpr (sizeof(T) == sizeof(float))
      if (once && step == 1 && dim == width) {
        out.row[j] = from;
        out.ahead[j] = ahead;
        continue;
      }
    float* const to = tile + j * width;
    out.row[j] = out.ahead[j] = to;
    for (int64_t d = 0; d < dim; d += kWidth) {
      prefetch(ahead + d * step);
      store(to + d, load_up_to(from + d * step, step, dim - d));
    }
  }
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
