// Pass A of sampling: what 4096 tokens of a row have to say, in one read of them.
//
// Floor: V * sizeof(T) bytes a row and 104 written for each 4096 tokens, with a second read to come 4 for each 64 tokens more.
// On an H100 a multiprocessor gets 14.5 bytes of the 3.35 TB/s a clock, 7.2 tokens of bf16, and issues 128 lanes: 17.7
// instructions a token keep pace. A token costs convert, max, min (is any -inf?), subtract, multiply, 2^u, add: 7, and 3.5 more
// for the raw sum where T is not 1. The rest is paid per thread: folding the groups' masses and maxima, one exponential for
// each group, the sums and the winner, some 600 instructions: with 64 tokens a thread 10 a token, with 32 it would be nearly
// twice that. Hence 64 threads, of which as many vectors are in flight as a group has, so that after the fold each lane holds
// just one group. 96 registers let 10 blocks share a multiprocessor: up to 80 KiB on their way, of which 12 KiB cover the
// latency. Counted in the machine code for sm_90a, bf16, T = 1: 941 instructions a warp and 330 more for the one that ends the
// split, 17.3 a token.
#pragma once

#include <type_traits>

#include "rlkernel/sampling_tokens.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

enum SplitSum : int { kSumOfZ = 0, kSumOfX = 1, kSumWeighted = 2, kCountFinite = 3, kSplitSums = 4 };
enum SplitMoment : int { kSumApart = 0, kSumSquares = 1, kSplitMoments = 2 };  // of z - max z

// What a block's threads tell each other. Each member is written before a barrier and read after it, and not written again
// until the next barrier but one: a block goes on to its next split without another.
struct SplitShared {
  float max[kStatisticsWarps];
  int argmax;
  double sums[kStatisticsWarps][kSplitSums], moments[kStatisticsWarps][kSplitMoments];
  float best[kStatisticsWarps];
  int winner[kStatisticsWarps];
};

template <int kSize>
__device__ __forceinline__ float tree_sum(float (&values)[kSize]) {
#pragma unroll
  for (int half = kSize / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  return values[0];
}

// The sums of a thread, with e = exp((z - center) / T); `masses` are its parts of the sums of kVectors groups. kOtherX: x is z,
// but T is not 1, so that the sum over x is another. Not a flag within the loop: compilers then gather what it guards behind
// the loop, and keep 64 values of z - center for it.
template <bool kOtherX, class Tokens>
__device__ __forceinline__ void add_up(const Tokens& tokens, float center, float scale, float (&masses)[Tokens::kVectors],
                                       double (&sums)[kSplitSums]) {
  constexpr int kSize = Tokens::kSize;
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k) {
    float d[kSize], e[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      d[i] = tokens.z(k, i) - center;
      e[i] = exp2_fast(d[i] * scale);
    }
    masses[k] = tree_sum(e);
    sums[kSumOfZ] += static_cast<double>(masses[k]);
    if constexpr (kOtherX) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) e[i] = exp2_fast(d[i] * kLog2E);
      sums[kSumOfX] += static_cast<double>(tree_sum(e));
    }
  }
}

template <class Tokens>
__device__ __forceinline__ double count_finite(const Tokens& tokens) {
  int finite = 0;
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k)
#pragma unroll
    for (int i = 0; i < Tokens::kSize; ++i) finite += tokens.z(k, i) != -infinity();
  return static_cast<double>(finite);
}

// The sum of e * u with e = 2^u = exp((z - center) / T).
template <class Tokens>
__device__ __forceinline__ double weigh(const Tokens& tokens, float center, float scale) {
  double sum = 0.0;
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k) {
    float weighted = 0.0f;
#pragma unroll
    for (int i = 0; i < Tokens::kSize; ++i) {
      const float u = max_or_nan((tokens.z(k, i) - center) * scale, kLowestPower);  // 0 * -inf would be NaN
      weighted = fmaf(exp2_fast(u), u, weighted);
    }
    sum += static_cast<double>(weighted);
  }
  return sum;
}

template <class Tokens>
__device__ __forceinline__ void add_moments(const Tokens& tokens, float center, double (&moments)[kSplitMoments]) {
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k)
#pragma unroll
    for (int i = 0; i < Tokens::kSize; ++i) {
      const float z = tokens.z(k, i);
      const double apart = z > -infinity() ? static_cast<double>(z) - static_cast<double>(center) : 0.0;
      moments[kSumApart] += apart;
      moments[kSumSquares] += apart * apart;
    }
}

// The draw of a split, known by its first 32 lanes: the largest key and the id, within the split, of its group or token.
struct SplitWinner {
  float key;
  int id;  // -1: nothing to draw
};

__device__ __forceinline__ SplitWinner better(SplitWinner a, SplitWinner b) {
  const bool second = b.id >= 0 && (a.id < 0 || b.key > a.key || (b.key == a.key && b.id < a.id));
  return {second ? b.key : a.key, second ? b.id : a.id};
}

__device__ __forceinline__ SplitWinner reduce_lanes(SplitWinner mine) {
  const float best = reduce_lanes(mine.id >= 0 ? mine.key : -infinity(), Larger());
  const int id = reduce_lanes(mine.id >= 0 && mine.key == best ? mine.id : kSplit, Least());
  return {best, id < kSplit ? id : -1};
}

// By max-stability the best noisy logit of a group is log(mass) - log(E): one exponential E for its 64 tokens. mass / E has
// the same order and needs no logarithm.
__device__ __forceinline__ SplitWinner draw_group(const SamplingInputs& in, const SplitPlace& at, float mass, int group) {
  const int64_t seed = in.seeds[at.row], position = in.positions[at.row];
  const uint32_t offset = static_cast<uint32_t>(at.split * (kSplit / kGroup) + group);
  const uint32_t high = stream_word(kGroupDomain.high, seed, position, offset);
  const uint32_t low = stream_word(kGroupDomain.low, seed, position, offset);
  const float exponential = stream_exponential(stream_uniform(high, low), [](float x) { return log_exact(x); });
  return {mass / exponential, mass > 0.0f ? group : -1};
}

// A token of the split, read from memory.
template <class T, bool kAdjusted>
__device__ __forceinline__ float z_at(const SamplingInputs& in, const SplitPlace& at, int place) {
  if (kAdjusted && in.adjusted != nullptr)
    return Logits<float>(in, in.adjusted, in.adjusted_stride, at.row).at(at.first + place);
  return Logits<T>(in, in.logits, in.row_stride, at.row).at(at.first + place);
}

// A variable for each token. The tokens are read once more, from the nearest cache, and not kept in registers for it.
template <class T, bool kAdjusted>
__device__ __forceinline__ SplitWinner draw_token(const SamplingInputs& in, const SplitPlace& at, float center,
                                                  float temperature) {
  const uint32_t prefix = stream_prefix(kGumbelDomain, in.seeds[at.row], in.positions[at.row]);
  SplitWinner best = {-infinity(), -1};
  for (int i = at.thread; i < at.count; i += kStatisticsThreads) {
    const float d = z_at<T, kAdjusted>(in, at, i) - center;
    if (!(d > -infinity())) continue;
    const float key = d / temperature + gumbel_noise(prefix, static_cast<uint32_t>(at.split * kSplit + i));
    if (best.id < 0 || key > best.key) best = {key, i};
  }
  return best;
}

__device__ __forceinline__ void write_token(const SamplingInputs& in, const SplitPlace& at, double key, int place, float z,
                                            double* record) {
  record[kKey] = key;
  record[kToken] = static_cast<double>(at.split * kSplit + place);
  record[kTokenZ] = static_cast<double>(z);
  record[kTokenX] = static_cast<double>(logit_at(in, at.row, at.first + place));
}

// The first 32 lanes: a token of the group that won, by its integer masses.
template <class T, bool kAdjusted>
__device__ __forceinline__ void draw_member(const SamplingInputs& in, const SplitPlace& at, SplitWinner group, float scale,
                                            double* record) {
  const int place = group.id * kGroup + 2 * (at.thread % kLanes);
  const float first = place < at.count ? z_at<T, kAdjusted>(in, at, place) : -infinity();
  const float second = place + 1 < at.count ? z_at<T, kAdjusted>(in, at, place + 1) : -infinity();
  const float max = reduce_lanes(fmaxf(first, second), Larger());
  const int64_t n = stream_mass(exp2_fast((first - max) * scale));
  const int64_t both = n + stream_mass(exp2_fast((second - max) * scale));
  const int64_t upto = running_sum(both), total = shuffle(upto, kLanes - 1);
  const int64_t seed = in.seeds[at.row], position = in.positions[at.row];
  const uint32_t offset = static_cast<uint32_t>(at.split * (kSplit / kGroup) + group.id);
  const int64_t t = stream_below(stream_word(kMemberDomain.high, seed, position, offset),
                                 stream_word(kMemberDomain.low, seed, position, offset), total);
  if (upto - both <= t && t < upto) {
    const bool is_first = upto - both + n > t;
    write_token(in, at, static_cast<double>(log_exact(group.key)), place + !is_first, is_first ? first : second, record);
  }
}

// Mean and sum of squared distances from it. Of fp32 numbers in fp64, and relative to one of them: c being the largest,
// (mean - c)^2 <= M2, so M2 + n * (mean - c)^2, from which M2 comes, is at most n + 1 times M2. That costs 12 of 53 bits.
__device__ __forceinline__ void write_moments(const double (&parts)[kStatisticsWarps][kSplitMoments], float center, double finite,
                                              double* record) {
  double apart = parts[0][kSumApart], squares = parts[0][kSumSquares];
#pragma unroll
  for (int w = 1; w < kStatisticsWarps; ++w) {
    apart += parts[w][kSumApart];
    squares += parts[w][kSumSquares];
  }
  const double mean = finite > 0 ? apart / finite : 0.0, rest = squares - apart * mean;
  record[kMean] = finite > 0 ? static_cast<double>(center) + mean : 0.0;
  record[kM2] = rest > 0 ? rest : 0.0;
}

template <class T, bool kAdjusted>
__device__ __forceinline__ void split_statistics(const SamplingInputs& in, const SplitPlace& at) {
  using Tokens = std::conditional_t<kAdjusted, AdjustedTokens<T>, GivenTokens<T>>;
  constexpr int kVectors = Tokens::kVectors, kSize = Tokens::kSize;
  RLKERNEL_SHARED(SplitShared, shared);
  const int lane = at.thread % kLanes, warp = at.thread / kLanes;
  const int64_t splits = (in.whole_vocab + kSplit - 1) / kSplit;
  double* const record = in.records + (at.row * splits + at.split) * kRecord;

  Tokens tokens;
  Softmax given = nothing_seen();
  bool bad = false;
  if constexpr (kAdjusted) given = tokens.read(in, at, bad);
  else tokens.read(static_cast<const T*>(in.logits) + at.row * in.row_stride + at.first, at.count, at.thread);
  const float asked = of_row(in.temperature, at.row), temperature = softmax_temperature(asked);
  const float scale = power_scale(temperature);

  float peaks[kVectors], own = -infinity(), least = infinity();
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    float low;
    tokens.extremes_of(k, peaks[k], low);
    own = fmaxf(own, peaks[k]);
    least = fminf(least, low);
  }
  if (in.group_max != nullptr) {
    const float peak = fold<kVectors>(peaks, Larger());
    const int64_t groups = (in.whole_vocab + kGroup - 1) / kGroup;
    const int group = Tokens::group(at.thread);
    if (group * kGroup < at.count) in.group_max[at.row * groups + at.split * (kSplit / kGroup) + group] = peak;
  }
  const float warp_max = reduce_lanes(own, Larger());
  if (lane == 0) shared.max[warp] = warp_max;
  if (at.thread == 0) shared.argmax = kSplit;
  __syncthreads();  // the warps' maxima are written
  float max = shared.max[0];
#pragma unroll
  for (int w = 1; w < kStatisticsWarps; ++w) max = fmaxf(max, shared.max[w]);
  if (own == max) {
    int vector = kVectors;
#pragma unroll
    for (int k = kVectors - 1; k >= 0; --k) vector = peaks[k] == max ? k : vector;
    // read once more: of one thread, mostly, whose 64 tokens the others would have to keep converted
    const int first = Tokens::start(at.thread) + vector * Tokens::step(1);
    int place = kSplit;
#pragma unroll
    for (int i = kSize - 1; i >= 0; --i) place = z_at<T, kAdjusted>(in, at, first + i) == max ? first + i : place;
    atomic_min(&shared.argmax, place);
  }

  const float center = max == -infinity() ? 0.0f : max;  // -inf - -inf would be NaN
  const bool other_x = in.raw && !kAdjusted && temperature != 1.0f;
  float masses[kVectors];
  double sums[kSplitSums] = {}, moments[kSplitMoments] = {};
  const uint32_t zero = static_cast<uint32_t>(in.rows >> 62);
  if (other_x) {
    tokens.forget(zero);  // or what both loops have in common would be done before them
    add_up<true>(tokens, center, scale, masses, sums);
  } else {
    add_up<false>(tokens, center, scale, masses, sums);
  }
  sums[kCountFinite] = static_cast<double>(kVectors * kSize);
  if (least == -infinity()) {
    tokens.forget(zero);
    sums[kCountFinite] = count_finite(tokens);
  }
  if (in.entropy) {
    tokens.forget(zero);
    sums[kSumWeighted] = weigh(tokens, center, scale);
  }
  if (in.sigma) {
    tokens.forget(zero);
    add_moments(tokens, center, moments);
  }
  if (bad) sums[kSumOfZ] = static_cast<double>(nan());
  if (kAdjusted && in.raw) given = reduce_block(given, kLog2E);

  const bool draws = in.token_ids == nullptr && asked != 0.0f;
  SplitWinner winner = {-infinity(), -1};
  if (draws) {
    if (in.gumbel) {
      winner = draw_token<T, kAdjusted>(in, at, center, temperature);
    } else {
      winner = draw_group(in, at, fold<kVectors>(masses, Add()), Tokens::group(at.thread));
    }
    winner = reduce_lanes(winner);
  }
  const double sum = fold<kLanes>(sums, Add());
  if (lane % (kLanes / kSplitSums) == 0) shared.sums[warp][lane / (kLanes / kSplitSums)] = sum;
  if (in.sigma) {
    const double moment = fold<kLanes>(moments, Add());
    if (lane % (kLanes / kSplitMoments) == 0) shared.moments[warp][lane / (kLanes / kSplitMoments)] = moment;
  }
  if (lane == 0) {
    shared.best[warp] = winner.key;
    shared.winner[warp] = winner.id;
  }
  __syncthreads();  // the warps' sums and winners are written
  if (warp != 0) return;

  if (lane < kSplitSums) {
    double total = shared.sums[0][lane];
#pragma unroll
    for (int w = 1; w < kStatisticsWarps; ++w) total += shared.sums[w][lane];
    if (lane == kSumOfZ) {
      record[kMaxZ] = static_cast<double>(max);
      record[kArgmax] = static_cast<double>(at.split * kSplit + shared.argmax);
      record[kSumZ] = total;
      record[kMaxX] = static_cast<double>(kAdjusted && in.raw ? given.max : max);
      if (!other_x) record[kSumX] = kAdjusted && in.raw ? given.sum : total;
    } else if (lane == kSumOfX) {
      if (other_x) record[kSumX] = total;
    } else if (lane == kSumWeighted) {
      record[kWeighted] = total * static_cast<double>(kLn2);
    } else {
      record[kFinite] = total;
      if (in.sigma) write_moments(shared.moments, center, total, record);
    }
  }
#pragma unroll
  for (int w = 1; w < kStatisticsWarps; ++w) winner = better(winner, {shared.best[w], shared.winner[w]});
  if (winner.id >= 0 && !in.gumbel) {
    draw_member<T, kAdjusted>(in, at, winner, scale, record);
  } else if (lane == 0) {
    int place = winner.id;
    double key = static_cast<double>(winner.key);
    if (in.token_ids != nullptr) {
      const int64_t forced = in.token_ids[at.row] - at.split * kSplit;
      place = forced >= 0 && forced < at.count ? static_cast<int>(forced) : -1;
      key = static_cast<double>(infinity());
    } else if (asked == 0.0f) {
      place = max > -infinity() ? shared.argmax : -1;
      key = 0.0;
    }
    if (place >= 0) {
      write_token(in, at, key, place, z_at<T, kAdjusted>(in, at, place), record);
    } else {
      record[kKey] = static_cast<double>(-infinity());
      record[kToken] = -1.0;
      record[kTokenZ] = record[kTokenX] = static_cast<double>(nan());
    }
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kWideBlocks = 4;  // arithmetic on pairs of floats wants them side by side: more registers
#else
constexpr int kWideBlocks = 8;
#endif

// Blocks that are to share a multiprocessor: as many as the tokens they hold in registers allow. AMD: a wavefront a SIMD.
template <class T, bool kAdjusted>
#if defined(__HIP__)
constexpr int kStatisticsBlocks = 4;
#else
constexpr int kStatisticsBlocks = kAdjusted ? 6 : sizeof(T) == 2 ? 10 : kWideBlocks;
#endif

template <class T, bool kAdjusted>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kStatisticsThreads, (kStatisticsBlocks<T, kAdjusted>))
    statistics_kernel(SamplingInputs in) {
  const int64_t splits = (in.vocab + kSplit - 1) / kSplit, places = in.rows * splits;
  for (int64_t p = blockIdx.x; p < places; p += gridDim.x) {
    // a division of 64 bits takes as long as ten tokens
    const int64_t row = places >> 32 == 0 ? static_cast<uint32_t>(p) / static_cast<uint32_t>(splits) : p / splits;
    if (in.skip != nullptr && in.skip[row]) continue;
    const int first = static_cast<int>(p - row * splits) * kSplit, rest = static_cast<int>(in.vocab) - first;
    const int thread = static_cast<int>(threadIdx.x) + static_cast<int>(p >> 62);  // + 0, which compilers cannot know
    const int64_t split = in.vocab_start / kSplit + first / kSplit;
    split_statistics<T, kAdjusted>(in, {row, first, rest < kSplit ? rest : kSplit, split, thread});
  }
}

}  // namespace rlkernel::RLKERNEL_DEVICE
