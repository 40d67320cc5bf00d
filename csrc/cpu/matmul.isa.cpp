// The matrix product whose bits depend on K alone: see arguments.h. Blocks of columns are dealt out to threads; each is read in
// place where K is its inner dimension, or packed where that pays, and is multiplied by strips of rows, one after the other.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>

#include <omp.h>

#include "matmul/strip.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 17;      // multiplications from which threads pay
constexpr int64_t kPackedBytes = 1 << 20;   // of a block of columns: in L2
constexpr int64_t kLeastColumns = 96, kMostColumns = 384;  // of such a block: each strip of `a` is packed for every block

int64_t round_up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }

// Memory of a thread, which stays: fresh pages for every call would cost as much as a small product.
class Scratch {
 public:
  // `bytes`, of which every part starts at a cache line.
  void reserve(int64_t bytes) {
    if (bytes > size_) {
      memory_.reset(static_cast<char*>(std::aligned_alloc(kLine, round_up(bytes, kLine))));
      size_ = memory_ == nullptr ? 0 : bytes;
      if (memory_ == nullptr) throw std::bad_alloc();
    }
    used_ = 0;
  }

  template <class T>
  T* take(int64_t count) {
    char* part = memory_.get() + used_;
    used_ += bytes_of<T>(count);
    return reinterpret_cast<T*>(part);
  }

  template <class T>
  static int64_t bytes_of(int64_t count) { return round_up(count * sizeof(T), kLine); }

 private:
  static constexpr int64_t kLine = 64;
  struct Free {
    void operator()(char* p) const { std::free(p); }
  };
  std::unique_ptr<char, Free> memory_;
  int64_t size_ = 0, used_ = 0;
};

// How the product is cut, which decides no bit.
struct Plan {
  bool pack;           // the columns, to panels of fp32
  int64_t rows;        // of a strip
  int64_t columns;     // of a block
  int64_t row_blocks, rows_of_block;

  Plan(const Matmul& x, int64_t threads) {
    const int64_t strips = std::max<int64_t>((x.M + kMostRows - 1) / kMostRows, 1);
    rows = round_up((x.M + strips - 1) / strips, kChains);
    pack = x.b.step != 1 || strips >= (x.b.dtype == Dtype::f32 ? 4 : 2);
    const int64_t fitting = kPackedBytes / 4 / std::max<int64_t>(x.K, 1);
    columns = std::min(std::max(fitting, kLeastColumns), kMostColumns);
    int64_t blocks = (x.N + columns - 1) / columns;
    if (x.batch == 1) blocks = std::min(round_up(blocks, threads), std::max<int64_t>(x.N / 16, 1));
    columns = round_up((x.N + blocks - 1) / blocks, kColumns);
    // too few columns for all threads: the rows are shared out too
    const int64_t tasks = x.batch * blocks;
    row_blocks = tasks >= threads ? 1 : std::min(strips, (threads + tasks - 1) / tasks);
    rows_of_block = round_up((x.M + row_blocks - 1) / row_blocks, rows);
  }
};

template <class T>
void store_rows(const Matmul& x, int64_t z, int64_t m, int64_t rows, int64_t n, int64_t columns, const float* results, int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(x.out) + (z * x.M + m + r) * x.N + n;
    const auto value = [&](int64_t i, int count) {
      const Floats sum = load_part(results + r * stride + i, count);
      return x.bias == nullptr ? sum : sum + load_part(x.bias + n + i, count);
    };
    int64_t i = 0;
    for (; i + kWidth <= columns; i += kWidth) store(out + i, value(i, kWidth));
    if (i < columns) store_part(out + i, value(i, static_cast<int>(columns - i)), static_cast<int>(columns - i));
  }
}

// Rows m0 to m1 of a block of columns.
template <class T>
void run_block(const Matmul& x, const Plan& plan, int64_t z, int64_t m0, int64_t m1, int64_t n, const Columns<T>& b, Panels a,
               Strip strip) {
  for (int64_t m = m0; m < m1; m += plan.rows) {
    const int64_t rows = std::min(plan.rows, m1 - m);
    a.wide = round_up(rows, kChains);
    pack(x.a, z, m, m + rows, x.K, a);
    run_strip(static_cast<int>(a.wide / kChains), strip, b);
    with_type(x.out_dtype, [&](auto t) { store_rows<decltype(t)>(x, z, m, rows, n, b.count, strip.results, strip.stride); });
  }
}

void run_task(const Matmul& x, const Plan& plan, int64_t z, int64_t m0, int64_t m1, int64_t n) {
  static thread_local Scratch scratch;
  const int64_t count = std::min(plan.columns, x.N - n), wide = round_up(count, kColumns), groups = groups_of(x.K);
  const int64_t held = plan.pack ? groups : 1;  // packed groups of the columns: all, or the last where K breaks it
  scratch.reserve(Scratch::bytes_of<float>(kMostRows * groups * kLanes) + Scratch::bytes_of<float>(kMostRows * wide * kLanes) +
                  Scratch::bytes_of<float>(kMostRows * wide) + Scratch::bytes_of<float>(wide * held * kLanes));
  const Panels a{scratch.take<float>(kMostRows * groups * kLanes), 0, groups};
  Register* state = reinterpret_cast<Register*>(scratch.take<float>(kMostRows * wide * kLanes));
  const Strip strip{a.first, groups, state, scratch.take<float>(kMostRows * wide), wide};
  const Panels panels{scratch.take<float>(wide * held * kLanes), kColumns, held};
  if (plan.pack) {
    pack(x.b, z, n, n + count, x.K, panels);
    const Columns<float> b{panels.first, kLanes, kColumns * kLanes, groups * kColumns * kLanes, count, nullptr};
    return run_block(x, plan, z, m0, m1, n, b, a, strip);
  }
  with_type(x.b.dtype, [&](auto t) {
    const auto rows = rows_of<decltype(t)>(x.b, z, n, n + count, x.K);
    const int64_t whole = x.K / kLanes * kLanes;
    if (whole < x.K) pack(Rows<decltype(t)>{rows.first + whole, rows.row, 1, count, x.K - whole}, panels);
    const Columns<decltype(t)> b{rows.first, rows.row, kLanes, kColumns * rows.row, count, whole < x.K ? panels.first : nullptr};
    run_block(x, plan, z, m0, m1, n, b, a, strip);
  });
}

}  // namespace

int matmul(const Matmul& x) {
  if (x.batch == 0 || x.M == 0 || x.N == 0) return 0;
  const bool parallel = x.M * x.N * x.K >= kParallel / x.batch;
  const Plan plan(x, parallel ? omp_get_max_threads() : 1);
  const int64_t blocks = (x.N + plan.columns - 1) / plan.columns, tasks = x.batch * blocks * plan.row_blocks;
  std::exception_ptr failure;  // out of memory, which must not leave the threads
#pragma omp parallel for schedule(dynamic, 1) if (parallel && tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t block = task % blocks, row_block = task / blocks % plan.row_blocks, z = task / blocks / plan.row_blocks;
    const int64_t m0 = row_block * plan.rows_of_block, m1 = std::min(m0 + plan.rows_of_block, x.M);
    try {
      if (m0 < m1) run_task(x, plan, z, m0, m1, block * plan.columns);
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
