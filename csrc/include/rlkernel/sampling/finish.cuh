// Pass B of sampling: the records of a row put together, and its results written.
//
// Where nothing is read again, 32 threads a row: 104 bytes read for each 4096 tokens, some 60 written; what it takes is the
// latency of three dependent reads. kept.cuh has what else a filtered row needs.
#pragma once

#include "rlkernel/moments.h"
#include "rlkernel/sampling/row.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

struct Drawn {
  int id;  // -1: none was drawn, or a forced one is outside the vocabulary
  float z, x;
};

// What pass A found of a row. Every thread has it.
struct RowSummary {
  float max;
  int argmax;
  double sum, weighted, finite;
  Moments moments;
  double max_x, sum_x;
  Drawn token;
};

__device__ __forceinline__ Moments from_lane(const Moments& m, int lane_mask) {
  return {shuffle_xor(m.count, lane_mask), shuffle_xor(m.mean, lane_mask), shuffle_xor(m.squares, lane_mask)};
}

// sum * 2^((max - to) * scale) for the sum relative to `to`; a part that saw only -inf has 0, or NaN where it saw one.
__device__ __forceinline__ double at_maximum(double sum, double max, double to, float scale) {
  if (max == static_cast<double>(-infinity())) return sum;
  return sum * static_cast<double>(exp2_fast((static_cast<float>(max) - static_cast<float>(to)) * scale));
}

// By 32 lanes: lane l takes the splits l, l + 32, ... in order, then a butterfly. The tree follows from the length of the
// vocabulary alone.
__device__ __forceinline__ RowSummary combine(const SamplingInputs& in, int64_t r, float temperature) {
  const int lane = threadIdx.x % kLanes;
  const int splits = static_cast<int>((in.whole_vocab + kSplit - 1) / kSplit);
  const double* const records = in.records + r * splits * kRecord;
  const float scale = power_scale(temperature);
  const double none = static_cast<double>(-infinity());
  double max = none, max_x = none;
#pragma unroll 2
  for (int s = lane; s < splits; s += kLanes) {
    const double* record = records + int64_t{s} * kRecord;
    max = record[kMaxZ] > max ? record[kMaxZ] : max;
    max_x = record[kMaxX] > max_x ? record[kMaxX] : max_x;
  }
  const auto larger = [](double a, double b) { return b > a ? b : a; };
  max = reduce_lanes(max, larger);
  max_x = reduce_lanes(max_x, larger);

  RowSummary row = {};
  if (in.sigma) {  // by themselves: they take many registers
#pragma unroll 1
    for (int s = lane; s < splits; s += kLanes) {
      const double* record = records + int64_t{s} * kRecord;
      row.moments = merge(row.moments, {record[kFinite], record[kMean], record[kM2]});
    }
#pragma unroll 1
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const Moments other = from_lane(row.moments, distance);
      // the same order in both lanes, or they would not end with the same bits
      row.moments = (lane & distance) != 0 ? merge(other, row.moments) : merge(row.moments, other);
    }
  }
  double best = none;
  int argmax = static_cast<int>(in.whole_vocab), winner = splits;
#pragma unroll 1
  for (int s = lane; s < splits; s += kLanes) {
    const double* record = records + int64_t{s} * kRecord;
    const double own = record[kMaxZ], apart = own == none ? 0.0 : own - max;
    if (own == max && record[kArgmax] < argmax) argmax = static_cast<int>(record[kArgmax]);
    row.sum += at_maximum(record[kSumZ], own, max, scale);
    if (in.raw) row.sum_x += at_maximum(record[kSumX], record[kMaxX], max_x, kLog2E);
    row.finite += record[kFinite];
    if (in.entropy) {
      const double weighted = record[kWeighted] + record[kSumZ] * (apart / static_cast<double>(temperature));
      const double moved = at_maximum(weighted, own, max, scale);
      row.weighted += own == none ? 0.0 : moved;
    }
    const double key = record[kKey] + apart / static_cast<double>(temperature);
    if (key > best) {
      best = key;
      winner = s;
    }
  }
  row.max = static_cast<float>(max);
  row.max_x = max_x;
  row.argmax = reduce_lanes(argmax, Least());
  const double sums[4] = {row.sum, row.sum_x, row.finite, row.weighted};
  const double sum = fold<kLanes>(sums, Add());  // lane l has sum l / 8
  row.sum = shuffle(sum, 0);
  row.sum_x = shuffle(sum, kLanes / 4);
  row.finite = shuffle(sum, kLanes / 2);
  row.weighted = shuffle(sum, kLanes / 4 * 3);
  const double key = reduce_lanes(best, larger);
  winner = reduce_lanes(best == key && winner < splits ? winner : splits, Least());
  row.token = {-1, nan(), nan()};
  if (winner < splits) {
    const double* record = records + int64_t{winner} * kRecord;
    row.token = {static_cast<int>(record[kToken]), static_cast<float>(record[kTokenZ]), static_cast<float>(record[kTokenX])};
  }
  return row;
}

// What the filters keep: all tokens with a larger z and those with this one up to the id `last`, but none above `high`.
struct KeptSet {
  int filtered;  // 0: the row is whole, or greedy. No bool, whose padding clang would copy by way of scratch memory
  float z;
  int last, count;
  int64_t mass;
  float high;

  __device__ __forceinline__ bool has(float value, int id) const {
    return value <= high && (value > z || (value == z && id <= last));
  }
};

// A row whose distribution is its likeliest token, because its temperature is 0.
__device__ __forceinline__ bool is_single(const SamplingInputs& in, float asked) { return asked == 0.0f && !in.greedy_softmax; }

// Thread 0 writes what one value a row says.
__device__ __forceinline__ void write_row(const SamplingInputs& in, const SamplingOutputs& out, int64_t r,
                                          const RowSummary& row, const KeptSet& kept, const Drawn& token, int64_t rank,
                                          bool valid) {
  const float asked = of_row(in.temperature, r), temperature = softmax_temperature(asked);
  const bool greedy = asked == 0.0f, known = valid && token.id >= 0;
  const float log_sum = log_exact(row.sum), above = (token.z - row.max) / temperature, tempered = above - log_sum;
  float processed = tempered, share = 1.0f;
  int64_t count = static_cast<int64_t>(row.finite);
  if (greedy) {
    if (is_single(in, asked)) processed = token.id == row.argmax ? 0.0f : -infinity();
    share = exp_exact(-log_sum);
    count = 1;
  } else if (kept.filtered) {
    const double mass = static_cast<double>(kept.mass) * 0x1p-40;
    processed = kept.has(token.z, token.id) ? above - log_exact(mass) : -infinity();
    share = static_cast<float>(mass / row.sum);
    count = kept.count;
  }
  out.token_ids[r] = in.token_ids != nullptr ? in.token_ids[r] : valid ? token.id : -1;
  if (out.raw_logprobs != nullptr) {
    const float raw = token.x - static_cast<float>(row.max_x) - log_exact(row.sum_x);
    out.raw_logprobs[r] = known ? raw : nan();
  }
  out.tempered_logprobs[r] = known ? tempered : nan();
  out.processed_logprobs[r] = known ? processed : nan();
  out.kept_mass[r] = valid ? share : nan();
  out.kept_count[r] = valid ? count : 0;
  if (out.entropy != nullptr) out.entropy[r] = valid ? log_sum - static_cast<float>(row.weighted / row.sum) : nan();
  if (out.rank != nullptr) out.rank[r] = known ? rank : 0;
  out.valid[r] = valid;
  if (out.row_max != nullptr) out.row_max[r] = valid ? row.max : nan();
  if (out.log_sum != nullptr) out.log_sum[r] = valid ? log_sum : nan();
}

// The ids of a row that keeps one token, or none that is listed.
__device__ __forceinline__ void write_short_support(const SamplingOutputs& out, int64_t r, int id) {
  if (out.support == nullptr) return;
  for (int64_t i = threadIdx.x; i < out.support_size; i += blockDim.x) out.support[r * out.support_size + i] = i == 0 ? id : -1;
}

__device__ __forceinline__ bool is_valid(const SamplingInputs& in, int64_t r, const RowSummary& row) {
  return row.sum == row.sum && row.finite > 0 && parameters_hold(in, r);
}

}  // namespace rlkernel::RLKERNEL_DEVICE
