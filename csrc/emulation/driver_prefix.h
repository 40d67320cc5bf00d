// The kernels around shared prefixes for driver.cpp: every array is a heap block of exactly its size.
#pragma once
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "rlkernel/prefix_shared_attention/arguments.h"
#include "rlkernel/vec.cuh"

namespace prefix {

using namespace rlkernel;
using emulated::from_float;
using emulated::to_float;

// Rows that start `offset` elements behind a boundary of 16 bytes, so that vectors and single elements both come up.
template <class T>
struct Rows {
  Rows(int64_t size, int64_t offset, std::mt19937_64& random) : data(new T[size + offset]), first(data.get() + offset) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < size + offset; ++i) data[i] = from_float<T>(normal(random));
  }
  T& operator[](int64_t i) const { return first[i]; }

  std::unique_ptr<T[]> data;
  T* first;
};

inline bool near(double got, double want) { return std::fabs(got - want) <= 0.02 + 0.01 * std::fabs(want); }

template <class T>
constexpr Dtype kType = sizeof(T) == 4 ? Dtype::f32 : emulated::kIsBf16<T> ? Dtype::bf16 : Dtype::f16;

template <class T>
bool merge(int64_t rows, int64_t heads, int64_t head_dim, int64_t offset, std::mt19937_64& random) {
  const int64_t width = heads * head_dim;
  const Rows<T> out(rows * width, offset, random), part(rows * width, offset, random);
  const Rows<float> lse(heads * rows, 0, random), part_lse(heads * rows, 0, random), sinks(heads, 0, random);
  std::vector<double> want(rows * width);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < width; ++i) {
      const int64_t h = i / head_dim;
      const double a = std::exp(lse[h * rows + r]), b = std::exp(part_lse[h * rows + r]), c = std::exp(sinks[h]);
      want[r * width + i] = (a * to_float(out[r * width + i]) + b * to_float(part[r * width + i])) / (a + b + c);
    }
  emulated::attention_merge({out.first, kType<T>, width, head_dim, lse.first, rows, part.first, width, head_dim,
                             part_lse.first, rows, sinks.first, rows, heads, head_dim}, nullptr);
  bool right = true;
  for (int64_t i = 0; i < rows * width; ++i) right &= near(to_float(out[i]), want[i]);
  return right;
}

// Gathers rows, and sums what was gathered back: each row times the number of its copies.
template <class T>
bool gather_and_reduce(int64_t rows, int64_t heads, int64_t head_dim, int64_t offset, std::mt19937_64& random) {
  const int64_t width = heads * head_dim, copies = 3, keys = rows * copies;
  const Rows<T> k(rows * width, offset, random), v(rows * width, offset, random);
  const Rows<T> all_k(keys * width, offset, random), all_v(keys * width, offset, random);
  const Rows<float> sum_k(rows * width, 0, random), sum_v(rows * width, 0, random);
  const std::unique_ptr<int64_t[]> index(new int64_t[keys]), back(new int64_t[keys]), offsets(new int64_t[rows + 1]);
  for (int64_t i = 0; i < keys; ++i) index[i] = i % rows, back[i] = i / copies + i % copies * rows;
  for (int64_t r = 0; r <= rows; ++r) offsets[r] = r * copies;
  emulated::gather_kv({{k.first, v.first}, sizeof(T), {width, width}, {head_dim, head_dim}, index.get(), keys, heads,
                       head_dim, {all_k.first, all_v.first}}, nullptr);
  emulated::segment_reduce({{all_k.first, all_v.first}, kType<T>, {width, width}, back.get(), offsets.get(), rows,
                            width, {sum_k.first, sum_v.first}, Dtype::f32, {width, width}}, nullptr);
  bool right = true;
  for (int64_t i = 0; i < rows * width; ++i)
    right &= sum_k[i] == copies * to_float(k[i]) && sum_v[i] == copies * to_float(v[i]);
  return right;
}

template <class T>
bool run_type(std::mt19937_64& random) {
  bool right = true;
  for (const int64_t rows : {1, 70})
    for (const int64_t head_dim : {8, 5, 64})
      for (const int64_t offset : {0, 1}) {
        const bool found = merge<T>(rows, 3, head_dim, offset, random) & gather_and_reduce<T>(rows, 2, head_dim, offset, random);
        if (!found) std::printf("wrong: prefix, rows %ld head_dim %ld offset %ld\n", long(rows), long(head_dim), long(offset));
        right &= found;
      }
  return right;
}

inline bool run_all(uint64_t seed) {
  std::mt19937_64 random(seed);
  return run_type<float>(random) & run_type<emulated::f16>(random) & run_type<emulated::bf16>(random);
}

}  // namespace prefix
