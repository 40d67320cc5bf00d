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

template <class T>
inline Floats load_up_to(const T* p, int64_t count) {
  return count >= kWidth ? load(p) : load_part(p, static_cast<int>(count));
}

template <class T>
inline float one(const T* p) { return load_part(p, 1)[0]; }

// tile[d][key] of the keys first to first + kWidth.
template <class T>
void load_keys(const T* head, const int64_t* strides, int64_t dim, const Places& at, int first, float* tile) {
  const int64_t step = strides[3];
  if (strides[1] == 1 && at.has(first, first + kWidth) && at.is_run(first, kWidth)) {
    const T* from = head + at.block[first] * strides[0] + at.token[first];
    for (int64_t d = 0; d < dim; ++d) store(tile + d * kTile + first, load(from + d * step));
    return;
  }
  const T* key[kWidth] = {};
  for (int i = 0; i < kWidth; ++i)
    if (at.has(first + i, first + i + 1)) key[i] = head + at.block[first + i] * strides[0] + at.token[first + i] * strides[1];
  const Floats zero = {};
  if (step != 1) {
    for (int64_t d = 0; d < dim; ++d) {
      Floats x = zero;
      for (int i = 0; i < kWidth; ++i)
        if (key[i] != nullptr) x[i] = one(key[i] + d * step);
      store(tile + d * kTile + first, x);
    }
    return;
  }
  for (int64_t d = 0; d < dim; d += kWidth) {
    Floats x[kWidth];
    for (int i = 0; i < kWidth; ++i) x[i] = key[i] != nullptr ? load_up_to(key[i] + d, dim - d) : zero;
    transpose(x);
    for (int i = 0; i < kWidth && d + i < dim; ++i) store(tile + (d + i) * kTile + first, x[i]);
  }
}

// Asks for what the keys of a tile have in the cache: heads stand apart there, which no prefetcher of a processor follows.
template <class T>
void prefetch_rows(const T* head, const int64_t* strides, int64_t dim, const Places& at) {
  constexpr int64_t kStep = 64 / sizeof(T);
  if (strides[3] == 1) {
    for (int j = at.from; j < at.to; ++j) {
      const T* const row = head + at.block[j] * strides[0] + at.token[j] * strides[1];
      for (int64_t d = 0; d < dim; d += kStep) prefetch(row + d);
    }
  } else if (strides[1] == 1) {
    for (int j = at.from; j < at.to; ++j)
      if (j == at.from || at.token[j] == 0 || (j - at.from) % kStep == 0) {
        const T* const first = head + at.block[j] * strides[0] + at.token[j];
        for (int64_t d = 0; d < dim; ++d) prefetch(first + d * strides[3]);
      }
  }
}

// rows[key] of each key that there is: in the cache where it can be read as it is, else copied to `tile`.
template <class T>
void load_values(const T* head, const int64_t* strides, int64_t dim, const Places& at, float* tile, const float** rows) {
  const int64_t step = strides[3], width = padded(dim);
  for (int j = at.from; j < at.to; ++j) {
    const T* from = head + at.block[j] * strides[0] + at.token[j] * strides[1];
    if constexpr (sizeof(T) == sizeof(float))
      if (step == 1 && dim == width) {
        rows[j] = from;
        continue;
      }
    float* const to = tile + j * width;
    rows[j] = to;
    if (step == 1) {
      for (int64_t d = 0; d < dim; d += kWidth) store(to + d, load_up_to(from + d, dim - d));
    } else {
      for (int64_t d = 0; d < dim; ++d) to[d] = one(from + d * step);
      for (int64_t d = dim; d < width; ++d) to[d] = 0;
    }
  }
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
