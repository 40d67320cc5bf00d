// The backward pass of attention: see arguments.h. A thread takes a group's sequences with the query heads of one K/V head, and
// of them tiles of rows by tiles of keys, whose products are those of the forward pass.
//
// A number is a chain of multiply-adds over a tile, of what is seen alone, and the sum of such chains over tiles; for a key both
// run from the last row to the first. Its bits are those of any batch, any number of threads and any instruction set.
#define RLKERNEL_FUSED
#include "rlkernel/attention/arguments.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "paged_prefix_attention/products.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // products from which waking the other threads pays
constexpr int kLanes = 16, kVectors = kLanes / kWidth;

// f(integral_constant) of how many rows or keys stand in a block.
template <class F, int... R>
void with_count(int count, F f, std::integer_sequence<int, R...>) {
  (void)((count == R + 1 && (f(std::integral_constant<int, R + 1>()), true)) || ...);
}
template <class F>
void with_count(int count, F f) {
  with_count(count, f, std::make_integer_sequence<int, kRows>());
}

struct Range {
  int first, end;
};

struct alignas(64) Matrix {
  float at[kTile][kTile];
};

// to[j][i] = from[kTile - 1 - i][j]: what each row gives a key, from the last row on.
void turn_backwards(const Matrix& from, Matrix& to) {
  for (int i = 0; i < kTile; i += kWidth)
    for (int j = 0; j < kTile; j += kWidth) {
      Floats x[kWidth];
      for (int n = 0; n < kWidth; ++n) x[n] = load(from.at[kTile - 1 - i - n] + j);
      transpose(x);
      for (int n = 0; n < kWidth; ++n) store(to.at[j + n] + i, x[n]);
    }
}

// sums[r] = sum over seen[r] of weights[r][i] * values[i]: what all R see in one pass, what few see row by row before and behind.
template <int R>
void sum_seen(const float (*weights)[kTile], const Values& values, const Range* seen, float* const* sums, int64_t width) {
  alignas(64) constexpr float one[kRows] = {1, 1, 1, 1, 1, 1};
  static_assert(kRows == 6);
  Range all = seen[0];
  for (int r = 0; r < R; ++r) {
    std::memset(sums[r], 0, width * sizeof(float));
    all = {std::max(all.first, seen[r].first), std::min(all.end, seen[r].end)};
  }
  const bool together = all.first < all.end;
  const auto alone = [&](int r, int first, int end) {
    if (first < end) add_values<1, false>(weights + r, one, values, first, end, sums + r, width);
  };
  for (int r = 0; r < R; ++r) alone(r, seen[r].first, together ? all.first : seen[r].end);
  if (!together) return;
  add_values<R, false>(weights, one, values, all.first, all.end, sums, width);
  for (int r = 0; r < R; ++r) alone(r, all.end, seen[r].end);
}

// A row in fp32; of what it is padded to, what a vector reaches is 0.
template <class T>
void widen(const T* from, int64_t dim, float* to) {
  for (int64_t d = 0; d < dim; d += kWidth) store(to + d, load_up_to(from + d, 1, dim - d));
}

// The rows of a tile in fp32: one behind the other, padded, and block by block as [dim][row of the block].
struct Rows {
  float *dense, *across;
  int64_t dim, width;

  template <class T>
  void load_row(int i, const T* from) const { widen(from, dim, dense + i * width); }
  void clear_row(int i) const { std::memset(dense + i * width, 0, width * sizeof(float)); }
  void turn(int from, int to) const {
    for (int begin = from; begin < to; begin += kRows) {
      const int count = std::min(kRows, to - begin);
      float* const block = across + begin * dim;
      for (int r = 0; r < count; ++r)
        for (int64_t d = 0; d < dim; ++d) block[d * count + r] = dense[(begin + r) * width + d];
    }
  }
  Values backwards() const {
    Values found;
    for (int i = 0; i < kTile; ++i) found.row[i] = found.ahead[i] = dense + (kTile - 1 - i) * width;
    return found;
  }
};

// Of one query head: what a tile of rows has.
struct Head {
  Rows q, grad;
  float *lse, *delta, *dq;
  bool live, has_gradient[kTile];  // a row, and which of them: the others stand as 0, and with weights of 0
};

class Scratch {
 public:
  float *keys, *key_rows, *values, *sums, *out;
  Matrix *p, *ds, *p_turned, *ds_turned;
  std::unique_ptr<Head[]> heads;

  Scratch(int64_t dim, int64_t value_dim, int64_t members) : heads(new Head[members]) {
    const int64_t wide = padded(dim), value_wide = padded(value_dim);
    const int64_t head = kTile * (2 * wide + dim + value_wide + value_dim + 2), matrix = kTile * kTile;
    const int64_t shared = kTile * (dim + wide + value_dim + std::max(wide, value_wide)) + value_wide + 4 * matrix;
    memory_.reset(new float[shared + members * head + kLine]());
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    next_ = memory_.get() + (-address & (kLine * sizeof(float) - 1)) / sizeof(float);  // vectors that cross no line
    for (Matrix** x : {&p, &ds, &p_turned, &ds_turned}) *x = reinterpret_cast<Matrix*>(take(matrix));
    keys = take(kTile * dim);
    key_rows = take(kTile * wide);
    values = take(kTile * value_dim);
    sums = take(kTile * std::max(wide, value_wide));
    out = take(value_wide);
    for (int64_t i = 0; i < members; ++i) {
      heads[i].q = {take(kTile * wide), take(kTile * dim), dim, wide};
      heads[i].grad = {take(kTile * value_wide), take(kTile * value_dim), value_dim, value_wide};
      heads[i].dq = take(kTile * wide);
      heads[i].lse = take(kTile);
      heads[i].delta = take(kTile);
    }
  }

 private:
  float* take(int64_t count) {
    float* const part = next_;
    next_ += count;
    return part;
  }

  std::unique_ptr<float[]> memory_;
  float* next_;
};

// In kLanes lanes, whatever a vector holds, then halves of these.
inline float product_of(const float* x, const float* y, int64_t width) {
  Floats lanes[kVectors] = {};
  for (int64_t d = 0; d < width; d += kLanes)
    for (int v = 0; v < kVectors; ++v) lanes[v] = fma(load(x + d + v * kWidth), load(y + d + v * kWidth), lanes[v]);
  for (int half = kVectors / 2; half > 0; half /= 2)
    for (int v = 0; v < half; ++v) lanes[v] += lanes[v + half];
  return folded(lanes[0], [](Floats a, Floats b) { return a + b; });
}

template <class T>
class Backward {
 public:
  Backward(const AttentionBackward& a, const Scratch& scratch, int64_t request, int64_t kv_head)
      : a_(a), scratch_(scratch), kv_head_(kv_head), members_(a.heads / a.kv_heads), first_row_(a.rows[2 * request]),
        key_rows_(a.keys + a.key_offsets[request]), stop_(a.key_offsets[request + 1] - a.key_offsets[request]),
        start_(stop_ - (a.rows[2 * request + 1] - first_row_)), exp_of_(1.0),
        scale_(broadcast(static_cast<float>(a.scale))),
        inside_(broadcast(static_cast<float>(a.softcap != 0 ? a.scale / a.softcap : 0))),
        softcap_(broadcast(static_cast<float>(a.softcap))) {}

  void run() {
    const int64_t first = start_ / kTile * kTile;
    for (int64_t tile = first + (stop_ - 1 - first) / kTile * kTile; tile >= first; tile -= kTile) {
      if (!load_rows(tile)) continue;
      const int64_t back = a_.window != 0 ? std::max<int64_t>(tile + rows_.first + 1 - a_.window, 0) : 0;
      for (int64_t keys = back / kTile * kTile; keys <= tile; keys += kTile) {
        load_keys_of(keys);
        for (int64_t i = 0; i < members_; ++i)
          if (scratch_.heads[i].live) attend(scratch_.heads[i], tile, keys);
      }
      store_rows(tile);
    }
  }

 private:
  const T* row_of(const HeadRows& x, int64_t row, int64_t head) const {
    return static_cast<const T*>(x.first) + row * x.row + head * x.head_step;
  }

  // Whether a row of the tile has an upstream gradient.
  bool load_rows(int64_t tile) {
    rows_ = {static_cast<int>(std::max(start_, tile) - tile), static_cast<int>(std::min(tile + kTile, stop_) - tile)};
    bool any = false;
    for (int64_t member = 0; member < members_; ++member) {
      Head& head = scratch_.heads[member];
      const int64_t which = kv_head_ * members_ + member;
      head.live = false;
      for (int i = rows_.first; i < rows_.end; ++i) {
        const int64_t row = first_row_ + tile + i - start_;
        head.grad.load_row(i, row_of(a_.grad, row, which));
        const float* const grad = head.grad.dense + i * head.grad.width;
        const bool live = std::any_of(grad, grad + a_.value_dim, [](float x) { return x != 0; });
        head.has_gradient[i] = live;
        if (!live) {
          head.q.clear_row(i);
          continue;
        }
        head.live = true;
        head.lse[i] = a_.lse[which * a_.total + row];
        widen(row_of(a_.out, row, which), a_.value_dim, scratch_.out);
        head.delta[i] = product_of(grad, scratch_.out, head.grad.width);
        head.q.load_row(i, row_of(a_.q, row, which));
      }
      if (!head.live) continue;
      head.q.turn(rows_.first, rows_.end);
      head.grad.turn(rows_.first, rows_.end);
      std::memset(head.dq, 0, kTile * head.q.width * sizeof(float));
      any = true;
    }
    return any;
  }

  void load_keys_of(int64_t tile) {
    tile_ = {0, static_cast<int>(std::min(tile + kTile, stop_) - tile), {}, {}};
    const Places none = {0, 0, {}, {}};
    for (int j = 0; j < tile_.to; ++j) tile_.block[j] = key_rows_[tile + j];
    const auto load_across = [&](const HeadRows& x, int64_t dim, float* to) {
      const int64_t strides[4] = {x.row, 0, 0, 1};
      for (int j = 0; j < tile_.to; j += kWidth) load_keys(row_of(x, 0, kv_head_), strides, dim, tile_, none, j, to);
    };
    load_across(a_.k, a_.head_dim, scratch_.keys);
    load_across(a_.v, a_.value_dim, scratch_.values);
    const int64_t width = padded(a_.head_dim);
    for (int j = 0; j < tile_.to; ++j) {
      float* const row = scratch_.key_rows + j * width;
      widen(row_of(a_.k, tile_.block[j], kv_head_), a_.head_dim, row);
      key_values_.row[j] = key_values_.ahead[j] = row;
    }
  }

  // The keys of the tile that row i of the tile of rows sees, and the rows that see key j: those that there are.
  Range seen_by_row(int64_t ahead, int i) const {
    const int64_t at = ahead + i;  // its position, counted from the tile's first key
    const int first = static_cast<int>(a_.window != 0 ? std::clamp<int64_t>(at + 1 - a_.window, 0, kTile) : 0);
    return {first, static_cast<int>(std::clamp<int64_t>(at + 1, first, std::max(tile_.to, first)))};
  }
  Range seen_by_key(int64_t ahead, int j) const {
    const int first = static_cast<int>(std::clamp<int64_t>(j - ahead, rows_.first, kTile));
    const int64_t end = a_.window != 0 ? std::min<int64_t>(j - ahead + a_.window, rows_.end) : rows_.end;
    return {first, static_cast<int>(std::max<int64_t>(end, first))};
  }

  void attend(const Head& head, int64_t rows, int64_t keys) {
    const int64_t ahead = rows - keys;
    for (int begin = rows_.first; begin < rows_.end; begin += kRows)
      with_count(std::min(kRows, rows_.end - begin), [&](auto count) { weigh<count()>(head, begin, ahead); });
    turn_backwards(*scratch_.p, *scratch_.p_turned);
    turn_backwards(*scratch_.ds, *scratch_.ds_turned);
    give(a_.dk, *scratch_.ds_turned, head.q, ahead);
    give(a_.dv, *scratch_.p_turned, head.grad, ahead);
  }

  // The weights of R rows and their gradients, and what these give the rows.
  template <int R>
  void weigh(const Head& head, int begin, int64_t ahead) {
    float(*const p)[kTile] = scratch_.p->at + begin;
    float(*const ds)[kTile] = scratch_.ds->at + begin;
    multiply_keys<R>(head.q.across + begin * a_.head_dim, scratch_.keys, a_.head_dim, 0, tile_.to, p);
    multiply_keys<R>(head.grad.across + begin * a_.value_dim, scratch_.values, a_.value_dim, 0, tile_.to, ds);
    Range seen[R];
    float* sums[R];
    for (int r = 0; r < R; ++r) {
      seen[r] = {0, 0};
      sums[r] = scratch_.sums + r * head.q.width;
      if (!head.has_gradient[begin + r]) {
        std::memset(p[r], 0, sizeof p[r]);
        std::memset(ds[r], 0, sizeof ds[r]);
        continue;
      }
      seen[r] = seen_by_row(ahead, begin + r);
      const Floats lse = broadcast(head.lse[begin + r]), delta = broadcast(head.delta[begin + r]);
      for (int j = 0; j < tile_.to; j += kWidth) {
        Floats below = fma(load(p[r] + j), scale_, -lse), slope = scale_;
        if (a_.softcap != 0) {
          const Tanh tanh(load(p[r] + j) * inside_);
          below = fma(tanh.value, softcap_, -lse);
          slope = tanh.slope * scale_;
        }
        const Floats weight = exp_of_(exp_of_.cut(below));
        store(p[r] + j, weight);
        store(ds[r] + j, weight * (load(ds[r] + j) - delta) * slope);
      }
    }
    sum_seen<R>(ds, key_values_, seen, sums, head.q.width);
    float* const dq = head.dq + begin * head.q.width;
    for (int64_t d = 0; d < R * head.q.width; d += kWidth) store(dq + d, load(dq + d) + load(scratch_.sums + d));
  }

  // Adds to each key's gradient what the tile of rows gives it, from the last row on: the rows behind a key share themselves among
  // ever more keys, and what is small is added up before it meets what is large.
  void give(float* grads, const Matrix& weights, const Rows& rows, int64_t ahead) {
    const Values values = rows.backwards();
    for (int begin = 0; begin < tile_.to; begin += kRows)
      with_count(std::min(kRows, tile_.to - begin), [&](auto count) {
        constexpr int R = count();
        Range seen[R];
        float* sums[R];
        for (int r = 0; r < R; ++r) {
          const Range found = seen_by_key(ahead, begin + r);
          seen[r] = {kTile - found.end, kTile - found.first};
          sums[r] = scratch_.sums + r * rows.width;
        }
        sum_seen<R>(weights.at + begin, values, seen, sums, rows.width);
        for (int r = 0; r < R; ++r) add_to(grads + (tile_.block[begin + r] * a_.kv_heads + kv_head_) * rows.dim, sums[r], rows.dim);
      });
  }

  static void add_to(float* to, const float* x, int64_t dim) {
    int64_t d = 0;
    for (; d + kWidth <= dim; d += kWidth) store(to + d, load(to + d) + load(x + d));
    for (; d < dim; ++d) to[d] += x[d];
  }

  void store_rows(int64_t tile) const {
    for (int64_t member = 0; member < members_; ++member) {
      const Head& head = scratch_.heads[member];
      if (!head.live) continue;
      for (int i = rows_.first; i < rows_.end; ++i) {
        const int64_t row = first_row_ + tile + i - start_, which = kv_head_ * members_ + member;
        std::memcpy(a_.dq + (row * a_.heads + which) * a_.head_dim, head.dq + i * head.q.width, a_.head_dim * sizeof(float));
      }
    }
  }

  const AttentionBackward& a_;
  const Scratch& scratch_;
  const int64_t kv_head_, members_, first_row_;
  const int64_t* const key_rows_;
  const int64_t stop_, start_;  // the position behind the last row, and that of the first
  const ScaledExp exp_of_;
  const Floats scale_, inside_, softcap_;
  Range rows_;      // of the tile
  Places tile_;     // of keys
  Values key_values_;
};

template <class T>
void backward(const AttentionBackward& a) {
  int64_t work = 0;
  for (int64_t r = 0; r < a.group_offsets[a.groups]; ++r)
    work += (a.rows[2 * r + 1] - a.rows[2 * r]) * (a.key_offsets[r + 1] - a.key_offsets[r]);
#pragma omp parallel if (work * a.heads * a.head_dim >= kParallel)
  {
    const FlushDenormals flush;
    const Scratch scratch(a.head_dim, a.value_dim, a.heads / a.kv_heads);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < a.groups * a.kv_heads; ++i) {
      const int64_t group = i / a.kv_heads;
      for (int64_t r = a.group_offsets[group]; r < a.group_offsets[group + 1]; ++r)
        if (a.rows[2 * r] < a.rows[2 * r + 1]) Backward<T>(a, scratch, r, i % a.kv_heads).run();
    }
  }
}

}  // namespace

int attention_backward(const AttentionBackward& a) {
  int error = 1;  // of a dtype that there is none of
  with_type(a.dtype, [&](auto element) {
    backward<decltype(element)>(a);
    error = 0;
  });
  return error;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
