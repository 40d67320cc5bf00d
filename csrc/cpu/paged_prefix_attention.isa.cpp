// Attention over a paged KV cache. A thread takes an item's keys with the query heads of one K/V head; then rows are merged.
//
// What a row computes follows from the keys that it sees and their positions alone: of a tile that it sees in part the rest
// has the weight 0, which is what adds nothing, and values are added key by key. Scores and values are chains of
// multiply-adds, weights of a tile are added in kLanes lanes, whatever a vector holds: the bits are those of any shape of
// items, any block size and number of threads, and of any instruction set.
#define RLKERNEL_FUSED
#include "rlkernel/paged_prefix_attention/arguments.h"

#include <memory>
#include <utility>

#include "paged_prefix_attention/products.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // products of a step from which waking the other threads pays
constexpr int kLanes = 16, kVectors = kLanes / kWidth;
constexpr int64_t kOnce = 2;  // blocks of rows for which copying values costs more than reading rows that stand apart
constexpr float kInf = __builtin_inff();

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
inline float finite_or_zero(float top) { return top == -kInf ? 0 : top; }

struct Item {
  int64_t first, end, page, position, stop, slot;
  bool carry;

  explicit Item(const int32_t* columns) {
    const auto at = [&](PagedItem column) { return columns[static_cast<int>(column)]; };
    first = at(PagedItem::first);
    end = at(PagedItem::end);
    page = at(PagedItem::page);
    position = at(PagedItem::position);
    stop = position + at(PagedItem::keys);
    slot = at(PagedItem::slot);
    carry = at(PagedItem::carry) != 0;
  }
};

// How scores become weights.
struct Scores {
  ScaledExp exp_of;
  Floats inside, softcap;  // softcap * tanh(inside * s)
  bool capped;
  double unit;  // of a score that is kept, in units of log e

  explicit Scores(const PagedAttention& a)
      : exp_of(a.softcap != 0 ? 1.0 : 1.0 / a.scale),
        inside(broadcast(static_cast<float>(a.softcap != 0 ? a.scale / a.softcap : 0))),
        softcap(broadcast(static_cast<float>(a.softcap))),
        capped(a.softcap != 0),
        unit(a.softcap != 0 ? 1 : a.scale) {}

  Floats weight(Floats below_top) const { return exp_of(exp_of.cut(below_top)); }
};

// A row and a query head: what it has of the softmax, and where in its sequence it stands.
struct Pair {
  float* state;
  int64_t position;
};

// A thread's, for any item and any row.
class Scratch {
 public:
  float *keys, *values, *query, *weights;
  Pair* pairs;

  Scratch(const PagedAttention& a, int64_t most_pairs, int64_t most_slots) : pairs_(new Pair[most_pairs]) {
    const int64_t k = a.head_dim * kTile, v = padded(a.value_dim) * kTile, q = padded(most_pairs * a.head_dim);
    memory_.reset(new float[k + v + q + padded(most_slots) + kLine]);
    const auto address = reinterpret_cast<uintptr_t>(memory_.get());
    keys = memory_.get() + (-address & (kLine * sizeof(float) - 1)) / sizeof(float);  // vectors that cross no line
    values = keys + k;
    query = values + v;
    weights = query + q;
    pairs = pairs_.get();
  }

 private:
  std::unique_ptr<float[]> memory_;
  std::unique_ptr<Pair[]> pairs_;
};

// Up to kRows pairs of a row and a query head, with the keys [low, high) of a tile that each sees.
struct Block {
  int low[kRows], high[kRows];
  float* state[kRows];
};

// The sum of a tile's weights in the order that any width of vectors gives: in kLanes lanes, then halves of these.
inline float total_of(const float* weights) {
  Floats lanes[kVectors] = {};
  for (int j = 0; j < kTile; j += kLanes)
    for (int v = 0; v < kVectors; ++v) lanes[v] += load(weights + j + v * kWidth);
  for (int half = kVectors / 2; half > 0; half /= 2)
    for (int v = 0; v < half; ++v) lanes[v] += lanes[v + half];
  return folded(lanes[0], [](Floats x, Floats y) { return x + y; });
}

// Turns the scores of a tile into weights, for which the row's top and total go on; the sums are to shrink by `shrink`.
template <int R>
void weigh(const Scores& scores, int64_t value_dim, const Block& block, float (*s)[kTile], float* shrink) {
  alignas(64) float step[kLanes] = {};
  float sum[R];
  for (int r = 0; r < R; ++r) {
    if (scores.capped)
      for (int j = 0; j < kTile; j += kWidth) store(s[r] + j, scores.softcap * Tanh(load(s[r] + j) * scores.inside).value);
    for (int j = 0; j < block.low[r]; ++j) s[r][j] = -kInf;
    for (int j = block.high[r]; j < kTile; ++j) s[r][j] = -kInf;
    float& top = block.state[r][value_dim];
    const float before = top;
    Floats high = broadcast(before);
    for (int j = 0; j < kTile; j += kWidth) high = max(load(s[r] + j), high);  // a NaN is none: its weight is NaN
    top = largest_lane(high);
    const float safe = finite_or_zero(top);
    step[r] = before == top ? 0 : before - safe;  // what keeps its top, be it that of no keys, keeps its bits
    for (int j = 0; j < kTile; j += kWidth) store(s[r] + j, scores.weight(load(s[r] + j) - broadcast(safe)));
    sum[r] = total_of(s[r]);
  }
  for (int i = 0; i < R; i += kWidth) store(step + i, scores.weight(load(step + i)));
  for (int r = 0; r < R; ++r) {
    float& total = block.state[r][value_dim + 1];
    total = total * step[r] + sum[r];
    shrink[r] = step[r];
  }
}

template <int R>
void attend_block(const Scores& scores, const PagedAttention& a, const Places& at, const Block& block, const float* query,
                  const float* keys, const Values& values, bool ahead) {
  alignas(64) float s[R][kTile];
  float shrink[R];
  multiply_keys<R>(query, keys, a.head_dim, at.from, at.to, s);
  weigh<R>(scores, a.value_dim, block, s, shrink);
  bool same = true;
  for (int r = 1; r < R; ++r) same = same && block.low[r] == block.low[0] && block.high[r] == block.high[0];
  if (same && ahead) {
    add_values<R, true>(s, shrink, values, block.low[0], block.high[0], block.state, a.value_dim);
    return;
  }
  if (same) {
    add_values<R, false>(s, shrink, values, block.low[0], block.high[0], block.state, a.value_dim);
    return;
  }
  for (int r = 0; r < R; ++r)
    if (block.low[r] < block.high[r])
      add_values<1, false>(s + r, shrink + r, values, block.low[r], block.high[r], block.state + r, a.value_dim);
}

template <int... R>
void attend_block(int rows, std::integer_sequence<int, R...>, const Scores& scores, const PagedAttention& a, const Places& at,
                  const Block& block, const float* query, const float* keys, const Values& values, bool ahead) {
  (void)((rows == R + 1 && (attend_block<R + 1>(scores, a, at, block, query, keys, values, ahead), true)) || ...);
}

template <class T>
class Attend {
 public:
  Attend(const PagedAttention& a, const Scores& scores, const Scratch& scratch, const Item& item, int64_t head)
      : a_(a), scores_(scores), scratch_(scratch), item_(item), head_(head), group_(a.heads / a.kv_heads),
        pairs_((item.end - item.first) * group_), blocks_((pairs_ + kRows - 1) / kRows) {}

  void run() {
    load_rows();
    Places places[2];
    int64_t tile = item_.position / kTile * kTile;
    if (tile < item_.stop) find(tile, places[0]);
    for (int i = 0; tile < item_.stop; tile += kTile, i = 1 - i) {
      Places& next = places[1 - i];
      next.from = next.to = 0;
      if (tile + kTile < item_.stop) find(tile + kTile, next);
      attend(tile, places[i], next);
    }
  }

 private:
  int64_t begin_of(int64_t block) const { return block * pairs_ / blocks_; }

  // States, of no keys yet where none is continued, and the query as [dim][pair of the block], block by block.
  void load_rows() {
    for (int64_t pair = 0, row = item_.first; row < item_.end; ++row)
      for (int64_t member = 0; member < group_; ++member, ++pair) {
        float* const state =
            a_.states + ((item_.slot + row - item_.first) * a_.heads + head_ * group_ + member) * (a_.value_dim + kPagedState);
        scratch_.pairs[pair] = {state, a_.positions[row]};
        if (item_.carry) continue;
        std::memset(state, 0, (a_.value_dim + kPagedState) * sizeof(float));
        state[a_.value_dim] = -kInf;
      }
    for (int64_t block = 0, pair = 0; block < blocks_; ++block) {
      const int64_t begin = pair, end = begin_of(block + 1);
      float* const to = scratch_.query + begin * a_.head_dim;
      for (; pair < end; ++pair) {
        const T* const from = static_cast<const T*>(a_.query) + a_.rows[item_.first + pair / group_] * a_.query_stride +
                              (head_ * group_ + pair % group_) * a_.query_head_stride;
        for (int64_t d = 0; d < a_.head_dim; d += kWidth) {
          const Floats x = load_up_to(from + d, 1, a_.head_dim - d);
          for (int i = 0; i < kWidth && d + i < a_.head_dim; ++i) to[(d + i) * (end - begin) + pair - begin] = x[i];
        }
      }
    }
  }

  void find(int64_t tile, Places& at) const {
    at.from = static_cast<int>(larger(tile, item_.position) - tile);
    at.to = static_cast<int>(smaller(tile + kTile, item_.stop) - tile);
    const int64_t before = item_.position / a_.block_size, first = (tile + at.from) / a_.block_size;
    int64_t page = item_.page + first - before, token = tile + at.from - first * a_.block_size;
    for (int j = at.from; j < at.to; ++j) {
      at.block[j] = a_.pages[page];
      at.token[j] = token;
      if (++token == a_.block_size) ++page, token = 0;
    }
  }

  void attend(int64_t tile, const Places& at, const Places& next) {
    bool loaded = false;
    Values values;
    for (int64_t b = 0, begin = 0, end; b < blocks_; ++b, begin = end) {
      end = begin_of(b + 1);
      const int rows = static_cast<int>(end - begin);
      Block block;
      bool sees = false;
      for (int r = 0; r < rows; ++r) {
        const Pair& pair = scratch_.pairs[begin + r];
        const int64_t low = a_.window != 0 ? pair.position + 1 - a_.window - tile : 0;
        block.low[r] = static_cast<int>(smaller(larger(low, at.from), kTile));
        block.high[r] = static_cast<int>(larger(smaller(pair.position + 1 - tile, at.to), block.low[r]));
        block.state[r] = pair.state;
        sees = sees || block.low[r] < block.high[r];
      }
      if (!sees) continue;
      const bool first = !loaded;
      if (first) load(at, next, values);
      loaded = true;
      attend_block(rows, std::make_integer_sequence<int, kRows>(), scores_, a_, at, block,
                   scratch_.query + begin * a_.head_dim, scratch_.keys, values, first);
    }
  }

  void load(const Places& at, const Places& next, Values& values) const {
    const T* const keys = static_cast<const T*>(a_.keys) + head_ * a_.key_strides[2];
    for (int j = at.from / kWidth * kWidth; j < at.to; j += kWidth)
      load_keys(keys, a_.key_strides, a_.head_dim, at, next, j, scratch_.keys);
    load_values(static_cast<const T*>(a_.values) + head_ * a_.value_strides[2], a_.value_strides, a_.value_dim, at, next,
                blocks_ <= kOnce, scratch_.values, values);
  }

  const PagedAttention& a_;
  const Scores& scores_;
  const Scratch& scratch_;
  const Item& item_;
  const int64_t head_, group_, pairs_, blocks_;
};

// The row's results from the states of its chunks, in the order of its keys; the sink comes last.
template <class T>
void merge(const PagedAttention& a, const Scores& scores, float* weights, int64_t row, int64_t head) {
  const int64_t width = a.value_dim + kPagedState, dim = a.value_dim, count = a.starts[row + 1] - a.starts[row];
  const int32_t* const slots = a.slots + a.starts[row];
  const auto state_of = [&](int64_t i) { return a.states + (slots[i] * a.heads + head) * width; };
  float top = -kInf, total = 0;
  for (int64_t i = 0; i < count; ++i) {
    weights[i] = state_of(i)[dim];
    top = weights[i] > top ? weights[i] : top;
  }
  const Floats safe = broadcast(finite_or_zero(top));
  for (int64_t i = 0; i < count; i += kWidth)
    store_part(weights + i, scores.weight(load_up_to(weights + i, 1, count - i) - safe), static_cast<int>(smaller(kWidth, count - i)));
  for (int64_t i = 0; i < count; ++i) total += weights[i] * state_of(i)[dim + 1];
  double unit = top * scores.unit;
  float share = 1;
  if (a.sinks != nullptr) {  // a key whose value is 0
    const ScaledExp exp_of(1.0);
    const auto exp_one = [&](double x) { return exp_of(exp_of.cut(broadcast(static_cast<float>(x))))[0]; };
    const double sink = a.sinks[head], all = unit > sink ? unit : sink, near = all == -__builtin_inf() ? 0 : all;
    share = exp_one(unit - near);
    total = total * share + exp_one(sink - near);
    unit = all;
  }
  const int64_t place = a.rows[row];
  T* const out = static_cast<T*>(a.out) + (place * a.heads + head) * dim;
  for (int64_t d = 0; d < dim; d += kWidth) {
    Floats sum = {};
    for (int64_t i = 0; i < count; ++i) sum = fma(broadcast(weights[i]), load_up_to(state_of(i) + d, 1, dim - d), sum);
    sum = sum * broadcast(share) / broadcast(total);
    if (dim - d >= kWidth) store(out + d, sum);
    else store_part(out + d, sum, static_cast<int>(dim - d));
  }
  a.lse[head * a.total + place] = static_cast<float>(unit + log(broadcast(total))[0]);
}

template <class T>
void attention(const PagedAttention& a) {
  const Scores scores(a);
  int64_t most_rows = 0, most_slots = 0, work = 0;
  const int32_t* const last = a.launches + a.launch_count * kPagedLaunch;
  const auto column = [](const int32_t* launch, PagedLaunch which) { return launch[static_cast<int>(which)]; };
  const int64_t items = a.launch_count != 0 ? column(last - kPagedLaunch, PagedLaunch::end_item) : 0;
  for (int64_t i = 0; i < items; ++i) {
    const Item item(a.items + i * kPagedItem);
    most_rows = larger(most_rows, item.end - item.first);
    work += (item.end - item.first) * (item.stop - item.position);
  }
  for (int64_t i = 0; i < a.total; ++i) most_slots = larger(most_slots, a.starts[i + 1] - a.starts[i]);
#pragma omp parallel if (work * a.heads * a.head_dim >= kParallel)
  {
    const FlushDenormals flush;
    const Scratch scratch(a, most_rows * a.heads / a.kv_heads, most_slots);
    for (const int32_t* launch = a.launches; launch < last; launch += kPagedLaunch) {
      const int64_t first = column(launch, PagedLaunch::first_item) * a.kv_heads;
      const int64_t end = column(launch, PagedLaunch::end_item) * a.kv_heads;
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = first; i < end; ++i) {  // the longest come first
        const Item item(a.items + i / a.kv_heads * kPagedItem);
        Attend<T>(a, scores, scratch, item, i % a.kv_heads).run();
      }
      const int64_t row = column(launch, PagedLaunch::first_row) * a.heads, rows = column(launch, PagedLaunch::end_row) * a.heads;
#pragma omp for schedule(static)
      for (int64_t i = row; i < rows; ++i) merge<T>(a, scores, scratch.weights, i / a.heads, i % a.heads);
    }
  }
}

}  // namespace

int paged_prefix_attention(const PagedAttention& a) {
  int error = 1;  // of a dtype that there is none of
  with_type(a.dtype, [&](auto element) {
    attention<decltype(element)>(a);
    error = 0;
  });
  return error;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
