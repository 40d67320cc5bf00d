// The arguments of the sampling kernels in Python.
#pragma once
#include "rlkernel/call.h"
#include "rlkernel/sampling/arguments.h"

namespace rlkernel::calls {

using namespace bind;

// What both start with.
struct SamplingFields {
  using shared_fields = SamplingFields;

  Optional logits;
  int64_t vocab_start, vocab;  // of the tile: where it starts; of all tiles: how many tokens
  Optional adjusted, token_bitmask;
  Each<float> temperature;
  Each<int64_t> top_k;
  Each<float> top_p, min_p, top_n_sigma;
  Optional thresholds, band, seeds, positions, token_ids, skip;
  FilterOrder order;
  RankTies rank_ties;
  bool gumbel, greedy_softmax, raw, entropy, sigma;
  Tensor partials;
  Optional group_max;

  int64_t rows() const { return partials.rank() == 0 ? 0 : partials.size(0); }

  template <class T>
  PerRow<T> each(const Each<T>& value) const {
    return {value.rows.template dense<const T>(rows()), value.all};
  }

  // Of logits [rows, tile].
  SamplingInputs inputs(int64_t tile) const {
    partials.want_rank(3);
    const int64_t count = rows();
    logits.want_number("vocab", vocab, 0, std::numeric_limits<int32_t>::max());
    logits.want_number("vocab_start", vocab_start, 0, vocab - tile, kSamplingSplit);
    if (token_bitmask.given) {
      token_bitmask.want_rank(2);
      const int64_t words = (vocab + 31) / 32;
      token_bitmask.matrix<const int32_t>(count, token_bitmask.size(1) < words ? words : token_bitmask.size(1));
    }
    if (!token_ids.given && !seeds.given) seeds.refuse("be given where token_ids is not", "None");
    return {logits.matrix_of_floats(count, tile), logits.given ? logits.dtype() : Dtype::f32, count, logits.row_stride(), tile,
            vocab_start, vocab, adjusted.matrix<const float>(count, tile), adjusted.row_stride(),
            static_cast<const int32_t*>(token_bitmask.data()), token_bitmask.row_stride(), each(temperature), each(top_k),
            each(top_p), each(min_p), each(top_n_sigma), thresholds.dense<const float>(count * kThresholds),
            band.dense<const float>(count * kBand), seeds.dense<const int64_t>(count), positions.dense<const int64_t>(count),
            token_ids.dense<const int64_t>(count), skip.dense<const uint8_t>(count), order, rank_ties, gumbel, greedy_softmax, raw,
            entropy, sigma, partials.dense<double>(count * pieces(kSamplingSplit) * kRecord), group_max.dense<float>(count * pieces(kSamplingGroup))};
  }

 private:
  int64_t pieces(int64_t size) const { return (vocab + size - 1) / size; }
};

RLKERNEL_FIELDS(SamplingFields, logits, vocab_start, vocab, adjusted, token_bitmask, temperature, top_k, top_p, min_p,
                top_n_sigma, thresholds, band, seeds, positions, token_ids, skip, order, rank_ties, gumbel, greedy_softmax, raw, entropy,
                sigma, partials, group_max)

struct sampling_statistics {
  SamplingFields sampling;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    if (!sampling.logits.given) sampling.logits.refuse("be given", "None");
    return launch(sampling.inputs(sampling.logits.last()), stream);
  }
};

RLKERNEL_FIELDS(sampling_statistics, sampling)

struct sampling_finish {
  SamplingFields sampling;
  Tensor out_ids;
  Optional raw_logprobs;
  Tensor tempered_logprobs, processed_logprobs, kept_mass, kept_count;
  Optional entropies, rank, support;
  Tensor valid;
  Optional row_max, log_sum;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const int64_t rows = sampling.rows(), room = support.given ? support.last() : 0;
    const auto floats = [&](const Tensor& x) { return x.dense<float>(rows); };
    return launch(sampling.inputs(sampling.vocab),
                  {out_ids.dense<int64_t>(rows), floats(raw_logprobs), floats(tempered_logprobs), floats(processed_logprobs),
                   floats(kept_mass), kept_count.dense<int64_t>(rows), floats(entropies), rank.dense<int64_t>(rows),
                   support.matrix<int32_t>(rows, room), room, valid.dense<bool>(rows), floats(row_max), floats(log_sum)},
                  stream);
  }
};

RLKERNEL_FIELDS(sampling_finish, sampling, out_ids, raw_logprobs, tempered_logprobs, processed_logprobs, kept_mass, kept_count,
                entropies, rank, support, valid, row_max, log_sum)

}  // namespace rlkernel::calls
