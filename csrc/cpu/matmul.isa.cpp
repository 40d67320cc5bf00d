// The matrix product whose bits depend on K alone: see arguments.h. Columns are dealt out to threads, and read in blocks: where
// they are if K is their inner dimension, else packed. Each block is multiplied by strips of rows, one after the other.
#include <algorithm>
#include <cstdlib>
#include <exception>
#include <memory>
#include <new>

#include <omp.h>

#include "matmul/few_rows.h"
#include "matmul/strip.h"

#if defined(__AVX512BF16__)
namespace rlkernel::cpu::avx512 {
int matmul(const Matmul& x);
}
#endif

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 17;       // multiplications from which threads pay
constexpr int64_t kTasks = 4;                // of a thread, where there are columns enough
constexpr int64_t kKeptBytes = 1 << 20;      // of packed rows that stay for all columns of a task
constexpr int64_t kBlockBytes = 1 << 20;     // of a block of columns, to which the rows are packed anew: in L2
constexpr int64_t kSmallBlockBytes = 1 << 18;  // of one where the rows are kept
// Strips of rows up to which columns that are dense along K are read where they are: with 32 registers there are as many rows
// to a column as hide what it costs to read.
constexpr int64_t kStripsInPlace = kChains > 1 ? INT64_MAX : 32;
constexpr int64_t kLeastColumns = 96, kMostColumns = 768;  // of a block where the rows are packed for each

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
  bool few;       // rows by columns that are neither packed nor dense along K
  bool pack;      // the columns, to panels of fp32
  bool keep;      // the rows of a task are packed once, not for each block of columns
  int64_t rows;   // of a strip
  int64_t block;  // columns that are packed at a time, or read at a time by strip after strip
  int64_t task_columns, task_rows;

  Plan(const Matmul& x, int64_t element, int64_t threads) {
    const int64_t strips = std::max<int64_t>((x.M + kMostRows - 1) / kMostRows, 1), bytes = std::max<int64_t>(x.K, 1) * element;
    // The first strip waits for memory and is as wide as it can be; what would leave one register to the last is cut evenly.
    const bool full = strips > 1 && (x.M - 1) % kMostRows >= kChains;
    rows = full ? kMostRows : round_up((x.M + strips - 1) / strips, kChains);
    // to pack pairs of bf16, and to multiply them, takes half as long: it pays from half as many rows on
    few = x.b.step != 1 && x.b.row == 1 && x.M <= std::min<int64_t>(kFewRows * element / 4, kMostRows);
    pack = !few && (x.b.step != 1 || strips > kStripsInPlace);
    keep = strips * rows * bytes <= kKeptBytes;
    block = keep ? std::clamp<int64_t>(kSmallBlockBytes / bytes, 16, kMostColumns)
                 : std::clamp(kBlockBytes / bytes, kLeastColumns, kMostColumns);
    block = few ? kFewColumns : block / kColumns * kColumns;
    const int64_t blocks = (x.N + block - 1) / block;
    // as many tasks as keep all threads busy to the end, of columns first: each packs its own
    int64_t tasks = keep ? std::min(x.batch == 1 ? threads * kTasks : 1, std::max<int64_t>(x.N / 16, 1)) : blocks;
    if (x.batch == 1 && !keep) tasks = std::min(round_up(tasks, threads), std::max<int64_t>(x.N / 16, 1));
    if (threads == 1 && keep) tasks = 1;
    task_columns = round_up((x.N + tasks - 1) / tasks, kColumns);
    block = std::min(block, task_columns);
    const int64_t wanted = x.batch * tasks >= threads ? 1 : std::min(strips, (threads + tasks - 1) / tasks);
    task_rows = round_up((x.M + wanted - 1) / wanted, rows);
  }
};

template <class Order, class T>
void store_rows(const Matmul& x, int64_t z, int64_t m, int64_t rows, int64_t n, int64_t columns, const float* results,
                int64_t stride) {
  for (int64_t r = 0; r < rows; ++r) {
    T* out = static_cast<T*>(x.out) + (z * x.M + m + r) * x.N + n;
    const auto value = [&](int64_t i, int count) {
      const Floats sum = load_part(results + r * stride + i, count);
      return x.bias == nullptr ? sum : sum + load_part(x.bias + n + i, count);
    };
    int64_t i = 0;
    for (; i + kWidth <= columns; i += kWidth) Order::store(out + i, value(i, kWidth));
    if (i < columns) store_part(out + i, value(i, static_cast<int>(columns - i)), static_cast<int>(columns - i));
  }
}

struct Task {
  int64_t z, m0, m1, n0, n1;
};

// Whether columns of T may be those of an operand, where it is; panels hold fp32.
template <class Order, class T>
constexpr bool kInPlace = std::is_same_v<Order, Singles> || std::is_same_v<T, bf16>;

// The rows of a task by a block of its columns.
template <class Order, class T>
void run_block(const Matmul& x, const Plan& plan, const Task& task, int64_t n, const Columns<T>& b, float* a, Strip strip) {
  const int64_t panel = plan.rows * strip.groups * Order::kParts * kLanes;
  for (int64_t m = task.m0; m < task.m1; m += plan.rows) {
    const int64_t rows = std::min(plan.rows, task.m1 - m), wide = round_up(rows, kChains);
    strip.a = plan.keep ? a + (m - task.m0) / plan.rows * panel : a;
    const Panels<Order> packed{const_cast<float*>(strip.a), wide, strip.groups};
    if (!plan.keep || n == task.n0) pack(x.a, task.z, m, m + rows, x.K, packed);
    const int registers = static_cast<int>(wide / kChains);
    bool run = false;
    if constexpr (kInPlace<Order, T>)
      if (run = !plan.pack && m == task.m0; run) run_strip<Order, true>(registers, strip, b);  // the first, which waits for memory
    if (!run) run_strip<Order, false>(registers, strip, b);
    with_type(x.out_dtype, [&](auto t) { store_rows<Order, decltype(t)>(x, task.z, m, rows, n, b.count, strip.results, strip.stride); });
  }
}

template <class Order>
void run_task(const Matmul& x, const Plan& plan, const Task& task) {
  [[maybe_unused]] const typename Order::Numbers numbers{};
  static thread_local Scratch scratch;
  const int64_t wide = round_up(plan.block, std::max<int64_t>(kColumns, kWidth)), groups = groups_of<Order>(x.K);
  const int64_t strips = plan.keep ? (task.m1 - task.m0 + plan.rows - 1) / plan.rows : 1;
  const int64_t held = plan.pack ? groups : 1;  // packed groups of the columns: all, or the last where K breaks it
  const int64_t lanes = plan.rows * wide * kLanes;
  const int64_t sizes[] = {strips * plan.rows * groups * Order::kParts * kLanes, lanes, plan.rows * wide,
                           wide * held * Order::kParts * kLanes};
  int64_t bytes = 0;
  for (const int64_t size : sizes) bytes += Scratch::bytes_of<float>(size);
  scratch.reserve(bytes);
  float* a = scratch.take<float>(sizes[0]);
  Register* state = reinterpret_cast<Register*>(scratch.take<float>(sizes[1]));
  const Strip strip{a, groups, state, scratch.take<float>(sizes[2]), wide};
  const Panels<Order> panels{scratch.take<float>(sizes[3]), kColumns, held};
  const Panels<Order> rows{a, plan.rows, groups};
  if (plan.few) pack(x.a, task.z, task.m0, task.m1, x.K, rows);
  for (int64_t n = task.n0; n < task.n1; n += plan.block) {
    const int64_t count = std::min(plan.block, task.n1 - n);
    if (plan.few) {
      const int64_t m = task.m1 - task.m0;
      with_operand<Order>(x.b.dtype, [&](auto t) {
        const auto columns = rows_of<decltype(t)>(x.b, task.z, n, n + count, x.K);
        run_few_rows(rows, columns, m, reinterpret_cast<float*>(state), strip.results, wide);
      });
      with_type(x.out_dtype, [&](auto t) { store_rows<Order, decltype(t)>(x, task.z, task.m0, m, n, count, strip.results, wide); });
      continue;
    }
    if (plan.pack) {
      pack(x.b, task.z, n, n + count, x.K, panels);
      const Columns<float> b{panels.first, kLanes, panels.group(), groups * panels.group(), count, nullptr};
      run_block<Order>(x, plan, task, n, b, a, strip);
      continue;
    }
    with_operand<Order>(x.b.dtype, [&](auto t) {
      using T = decltype(t);
      const Rows<T> columns = rows_of<T>(x.b, task.z, n, n + count, x.K);
      const int64_t whole = x.K / Order::kDepth * Order::kDepth;
      if (whole < x.K) pack(Rows<T>{columns.first + whole, columns.row, 1, count, x.K - whole}, panels);
      const float* rest = whole < x.K ? panels.first : nullptr;
      const Columns<T> b{columns.first, columns.row, Order::kDepth, kColumns * columns.row, count, rest};
      run_block<Order>(x, plan, task, n, b, a, strip);
    });
  }
}

}  // namespace

int matmul(const Matmul& x) {
#if defined(__AVX512BF16__)
  if (!takes_pairs(x)) return avx512::matmul(x);  // what it compiles is the same, and is compiled once
#endif
  if (x.batch == 0 || x.M == 0 || x.N == 0) return 0;
  const bool parallel = x.M * x.N * x.K >= kParallel / x.batch;
  int64_t element = 4;
  with_order(x, [&](auto order) { element = order.kParts * kLanes * 4 / order.kDepth; });
  const Plan plan(x, element, parallel ? omp_get_max_threads() : 1);
  const int64_t across = (x.N + plan.task_columns - 1) / plan.task_columns, down = (x.M + plan.task_rows - 1) / plan.task_rows;
  const int64_t tasks = x.batch * across * down;
  std::exception_ptr failure;  // out of memory, which must not leave the threads
#pragma omp parallel for schedule(dynamic, 1) if (parallel && tasks > 1)
  for (int64_t i = 0; i < tasks; ++i) {
    const int64_t m = i / across % down * plan.task_rows, n = i % across * plan.task_columns;
    try {
      const Task task{i / across / down, m, std::min(m + plan.task_rows, x.M), n, std::min(n + plan.task_columns, x.N)};
      with_order(x, [&](auto order) { run_task<decltype(order)>(x, plan, task); });
    } catch (...) {
#pragma omp critical
      failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
