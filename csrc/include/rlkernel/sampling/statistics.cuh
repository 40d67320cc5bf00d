// Pass A of sampling: what 4096 tokens of a row have to say, in one read of them.
//
// Floor: V * sizeof(T) bytes a row and 104 written for each 4096 tokens, with a second read to come 4 for each 64 tokens more.
// On an H100 a multiprocessor gets 14.5 bytes of the 3.35 TB/s a clock, 7.2 tokens of bf16, and issues 128 lanes: 17.7
// instructions a token keep pace. A token costs convert, multiply-add, 2^u and add, half an instruction for the maximum and one
// for the minimum together (is any -inf?): 4.6, and 4 more for the raw sum where T is not 1. The rest is paid per thread:
// folding the groups' masses, one exponential for each group, the sums, the winner. Hence 64 tokens a thread, and 64 threads,
// of which as many vectors are in flight as a group has, so that after the fold each lane holds just one group. 96 registers
// let 10 blocks share a multiprocessor: up to 80 KiB on their way, of which 12 KiB cover the latency. Counted in the machine
// code for sm_90a, bf16, T = 1: 675 instructions a warp and 303 more for the one that ends the split, 12.9 a token.
#pragma once

#include <type_traits>

#include "rlkernel/sampling/tokens.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

enum SplitSum : int { kSumOfZ = 0, kSumOfX = 1, kSumWeighted = 2, kCountFinite = 3, kSplitSums = 4 };
enum SplitMoment : int { kSumApart = 0, kSumSquares = 1, kSplitMoments = 2 };  // of z - max z

// The draw of a split, known by its first 32 lanes: the largest key and the id, within the split, of its group or token.
struct SplitWinner {
  float key;
  int id;  // -1: nothing to draw
};

// What a block's threads tell each other. Each member is written before a barrier and read after it.
struct SplitShared {
  float max[kStatisticsWarps], max_x[kStatisticsWarps];
  int argmax;
  double sums[kStatisticsWarps][kSplitSums], moments[kStatisticsWarps][kSplitMoments];
  SplitWinner winner[kStatisticsWarps];
};

template <int kSize>
__device__ __forceinline__ float tree_sum(float (&values)[kSize]) {
#pragma unroll
  for (int half = kSize / 2; half > 0; half /= 2)
#pragma unroll
    for (int i = 0; i < half; ++i) values[i] += values[i + half];
  return values[0];
}

// exp((z - center) / T), times one factor for all z of a split: `of_center`, what it is for the center itself. A fused
// multiply-add saves an instruction a token; the factor says how far center * scale is from a float. kFar: too far.
template <bool kFar>
struct Powers {
  float center, scale;

  __device__ __forceinline__ float operator()(float z) const {
    return exp2_fast(kFar ? (z - center) * scale : fmaf(z, scale, -(center * scale)));
  }
  __device__ __forceinline__ float of_center() const { return kFar ? 1.0f : (*this)(center); }
};

// Else the factor is within 1% of 1.
__device__ __forceinline__ bool is_far(float center, float scale) {
  return !(fabsf(center) * fmaxf(scale, kLog2E) < 0x1p18f);
}

// The sum of a thread's powers; `masses` are its parts of the sums of kVectors groups.
template <bool kFar, class Tokens>
__device__ __forceinline__ double add_up(const Tokens& tokens, Powers<kFar> powers, float (&masses)[Tokens::kVectors]) {
  double sum = 0.0;
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k) {
    float e[Tokens::kSize];
#pragma unroll
    for (int i = 0; i < Tokens::kSize; ++i) e[i] = powers(tokens.z(k, i));
    masses[k] = tree_sum(e);
    sum += static_cast<double>(masses[k]);
  }
  return sum;
}

struct Factors {
  float of_z, of_x;
};

// other_x: x is z, but T is not 1, so that the sum over x is another. A loop of its own: in one loop compilers keep too much.
template <bool kFar, class Tokens>
__device__ __forceinline__ Factors sums_of(Tokens& tokens, float center, float scale, bool other_x, uint32_t zero,
                                           float (&masses)[Tokens::kVectors], double (&sums)[kSplitSums]) {
  const Powers<kFar> powers{center, scale}, powers_of_x{center, kLog2E};
  sums[kSumOfZ] = add_up(tokens, powers, masses);
  if (other_x) {
    tokens.forget(zero);
    float unused[Tokens::kVectors];
    sums[kSumOfX] = add_up(tokens, powers_of_x, unused);
  }
  return {powers.of_center(), powers_of_x.of_center()};
}

// The sum over x where z is another: x is read again, from the nearest cache, when nothing of z is left in registers. With the
// bits that the sum has where z is x.
template <class T>
__device__ __forceinline__ float add_up_given(const SamplingInputs& in, const SplitPlace& at, float max, float scale,
                                              double& sum) {
  GivenTokens<T> x;
  x.read(in, at);
  const float center = max == -infinity() ? 0.0f : max;
  float unused[GivenTokens<T>::kVectors];
  if (sizeof(T) == 4 || is_far(center, scale)) {
    sum = add_up(x, Powers<true>{center, kLog2E}, unused);
    return 1.0f;
  }
  const Powers<false> powers{center, kLog2E};
  sum = add_up(x, powers, unused);
  return powers.of_center();
}

__device__ __forceinline__ float largest_of(const float (&of_warps)[kStatisticsWarps]) {
  float largest = of_warps[0];
#pragma unroll
  for (int w = 1; w < kStatisticsWarps; ++w) largest = fmaxf(largest, of_warps[w]);
  return largest;
}

template <class Tokens>
__device__ __forceinline__ int count_finite(const Tokens& tokens) {
  int finite = 0;
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k)
#pragma unroll
    for (int i = 0; i < Tokens::kSize; ++i) finite += tokens.z(k, i) != -infinity();
  return finite;
}

// The first place of the split with the value `max`, which this thread has.
template <class Tokens>
__device__ __forceinline__ int first_of(const Tokens& tokens, float max, uint32_t thread) {
  int place = kSplit;
#pragma unroll
  for (int k = Tokens::kVectors - 1; k >= 0; --k)
#pragma unroll
    for (int i = Tokens::kSize - 1; i >= 0; --i)
      place = tokens.z(k, i) == max ? Tokens::start(thread) + Tokens::step(k) + i : place;
  return place;
}

template <class Tokens>
__device__ __forceinline__ void write_group_max(const SamplingInputs& in, const SplitPlace& at, const Tokens& tokens) {
  float peaks[Tokens::kVectors];
#pragma unroll
  for (int k = 0; k < Tokens::kVectors; ++k) peaks[k] = tokens.max_of(k);
  const float peak = fold<Tokens::kVectors>(peaks, Larger());
  const int64_t groups = (in.whole_vocab + kGroup - 1) / kGroup;
  const int group = Tokens::group(at.thread);
  if (group * kGroup < at.count) in.group_max[at.row * groups + at.split * (kSplit / kGroup) + group] = peak;
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

__device__ __forceinline__ SplitWinner better(SplitWinner a, SplitWinner b) {
  const bool second = b.id >= 0 && (a.id < 0 || b.key > a.key || (b.key == a.key && b.id < a.id));
  return {second ? b.key : a.key, second ? b.id : a.id};
}

__device__ __forceinline__ SplitWinner reduce_lanes(SplitWinner mine) {
  const float best = max_of_lanes(mine.id >= 0 ? mine.key : -infinity());
  const int id = min_of_lanes(mine.id >= 0 && mine.key == best ? mine.id : kSplit);
  return {best, id < kSplit ? id : -1};
}

// By max-stability the best noisy logit of a group is log(mass) - log(E): one exponential E for its 64 tokens. mass / E has
// the same order and needs no logarithm.
__device__ __forceinline__ SplitWinner draw_group(const SplitPlace& at, int64_t seed, int64_t position, float mass, int group) {
  const uint32_t offset = static_cast<uint32_t>(at.split * (kSplit / kGroup) + group);
  const float u = stream_uniform(stream_bits(kGroupDomain, seed, position, offset));
  const float exponential = stream_exponential(u, [](float x) { return log_of_normal(x); });
  return {divide_fast(mass, exponential), mass > 0.0f ? group : -1};
}

// A token of the split, read from memory; -inf behind the row's end.
template <class T, bool kAdjusted>
__device__ __forceinline__ float z_at(const SamplingInputs& in, const SplitPlace& at, int place) {
  if constexpr (kAdjusted) {
    if (in.adjusted != nullptr) return Logits<float>(in, in.adjusted, in.adjusted_stride, at.row).at(at.first + place);
    return Logits<T>(in, in.logits, in.row_stride, at.row).at(at.first + place);
  } else {
    const T* const logits = static_cast<const T*>(in.logits) + at.row * in.row_stride + at.first;
    return place < at.count ? to_float(logits[place]) : -infinity();
  }
}

// A variable for each token. The tokens are read once more, from the nearest cache, and not kept in registers for it.
template <class T, bool kAdjusted>
__device__ __forceinline__ SplitWinner draw_token(const SamplingInputs& in, const SplitPlace& at, int64_t seed,
                                                  int64_t position, float center, float temperature) {
  const uint32_t prefix = stream_prefix(seed, position);
  SplitWinner best = {-infinity(), -1};
  for (int i = static_cast<int>(at.thread); i < at.count; i += kStatisticsThreads) {
    const float d = z_at<T, kAdjusted>(in, at, i) - center;
    if (!(d > -infinity())) continue;
    const float key = d / temperature + gumbel_noise(prefix, static_cast<uint32_t>(at.split * kSplit + i));
    if (best.id < 0 || key > best.key) best = {key, i};
  }
  return best;
}

template <bool kAdjusted>
__device__ __forceinline__ void write_token(const SamplingInputs& in, const SplitPlace& at, double key, int place, float z,
                                            double* record) {
  record[kKey] = key;
  record[kToken] = static_cast<double>(at.split * kSplit + place);
  record[kTokenZ] = static_cast<double>(z);
  record[kTokenX] = static_cast<double>(kAdjusted ? logit_at(in, at.row, at.first + place) : z);
}

// The first 32 lanes: a token of the group that won, by its integer masses.
template <class T, bool kAdjusted>
__device__ __forceinline__ void draw_member(const SamplingInputs& in, const SplitPlace& at, int64_t seed, int64_t position,
                                            SplitWinner group, float scale, double* record) {
  const int place = group.id * kGroup + 2 * static_cast<int>(at.thread % kLanes);
  const float first = z_at<T, kAdjusted>(in, at, place), second = z_at<T, kAdjusted>(in, at, place + 1);
  const float max = max_of_lanes(fmaxf(first, second));
  const int64_t n = stream_mass(exp2_fast((first - max) * scale));
  const int64_t both = n + stream_mass(exp2_fast((second - max) * scale));
  const int64_t upto = running_sum(both), total = shuffle(upto, kLanes - 1);
  const int64_t t = stream_below(stream_bits(kMemberDomain, seed, position), total);
  if (upto - both <= t && t < upto) {
    const bool is_first = upto - both + n > t;
    const double key = static_cast<double>(log_of_normal(group.key));  // a group with the split's maximum has 1/17 at least
    write_token<kAdjusted>(in, at, key, place + !is_first, is_first ? first : second, record);
  }
}

// Mean and sum of squared distances from it. Of fp32 numbers in fp64, and relative to one of them: c being the largest,
// (mean - c)^2 <= M2, so M2 + n * (mean - c)^2, from which M2 comes, is at most n + 1 times M2. That costs 12 of 53 bits.
__device__ __forceinline__ void write_moments(const double (&parts)[kStatisticsWarps][kSplitMoments], float center,
                                              double finite, double* record) {
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
  const uint32_t lane = at.thread % kLanes, warp = at.thread / kLanes;

  Tokens tokens;
  float own_x = -infinity();
  bool bad = false;
  if constexpr (kAdjusted) own_x = tokens.read(in, at, bad);
  else tokens.read(in, at);
  const float asked = of_row(in.temperature, at.row), temperature = softmax_temperature(asked);
  const float scale = power_scale(temperature);
  const bool draws = in.token_ids == nullptr && asked != 0.0f;
  // early: their latency passes behind the tokens'
  const int64_t seed = draws ? in.seeds[at.row] : 0, position = draws ? position_of(in, at.row) : 0;

  float own, least;
  tokens.extremes_of(own, least);
  if (in.group_max != nullptr) write_group_max(in, at, tokens);
  const float warp_max = max_of_lanes(own);
  const float warp_max_x = kAdjusted && in.raw ? max_of_lanes(own_x) : -infinity();
  if (lane == 0) {
    shared.max[warp] = warp_max;
    shared.max_x[warp] = warp_max_x;
  }
  if (at.thread == 0) shared.argmax = kSplit;
  __syncthreads();  // the warps' maxima are written
  const float max = largest_of(shared.max), max_x = kAdjusted && in.raw ? largest_of(shared.max_x) : max;
  const uint32_t zero = static_cast<uint32_t>(in.rows >> 62);
  if (asked == 0.0f && own == max) {
    tokens.forget(zero);
    atomic_min(&shared.argmax, first_of(tokens, max, at.thread));
  }

  const float center = max == -infinity() ? 0.0f : max;  // -inf - -inf would be NaN
  const bool other_x = in.raw && !kAdjusted && temperature != 1.0f;
  float masses[kVectors];
  double sums[kSplitSums] = {}, moments[kSplitMoments] = {};
  constexpr bool kWide = sizeof(T) == 4;  // with twice the time for a token, and few registers
  Factors factors = kWide || is_far(center, scale)
                              ? sums_of<true>(tokens, center, scale, other_x, zero, masses, sums)
                              : sums_of<false>(tokens, center, scale, other_x, zero, masses, sums);
  int finite = kLanes * kVectors * kSize;
  if (ballot(least == -infinity()) != 0) {
    tokens.forget(zero);
    finite = reduce_lanes(count_finite(tokens), Add());
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
  if constexpr (kAdjusted) {
    if (in.raw) factors.of_x = add_up_given<T>(in, at, max_x, scale, sums[kSumOfX]);
  }

  SplitWinner winner = {-infinity(), -1};
  if (draws) {
    if (in.gumbel) winner = draw_token<T, kAdjusted>(in, at, seed, position, center, temperature);
    else winner = draw_group(at, seed, position, fold<kVectors>(masses, Add()), Tokens::group(at.thread));
    winner = reduce_lanes(winner);
  }
  sums[kSumOfZ] = reduce_lanes(sums[kSumOfZ], Add());
  if (other_x || kAdjusted) sums[kSumOfX] = reduce_lanes(sums[kSumOfX], Add());
  if (in.entropy) sums[kSumWeighted] = reduce_lanes(sums[kSumWeighted], Add());
  sums[kCountFinite] = static_cast<double>(finite);
  if (in.sigma) {
#pragma unroll
    for (int i = 0; i < kSplitMoments; ++i) moments[i] = reduce_lanes(moments[i], Add());
  }
  if (lane == 0) {
#pragma unroll
    for (int i = 0; i < kSplitSums; ++i) shared.sums[warp][i] = sums[i];
#pragma unroll
    for (int i = 0; i < kSplitMoments; ++i) shared.moments[warp][i] = moments[i];
    shared.winner[warp] = winner;
  }
  __syncthreads();  // the warps' sums and winners are written
  if (warp != 0) return;

  const int splits = (static_cast<int>(in.whole_vocab) + kSplit - 1) / kSplit;
  double* const record = in.records + (at.row * splits + at.split) * kRecord;
  if (lane == 0) {
#pragma unroll
    for (int w = 1; w < kStatisticsWarps; ++w)
#pragma unroll
      for (int i = 0; i < kSplitSums; ++i) sums[i] += shared.sums[w][i];
    record[kMaxZ] = static_cast<double>(max);
    record[kArgmax] = static_cast<double>(at.split * kSplit + shared.argmax);  // of a greedy row
    sums[kSumOfZ] /= static_cast<double>(factors.of_z);
    record[kSumZ] = sums[kSumOfZ];
    record[kMaxX] = static_cast<double>(max_x);
    record[kSumX] = other_x || (kAdjusted && in.raw) ? sums[kSumOfX] / static_cast<double>(factors.of_x) : sums[kSumOfZ];
    record[kWeighted] = sums[kSumWeighted] * static_cast<double>(kLn2);
    record[kFinite] = sums[kCountFinite];
    if (in.sigma) write_moments(shared.moments, center, sums[kCountFinite], record);
  }
#pragma unroll
  for (int w = 1; w < kStatisticsWarps; ++w) winner = better(winner, shared.winner[w]);
  if (winner.id >= 0 && !in.gumbel) {
    winner.key = divide_fast(winner.key, factors.of_z);
    draw_member<T, kAdjusted>(in, at, seed, position, winner, scale, record);
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
      write_token<kAdjusted>(in, at, key, place, z_at<T, kAdjusted>(in, at, place), record);
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
constexpr int kWideBlocks = 6;
#endif

// Blocks that are to share a multiprocessor: as many as the tokens they hold in registers allow. AMD: a wavefront a SIMD.
template <class T, bool kAdjusted>
#if defined(__HIP__)
constexpr int kStatisticsBlocks = 4;
#else
constexpr int kStatisticsBlocks = kAdjusted ? 6 : sizeof(T) == 2 ? 10 : kWideBlocks;
#endif

// The splits of a tile, numbered row by row. A division takes as long as two tokens, hence its reciprocal.
struct SplitGrid {
  uint32_t splits, reciprocal;  // of a row; 2^32 / splits, rounded up

  explicit SplitGrid(int64_t vocab)
      : splits(static_cast<uint32_t>((vocab + kSplit - 1) / kSplit)),
        reciprocal(splits < 2 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + splits - 1) / splits)) {}

  // Of the place p < 2^31.
  __device__ __forceinline__ uint32_t row(uint32_t p) const {
    const uint32_t row = static_cast<uint32_t>(static_cast<uint64_t>(p) * reciprocal >> 32);
    return splits == 1 ? p : row - (row * splits > p);  // one too many at most
  }
};

template <class T, bool kAdjusted>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kStatisticsThreads, (kStatisticsBlocks<T, kAdjusted>))
    statistics_kernel(SamplingInputs in, SplitGrid grid) {
  const uint32_t p = blockIdx.x, row = grid.row(p);
  if (in.skip != nullptr && in.skip[row]) return;
  const int first = static_cast<int>(p - row * grid.splits) * kSplit, rest = static_cast<int>(in.vocab) - first;
  const uint32_t start = static_cast<uint32_t>(in.vocab_start) + static_cast<uint32_t>(first);
  split_statistics<T, kAdjusted>(
      in, {row, first, rest < kSplit ? rest : kSplit, static_cast<int>(start / kSplit), threadIdx.x});
}

}  // namespace rlkernel::RLKERNEL_DEVICE
