// The arguments of the logprob kernels in Python.
#pragma once
#include "rlkernel/logprob/rows.h"
#include "rlkernel/logprob/arguments.h"
#include "rlkernel/rows_bind.h"

namespace rlkernel::calls {

// What the kernels over a tile start with.
struct TileFields {
  using shared_fields = TileFields;
  Tensor logits;
  int64_t vocab_start;
  Tensor target_ids;
  int64_t ignore_index;
  Each<float> temperature;
  Optional bias;
  double logit_scale, softcap;

  int64_t rows() const {
    if (logits.rank() == 0) logits.want_rank(1);
    const int64_t elements = logits.elements();
    return elements ? elements / logits.last() : 0;
  }

  // One value for each row of the tensor, from the first row of the launch on.
  template <class T>
  T* of_rows(const Tensor& x, const Rows& part) const {
    T* start = x.dense<T>(rows());
    return start == nullptr ? nullptr : start + part.first;
  }

  LogprobTile tile(const Rows& part) const {
    const Dtype dtype = logits.dtype();
    logits.want_number("vocab_start", vocab_start, 0, std::numeric_limits<int64_t>::max() - logits.last());
    return {static_cast<char*>(logits.data()) + part.offset * logits.item_bytes(), dtype, part.count, part.inner,
            part.outer_stride, part.inner_stride, logits.last(), vocab_start, of_rows<const int64_t>(target_ids, part),
            ignore_index, of_rows<const float>(temperature.rows, part), temperature.rows.given ? 1 : temperature.all,
            bias.dense<const float>(logits.last()), static_cast<float>(logit_scale), static_cast<float>(softcap)};
  }
};

RLKERNEL_FIELDS(TileFields, logits, vocab_start, target_ids, ignore_index, temperature, bias, logit_scale, softcap)

struct logprob_forward {
  TileFields tile;
  Optional state;  // [4, rows]: max, sum, weighted sum and the target's value of each row
  bool first, last;
  Tensor logprobs;
  Optional entropy;
  Tensor lse, row_max, log_sum;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const int64_t rows = tile.rows();
    float* start = state.matrix<float>(4, rows);
    if (start == nullptr && rows && !(first && last)) state.refuse("be given where the tile is not the whole vocabulary", "None");
    return each_rows(tile.logits, [&](const Rows& part) {
      const auto floats = [&](const Tensor& x) { return tile.of_rows<float>(x, part); };
      const auto running = [&](int k) { return start == nullptr ? nullptr : start + k * state.stride(0) + part.first; };
      return launch({tile.tile(part), running(0), running(1), running(2), running(3), first, last, floats(logprobs),
                     floats(entropy), floats(lse), floats(row_max), floats(log_sum)},
                    stream);
    });
  }
};

RLKERNEL_FIELDS(logprob_forward, tile, state, first, last, logprobs, entropy, lse, row_max, log_sum)

struct logprob_backward {
  TileFields tile;
  Optional grad_logprobs, grad_entropy, grad_lse, entropy;
  Tensor row_max, log_sum, out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    if (grad_entropy.given && !entropy.given) entropy.refuse("be given with grad_entropy", "None");
    return each_rows(tile.logits, [&](const Rows& part) {
      const auto floats = [&](const Tensor& x) { return tile.of_rows<const float>(x, part); };
      const Target target = target_of(out, tile.logits, part);
      return launch({tile.tile(part), floats(grad_logprobs), floats(grad_entropy), floats(grad_lse), floats(entropy),
                     floats(row_max), floats(log_sum), target.at, out.dtype(), target.outer_stride, target.inner_stride},
                    stream);
    });
  }
};

RLKERNEL_FIELDS(logprob_backward, tile, grad_logprobs, grad_entropy, grad_lse, entropy, row_max, log_sum, out)

struct logprob_exp {
  TileFields tile;
  Tensor row_max, out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    return each_rows(tile.logits, [&](const Rows& part) {
      const Target target = target_of(out, tile.logits, part);
      return launch({tile.tile(part), tile.of_rows<const float>(row_max, part), target.at, out.dtype(), target.outer_stride,
                     target.inner_stride},
                    stream);
    });
  }
};

RLKERNEL_FIELDS(logprob_exp, tile, row_max, out)

// What the kernels over supports start with.
struct SupportFields {
  using shared_fields = SupportFields;
  Tensor target_ids;
  int64_t ignore_index;
  Each<float> temperature;
  Tensor ids, offsets;

  int64_t rows() const { return target_ids.elements(); }

  template <class T>
  T* of_rows(const Tensor& x, const Rows& part) const {
    T* start = x.dense<T>(rows());
    return start == nullptr ? nullptr : start + part.first;
  }

  LogprobSupport support(const Rows& part, int64_t vocab) const {
    return {part.count, vocab, of_rows<const int64_t>(target_ids, part), ignore_index,
            of_rows<const float>(temperature.rows, part), temperature.rows.given ? 1 : temperature.all,
            ids.dense<const int32_t>(ids.elements()), offsets.offsets(rows(), ids) + part.first};
  }

  // The rows of `x` [..., V], which are as many as the targets; with `alone` rows without a tensor behind them.
  template <class Launch>
  int each_part(const Tensor& x, bool alone, Launch launch) const {
    if (alone) return rows() ? launch(rows_alone(rows())) : 0;
    target_ids.dense<const int64_t>(x.elements() ? x.elements() / x.last() : rows());
    return each_rows(x, launch);
  }
};

RLKERNEL_FIELDS(SupportFields, target_ids, ignore_index, temperature, ids, offsets)

constexpr int64_t kAnyId = 0x7fffffff;  // the vocabulary where nobody says how large it is

struct logprob_support_forward {
  SupportFields support;
  Optional logits;  // None: they stand in values
  Tensor values, logprobs;
  Optional entropy;
  Tensor lse, row_max, log_sum;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    if (logits.given && logits.dtype() != values.dtype()) values.refuse("be of the dtype of logits", values.type_text());
    return support.each_part(logits, !logits.given, [&](const Rows& part) {
      const auto floats = [&](const Tensor& x) { return support.of_rows<float>(x, part); };
      const void* row = logits.given ? static_cast<char*>(logits.data()) + part.offset * logits.item_bytes() : nullptr;
      return launch({support.support(part, logits.given ? logits.last() : kAnyId), row, values.dtype(), part.inner,
                     part.outer_stride, part.inner_stride, values.dense_floats(support.ids.elements()), floats(logprobs),
                     floats(entropy), floats(lse), floats(row_max), floats(log_sum)},
                    stream);
    });
  }
};

RLKERNEL_FIELDS(logprob_support_forward, support, logits, values, logprobs, entropy, lse, row_max, log_sum)

struct logprob_support_backward {
  SupportFields support;
  Tensor values;
  Optional grad_logprobs, grad_entropy, grad_lse;
  Tensor logprobs;
  Optional entropy;
  Tensor row_max, log_sum, out;
  bool scattered;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    if (grad_entropy.given && !entropy.given) entropy.refuse("be given with grad_entropy", "None");
    const int64_t count = support.ids.elements();
    if (scattered) out.want_apart();
    else out.dense_floats(count);
    return support.each_part(out, !scattered, [&](const Rows& part) {
      const auto floats = [&](const Tensor& x) { return support.of_rows<const float>(x, part); };
      return launch({support.support(part, scattered ? out.last() : kAnyId), values.dense_floats(count), values.dtype(),
                     floats(grad_logprobs), floats(grad_entropy), floats(grad_lse), floats(logprobs), floats(entropy),
                     floats(row_max), floats(log_sum), static_cast<char*>(out.data()) + part.offset * out.item_bytes(),
                     out.dtype(), scattered, part.inner, part.outer_stride, part.inner_stride},
                    stream);
    });
  }
};

RLKERNEL_FIELDS(logprob_support_backward, support, values, grad_logprobs, grad_entropy, grad_lse, logprobs, entropy, row_max,
                log_sum, out, scattered)

struct softmax {
  Tensor x;
  bool logarithm;
  Tensor out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const StridedRowsOf rows(x);
    void* written = out.dense_floats(rows.count * rows.length);
    return launch({rows.count, rows.length, x.dtype(), rows.of(x), logarithm, written, out.dtype()}, stream);
  }
};

RLKERNEL_FIELDS(softmax, x, logarithm, out)

}  // namespace rlkernel::calls
