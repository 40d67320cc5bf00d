// A token of each row of logits that nothing changes or filters, its log-probability and its rank, and the likeliest token
// beside it: what an engine's step asks for, in one call.
#pragma once
#include <cmath>
#include <vector>

#include "rlkernel/direct.h"
#include "rlkernel/logprob/rows.h"
#include "rlkernel/logprob/arguments.h"
#include "rlkernel/sampling/arguments.h"

namespace rlkernel::direct {

struct sampling {
  static constexpr int kPlaces = 6;
  static constexpr bool kTrains = false;
  Plain logits;
  Maybe temperature;  // None: 0 for each row
  Plain seeds;
  Maybe positions;
  bool likeliest = false;
  bool trained = false;  // log-probabilities of tokens are those of `logprob`, which a trainer computes

  // (ids, logprobs, rank): int64 [n, 1] or [n, 2], fp32 likewise, and int64 [n].
  template <class Kernels>
  py::object run(const Caller& caller, const Kernels& kernels) const {
    if (logits.rank() != 2 || !are_rows(logits) || caller.is_debugging() || caller.is_of_ranks()) return {};
    const int64_t n = logits.size(0), vocab = logits.size(1), width = likeliest ? 2 : 1;
    if (vocab > std::numeric_limits<int32_t>::max() || (n > 1 && logits.stride(0) < vocab)) return {};
    if (!is_column(seeds, n, bind::type_of<int64_t>()) || (positions.given && !is_column(positions, n, bind::type_of<int64_t>())) ||
        (temperature.given && !is_column(temperature, n, bind::type_of<float>())))
      return {};
    const auto* heat = static_cast<const float*>(temperature.data());
    for (int64_t r = 0; temperature.given && r < n; ++r)
      if (heat[r] != 0 && !is_temperature(heat[r])) return {};

    Plain ids, logprobs, ranks;
    const int64_t table[] = {n, width};
    const py::object made_ids = caller.new_empty(seeds.object, table, 2, false, ids);
    const py::object made_logprobs = caller.new_empty(logits.object, table, 2, true, logprobs);
    const py::object made_ranks = caller.new_empty(seeds.object, table, 1, false, ranks);
    auto* const id = static_cast<int64_t*>(ids.data());
    auto* const logprob = static_cast<float*>(logprobs.data());
    launched(logits.elements(), [&] { return draw(kernels, heat, id, logprob, static_cast<int64_t*>(ranks.data()), width); });
    return py::make_tuple(made_ids, made_logprobs, made_ranks);
  }

 private:
  static bool is_column(const bind::Tensor& x, int64_t rows, dlpack::Type type) {
    return x.given && x.rank() == 1 && x.size(0) == rows && x.holds(type) && x.is_dense();
  }

  template <class Kernels>
  int draw(const Kernels& kernels, const float* heat, int64_t* ids, float* logprobs, int64_t* ranks, int64_t width) const {
    const int64_t n = logits.size(0), vocab = logits.size(1), stride = n > 1 ? logits.stride(0) : vocab;
    const auto pieces = [&](int64_t size) { return (vocab + size - 1) / size; };
    const std::unique_ptr<double[]> records(new double[n * pieces(kSamplingSplit) * kRecord]);
    const std::unique_ptr<float[]> group_max(new float[n * pieces(kSamplingGroup)]);
    std::vector<int64_t> integers(3 * n);
    std::vector<float> floats(9 * n);
    const std::unique_ptr<bool[]> valid(new bool[n]);
    int64_t *const tokens = integers.data(), *const first = tokens + n, *const counts = first + n;
    const auto column = [&](int64_t i) { return floats.data() + i * n; };
    float *const own = column(0), *const log_sum = column(1);

    SamplingInputs in{};
    in.logits = logits.data(), in.dtype = logits.dtype(), in.rows = n, in.row_stride = stride;
    in.vocab = in.whole_vocab = vocab;
    in.temperature = {heat, 0};
    in.top_p.all = 1, in.top_n_sigma.all = HUGE_VALF;
    in.seeds = static_cast<const int64_t*>(seeds.data()), in.positions = static_cast<const int64_t*>(positions.data());
    in.order = FilterOrder::sequential, in.rank_ties = RankTies::max, in.raw = true;
    in.records = records.get(), in.group_max = group_max.get();
    SamplingOutputs out{};
    out.token_ids = tokens, out.raw_logprobs = own, out.kept_count = counts, out.rank = ranks, out.valid = valid.get();
    out.tempered_logprobs = column(2), out.processed_logprobs = column(3), out.kept_mass = column(4);
    if (const int error = sample(kernels, in, out)) return error;
    for (int64_t r = 0; r < n; ++r) ids[r * width] = tokens[r] < 0 ? 0 : tokens[r];  // an engine has no token that is none

    if (trained) {
      for (int64_t r = 0; r < n; ++r) tokens[r] = ids[r * width];
      const LogprobTile tile{logits.data(), logits.dtype(), n, n, 0, stride, vocab, 0, tokens, -1, nullptr, 1, nullptr, 1, 0};
      float* const scored = column(5);
      const LogprobForward call{tile,    nullptr, nullptr, nullptr,   nullptr,   true,
                                true,    scored,  nullptr, column(6), column(7), column(8)};
      if (const int error = kernels.logprob(call)) return error;
      for (int64_t r = 0; r < n; ++r) own[r] = valid[r] ? scored[r] : own[r];
    }
    for (int64_t r = 0; r < n; ++r) logprobs[r * width] = own[r];
    if (!likeliest) return 0;

    in.temperature = {nullptr, 0}, in.raw = false, in.group_max = nullptr;
    out.token_ids = first, out.raw_logprobs = nullptr, out.rank = nullptr, out.row_max = column(2), out.log_sum = log_sum;
    out.tempered_logprobs = column(5);
    if (const int error = sample(kernels, in, out)) return error;
    for (int64_t r = 0; r < n; ++r) {
      ids[r * 2 + 1] = first[r] < 0 ? 0 : first[r];
      // the token itself has one number
      logprobs[r * 2 + 1] = trained && ids[r * 2 + 1] == ids[r * 2] ? own[r] : 0.0f - log_sum[r];
    }
    return 0;
  }

  template <class Kernels>
  static int sample(const Kernels& kernels, const SamplingInputs& in, const SamplingOutputs& out) {
    const int error = kernels.statistics(in);
    return error ? error : kernels.finish(in, out);
  }
};

RLKERNEL_FIELDS(sampling, logits, temperature, seeds, positions, likeliest, trained)

}  // namespace rlkernel::direct
