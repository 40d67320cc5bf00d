// The two products of a tile for up to kRows rows of a softmax at a time, so that a vector that is loaded feeds as many
// multiply-adds. A number is one chain of them, over the elements of a head or over keys, in their order: its bits follow
// from neither the block nor the width of vectors.
#pragma once

#include "tiles.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int kRows = 6;
constexpr int kChain = 8;

// Vectors of a row in registers, of which AVX-512 has twice as many.
constexpr int vectors_of(int rows) { return kWidth == 16 || rows <= 2 ? 4 : 2; }

// s[r][key] = sum over d of query[d][r] * tile[d][key] of the keys [low, high), and of what lies beside them: chains of kChain
// products each, added one after the other, which loses less than one long chain would.
template <int R>
void multiply_keys(const float* query, const float* tile, int64_t dim, int low, int high, float (*s)[kTile]) {
  constexpr int V = kWidth == 16 ? 2 : vectors_of(R);  // as many registers again hold what the chains have given
  constexpr int kKeys = V * kWidth;
  for (int first = low / kKeys * kKeys; first < high; first += kKeys) {
    const float *q = query, *k = tile + first;
    Floats total[R][V];
    for (int64_t begin = 0; begin < dim; begin += kChain) {
      Floats sum[R][V] = {};
      const float* const end = query + (begin + kChain < dim ? begin + kChain : dim) * R;
      for (; q < end; q += R, k += kTile) {
        Floats key[V];
        for (int v = 0; v < V; ++v) key[v] = load(k + v * kWidth);
        for (int r = 0; r < R; ++r)
          for (int v = 0; v < V; ++v) sum[r][v] = fma(broadcast(q[r]), key[v], sum[r][v]);
      }
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) total[r][v] = begin == 0 ? sum[r][v] : total[r][v] + sum[r][v];
    }
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) store(s[r] + first + v * kWidth, total[r][v]);
  }
}

// Columns [column, column + V * kWidth) of sums[r] = shrink[r] * sums[r] + sum over keys [low, high) of p[r][key] * values[key]
// `kAhead`: the values of the next tile are asked for meanwhile.
template <int R, int V, bool kAhead>
void add_columns(const float (*p)[kTile], const float* shrink, const Values& values, int low, int high, float* const* sums,
                 int64_t column) {
  Floats sum[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sum[r][v] = load(sums[r] + column + v * kWidth) * broadcast(shrink[r]);
  for (int key = low; key < high; ++key) {
    const float* const row = values.row[key] + column;
    if constexpr (kAhead)
      for (int v = 0; v < V; ++v) prefetch(values.ahead[key] + column + v * kWidth);
    Floats value[V];
    for (int v = 0; v < V; ++v) value[v] = load(row + v * kWidth);
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) sum[r][v] = fma(broadcast(p[r][key]), value[v], sum[r][v]);
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums[r] + column + v * kWidth, sum[r][v]);
}

template <int R, bool kAhead>
void add_values(const float (*p)[kTile], const float* shrink, const Values& values, int low, int high, float* const* sums,
                int64_t dim) {
  constexpr int V = vectors_of(R);
  int64_t column = 0;
  for (; column + V * kWidth <= dim; column += V * kWidth) add_columns<R, V, kAhead>(p, shrink, values, low, high, sums, column);
  for (; column + kWidth <= dim; column += kWidth) add_columns<R, 1, kAhead>(p, shrink, values, low, high, sums, column);
  if (column == dim) return;
  // the rows of values are padded, a row's sums are not
  float rest[R][kWidth];
  float* at[R];
  const int count = static_cast<int>(dim - column);
  for (int r = 0; r < R; ++r) {
    store(rest[r], load_part(sums[r] + column, count));
    at[r] = rest[r] - column;
  }
  add_columns<R, 1, kAhead>(p, shrink, values, low, high, at, column);
  for (int r = 0; r < R; ++r) std::memcpy(sums[r] + column, rest[r], count * sizeof(float));
}

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
