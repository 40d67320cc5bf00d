// Log-probability, entropy and log-sum-exp of rows of logits, and their gradient. A row belongs to one thread and its
// sums run in an order that follows from the position in the row alone: its bits depend neither on the other rows nor
// on the threads nor on the alignment.
#include "logprob/softmax.h"
#include "logprob/weights.h"
#include "pages.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;    // elements from which waking the other threads pays
constexpr int64_t kStream = 16 << 20;     // bytes of a result that no cache would keep for its reader

template <class T, bool kMapped>
void forward_row(const LogprobForward& f, int64_t r) {
  const LogprobTile& tile = f.tile;
  const int64_t target = tile.target_ids[r];
  if (target == tile.ignore_index) {
    if (f.state_max != nullptr) f.state_max[r] = f.state_sum[r] = f.state_weighted[r] = f.state_target[r] = 0;
    if (f.last) {
      f.logprobs[r] = f.lse[r] = f.row_max[r] = f.log_sum[r] = 0;
      if (f.entropy != nullptr) f.entropy[r] = 0;
    }
    return;
  }
  const double temperature = tile.temperatures != nullptr ? tile.temperatures[r] : tile.temperature;
  const Row<T, kMapped> row(tile, r);
  const FactorExp exp(temperature);
  Softmax state;
  float at_target = kNan;
  if (!f.first) {
    state.max = f.state_max[r];
    state.sum = f.state_sum[r];
    if (f.entropy != nullptr) state.weighted = f.state_weighted[r];
    at_target = f.state_target[r];
  }
  if (f.entropy != nullptr)
    accumulate<T, kMapped, true>(row, tile.vocab, 1 / temperature, exp, state);
  else
    accumulate<T, kMapped, false>(row, tile.vocab, 1 / temperature, exp, state);
  const int64_t inside = target - tile.vocab_start;
  if (inside >= 0 && inside < tile.vocab) at_target = row.y(inside);

  if (f.last) {
    const double log_sum = std::log(state.sum);
    f.logprobs[r] = static_cast<float>((static_cast<double>(at_target) - state.max) / temperature - log_sum);
    f.lse[r] = static_cast<float>(state.max / temperature + log_sum);
    f.row_max[r] = state.max;
    f.log_sum[r] = at_target != at_target ? kNan : static_cast<float>(log_sum);
    if (f.entropy != nullptr) f.entropy[r] = static_cast<float>(log_sum - state.weighted / state.sum);
  }
  if (f.state_max != nullptr) {  // also with the last tile: the frozen-head direction reads it
    f.state_max[r] = state.max;
    f.state_sum[r] = static_cast<float>(state.sum);
    f.state_weighted[r] = static_cast<float>(state.weighted);
    f.state_target[r] = at_target;
  }
}

template <class Out>
void fill(Out* out, int64_t count, float value) {
  Out one[1];
  store_part(one, broadcast(value), 1);
  std::fill_n(out, count, one[0]);
}

// Whether the rows of `out` are worth writing past the caches.
template <class Out>
bool streams(const LogprobTile& tile, const void* out) {
  return out != tile.logits && tile.vocab * sizeof(Out) >= 4096 &&
         tile.rows * tile.vocab * static_cast<int64_t>(sizeof(Out)) >= kStream;
}

template <class Out>
Out* out_row(const LogprobBackward& b, int64_t r) {
  return static_cast<Out*>(b.out) + r / b.tile.inner * b.out_outer_stride + r % b.tile.inner * b.out_inner_stride;
}

// `streams` of the rows from `first` to `end`, which get their pages here if they have none: the pages' zeros are in the
// cache, and a store past it would first have to write them to memory.
template <class Out>
bool streams_after_pages(const LogprobBackward& b, int64_t first, int64_t end) {
  if (!streams<Out>(b.tile, b.out)) return false;
  Out* const begin = out_row<Out>(b, first);
  const int64_t count = (end - first) * b.tile.vocab;
  const bool in_one_piece = out_row<Out>(b, end - 1) + b.tile.vocab == begin + count;
  return !(in_one_piece && bring_pages(begin, count * static_cast<int64_t>(sizeof(Out))));
}

template <class In, class Out, bool kMapped>
void backward_row(const LogprobBackward& b, int64_t r, bool streams) {
  const LogprobTile& tile = b.tile;
  Out* out = out_row<Out>(b, r);
  const double grad_logprob = b.grad_logprobs != nullptr ? b.grad_logprobs[r] : 0;
  const double grad_entropy = b.grad_entropy != nullptr ? b.grad_entropy[r] : 0;
  const double grad_lse = b.grad_lse != nullptr ? b.grad_lse[r] : 0;
  if (tile.target_ids[r] == tile.ignore_index || (grad_logprob == 0 && grad_entropy == 0 && grad_lse == 0))
    return fill(out, tile.vocab, 0);
  const double log_sum = b.log_sum[r];
  const float row_max = b.row_max[r];
  if (!(log_sum < kInf) || !(std::fabs(row_max) < kInf)) return fill(out, tile.vocab, kNan);

  const Row<In, kMapped> row(tile, r);
  const double temperature = tile.temperatures != nullptr ? tile.temperatures[r] : tile.temperature;
  const double scale = (kMapped ? tile.logit_scale : 1) / temperature;
  const double entropy = grad_entropy != 0 ? b.entropy[r] : 0;
  // p * (g_lse - g_logprob - g_entropy * (log p + H)) / T, with log p = d / T - log_sum and p = exp(d / T) / exp(log_sum)
  const double inverse_sum = std::exp(-log_sum) * scale;
  const double constant = (grad_lse - grad_logprob - grad_entropy * (entropy - log_sum)) * inverse_sum;
  const double linear = -grad_entropy * inverse_sum;
  int64_t target = tile.target_ids[r] - tile.vocab_start;
  double at_target = 0;
  if (target >= 0 && target < tile.vocab) {
    const double logprob = (static_cast<double>(row.y(target)) - row_max) / temperature - log_sum;
    const double p = std::exp(logprob);
    at_target = -grad_logprob * std::expm1(logprob) + grad_lse * p;  // 1 - p loses all digits as p -> 1
    if (p != 0) at_target -= grad_entropy * p * (logprob + entropy);
    at_target *= scale;
  } else {
    target = -1;
  }
  const Weights weights{row_max, temperature, constant, linear, target, at_target};
  weigh(row, out, tile.vocab, weights, streams);
}

template <class In, class Out, bool kMapped>
void exp_row(const LogprobExp& e, int64_t r) {
  const LogprobTile& tile = e.tile;
  Out* out = static_cast<Out*>(e.out) + r / tile.inner * e.out_outer_stride + r % tile.inner * e.out_inner_stride;
  if (tile.target_ids[r] == tile.ignore_index) return fill(out, tile.vocab, 0);
  const float row_max = e.row_max[r];
  if (!(std::fabs(row_max) < kInf)) return fill(out, tile.vocab, kNan);
  const double temperature = tile.temperatures != nullptr ? tile.temperatures[r] : tile.temperature;
  const double scale = (kMapped ? tile.logit_scale : 1) / temperature;
  const int64_t target = tile.target_ids[r] - tile.vocab_start;
  const int64_t inside = target >= 0 && target < tile.vocab ? target : -1;
  const Weights weights{row_max, temperature, scale, 0, inside, 0};
  weigh(Row<In, kMapped>(tile, r), out, tile.vocab, weights, streams<Out>(tile, e.out));
}

// Calls body(first, end) for all rows. Dealt out in turn: ignored rows cost nothing, and the prompts' come in runs.
template <class Body>
void each_turn(const LogprobTile& tile, Body body) {
  const int64_t turn = 1 + (1 << 16) / (tile.vocab + 1);
#pragma omp parallel if (tile.rows > 1 && tile.rows * tile.vocab >= kParallel)
  {
    const FlushDenormals scope(FlushDenormals::operands);
#pragma omp for schedule(static, 1)
    for (int64_t first = 0; first < tile.rows; first += turn)
      body(first, first + turn < tile.rows ? first + turn : tile.rows);
  }
}

template <class Arguments>
void each_row(const LogprobTile& tile, void (*body)(const Arguments&, int64_t), const Arguments& arguments) {
  each_turn(tile, [&](int64_t first, int64_t end) {
    for (int64_t r = first; r < end; ++r) body(arguments, r);
  });
}

bool is_mapped(const LogprobTile& tile) { return tile.bias != nullptr || tile.logit_scale != 1 || tile.softcap != 0; }

}  // namespace

int logprob_forward(const LogprobForward& f) {
  with_type(f.tile.dtype, [&](auto in) {
    using In = decltype(in);
    each_row(f.tile, is_mapped(f.tile) ? forward_row<In, true> : forward_row<In, false>, f);
  });
  return 0;
}

int logprob_backward(const LogprobBackward& b) {
  with_type(b.tile.dtype, [&](auto in) {
    with_type(b.out_dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      const auto row = is_mapped(b.tile) ? backward_row<In, Out, true> : backward_row<In, Out, false>;
      each_turn(b.tile, [&](int64_t first, int64_t end) {
        const bool streams = streams_after_pages<Out>(b, first, end);
        for (int64_t r = first; r < end; ++r) row(b, r, streams);
      });
    });
  });
  return 0;
}

int logprob_exp(const LogprobExp& e) {
  with_type(e.tile.dtype, [&](auto in) {
    with_type(e.out_dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      each_row(e.tile, is_mapped(e.tile) ? exp_row<In, Out, true> : exp_row<In, Out, false>, e);
    });
  });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
