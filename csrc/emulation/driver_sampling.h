// Sampling on heap blocks of exactly the size of their data: rows of each alignment, several splits, every filter.
#pragma once

#include <cmath>
#include <cstdio>
#include <memory>
#include <random>

#include "rlkernel/sampling/arguments.h"
#include "rlkernel/vec.cuh"

namespace sampling {

using namespace rlkernel;

struct Case {
  int64_t vocab, offset;
  bool filtered, adjusted, gumbel;
};

template <class T>
bool run(const Case& c, uint64_t seed) {
  constexpr int64_t rows = 4, room = 7;  // greedy, drawn, with a hole, of which nothing is allowed
  const int64_t splits = (c.vocab + kSamplingSplit - 1) / kSamplingSplit, words = (c.vocab + 31) / 32;
  const int64_t groups = (c.vocab + kSamplingGroup - 1) / kSamplingGroup;
  const std::unique_ptr<T[]> logits(new T[c.offset + rows * c.vocab]);
  const std::unique_ptr<float[]> adjusted(new float[rows * c.vocab]), group_max(new float[rows * groups]);
  const std::unique_ptr<float[]> floats(new float[7 * rows]);
  const std::unique_ptr<int32_t[]> bitmask(new int32_t[rows * words]), support(new int32_t[rows * room]);
  const std::unique_ptr<double[]> records(new double[rows * splits * kRecord]);
  const std::unique_ptr<int64_t[]> seeds(new int64_t[rows]), positions(new int64_t[rows]), ids(new int64_t[3 * rows]);
  const std::unique_ptr<bool[]> valid(new bool[rows]);
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < c.offset + rows * c.vocab; ++i) logits[i] = emulated::from_float<T>(std::round(3 * normal(random)));
  for (int64_t i = 0; i < rows * c.vocab; ++i) adjusted[i] = normal(random);
  for (int64_t i = 0; i < rows * words; ++i) bitmask[i] = i < (rows - 1) * words ? static_cast<int32_t>(random() | 1) : 0;
  for (int64_t r = 0; r < rows; ++r) seeds[r] = static_cast<int64_t>(random()), positions[r] = r;
  const float temperatures[rows] = {0, 0.7f, 1, 1};

  SamplingInputs in{};
  in.logits = logits.get() + c.offset;
  in.dtype = sizeof(T) == 4 ? Dtype::f32 : emulated::kIsBf16<T> ? Dtype::bf16 : Dtype::f16;
  in.rows = rows, in.row_stride = in.adjusted_stride = in.vocab = in.whole_vocab = c.vocab;
  in.adjusted = c.adjusted ? adjusted.get() : nullptr;
  in.bitmask = c.filtered ? bitmask.get() : nullptr, in.bitmask_stride = words;
  in.temperature = {temperatures, 0}, in.top_k = {nullptr, c.filtered ? 5 : 0}, in.top_p = {nullptr, c.filtered ? 0.9f : 1.0f};
  in.min_p = {nullptr, c.filtered ? 1e-3f : 0.0f}, in.top_n_sigma = {nullptr, c.filtered ? 3.0f : emulated::infinity()};
  in.seeds = seeds.get(), in.positions = positions.get();
  const float band[kBand * rows] = {0.9f, 0.05f, 0.5f, 1, 1, 0.2f, 0.9f, 0.05f};
  in.band = c.filtered && c.gumbel ? band : nullptr;
  in.gumbel = c.gumbel, in.raw = in.entropy = true, in.sigma = c.filtered;
  in.records = records.get(), in.group_max = c.filtered ? group_max.get() : nullptr;
  float* const f = floats.get();
  const SamplingOutputs out{ids.get(), f, f + rows, f + 2 * rows, f + 3 * rows, ids.get() + rows, f + 4 * rows,
                            c.filtered ? ids.get() + 2 * rows : nullptr, support.get(), room, valid.get(), f + 5 * rows,
                            f + 6 * rows};
  if (emulated::sampling_statistics(in, nullptr) || emulated::sampling_finish(in, out, nullptr)) return false;
  bool right = true;
  for (int64_t r = 0; r < rows; ++r) {
    const bool nothing = c.filtered && r == rows - 1;
    right &= valid[r] == !nothing && (nothing ? ids[r] == -1 : ids[r] >= 0 && ids[r] < c.vocab);
    right &= nothing ? std::isnan(out.processed_logprobs[r]) : out.processed_logprobs[r] <= 1e-5f;
    if (c.filtered && !nothing && r > 0) right &= out.kept_count[r] >= 1 && out.kept_count[r] <= 5 && out.rank[r] <= 5;
    bool listed = !c.filtered || nothing || (r > 0 && out.kept_count[r] == c.vocab);  // a whole row lists nothing
    for (int64_t i = 0; i < room; ++i) listed |= support[r * room + i] == ids[r];
    right &= listed;
  }
  if (!right) std::printf("wrong: sampling, vocab %ld offset %ld filtered %d\n", long(c.vocab), long(c.offset), c.filtered);
  return right;
}

inline bool run_all(uint64_t seed) {
  bool right = true;
  for (const int64_t vocab : {1, 4099})
    for (const bool filtered : {false, true}) {
      right &= run<float>({vocab, 1, filtered, filtered, false}, seed);
      right &= run<emulated::f16>({vocab, 2, filtered, !filtered, true}, seed);
      right &= run<emulated::bf16>({vocab, 1, filtered, false, filtered}, seed);
      right &= run<emulated::bf16>({vocab, 0, filtered, false, false}, seed);
    }
  return right;
}

}  // namespace sampling
