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

#include "rlkernel/reduce.cuh"
#include "rlkernel/sampling_row.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kStatisticsThreads = 64, kStatisticsWarps = kStatisticsThreads / kLanes;

struct SplitPlace {  // of a split
  int64_t row;
  int first, count;  // tokens, from the start of the tile
  int64_t split;     // of the whole vocabulary
  int thread;        // threadIdx.x, in a way that leaves nothing which follows from it to be kept from split to split
};

enum SplitSum : int { kSumOfZ = 0, kSumOfX = 1, kSumWeighted = 2, kCountFinite = 3, kSums = 4 };
enum SplitMoment : int { kSumApart = 0, kSumSquares = 1, kMoments = 2 };  // of z - max z

// What a block's threads tell each other. Each member is written before a barrier and read after it, and not written again
// until the next barrier but one: a block goes on to its next split without another.
struct SplitShared {
  float max[kStatisticsWarps];
  int argmax;
  double sums[kStatisticsWarps][kSums], moments[kStatisticsWarps][kMoments];
  float best[kStatisticsWarps];
  int winner[kStatisticsWarps];
};

// A thread's tokens: vector k starts at thread * kSize + step(k) of the split, so that a group lies in kVectors consecutive
// threads. Unaligned rows are read by narrower reads of the same tokens.
template <class T>
struct SplitLayout {
  static constexpr int kSize = kVector<T>, kVectors = kSplit / kStatisticsThreads / kSize;
  static_assert(kVectors * kSize == kGroup, "a lane ends with one group");

  // A constant once the loop over k is unrolled, where the places themselves would fill registers.
  static __device__ __forceinline__ constexpr int step(int k) { return k * kStatisticsThreads * kSize; }
  static __device__ __forceinline__ int start(int thread) { return thread * kSize; }
  // The group of the split that this lane has after a fold over kVectors lanes.
  static __device__ __forceinline__ int group(int thread) {
    return thread % kVectors * (kStatisticsThreads / kVectors) + thread / kVectors;
  }
};

// Both kinds of tokens can `forget` what was computed from them: adding a zero that the compiler does not know of keeps it from
// holding 64 converted numbers from one loop over them to another, which would not fit the registers.

// The logits as given, kept as they lie in memory: 16-bit ones take half the registers so. Behind the end: -inf.
template <class T>
struct GivenTokens : SplitLayout<T> {
  using Layout = SplitLayout<T>;
  using Layout::kSize, Layout::kVectors, Layout::step, Layout::start;
  Bytes16 bytes[kVectors];

  __device__ __forceinline__ float z(int k, int i) const { return element<T>(bytes[k], i); }
  __device__ __forceinline__ void forget(uint32_t zero) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes[k].word[i] += zero;
  }
  __device__ __forceinline__ void extremes_of(int k, float& largest, float& least) const {
    extremes<T>(bytes[k], largest, least);
  }

  template <int kAlign, bool kWhole>
  __device__ __forceinline__ void read(const T* first, int count, int thread) {
    const char* own = reinterpret_cast<const char*>(first + start(thread));
    const int rest = count - start(thread), last = count / kSize * kSize;
    Bytes16 end = nothing<T>();
    if (!kWhole && last < count && last / kSize % kStatisticsThreads == thread)
      end = read_end(first + last, count - last);  // of one thread: all other vectors are whole or behind the end
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (kWhole || step(k) + kSize <= rest) bytes[k] = read_again<kAlign>(own + step(k) * static_cast<int>(sizeof(T)));
      else bytes[k] = step(k) < rest ? end : nothing<T>();
    }
  }

  template <int kAlign>
  __device__ __forceinline__ void read(const T* first, int count, int thread) {
    if (count == kSplit) read<kAlign, true>(first, count, thread);
    else read<kAlign, false>(first, count, thread);
  }

  __device__ __forceinline__ void read(const T* first, int count, int thread) {
    const int align = alignment_of(first);
    if (align == 16) read<16>(first, count, thread);
    else if (sizeof(T) == 4 || align == 4) read<4>(first, count, thread);
    else read<sizeof(T) == 2 ? 2 : 4>(first, count, thread);
  }
};

// z where it is not x.
template <class T>
struct AdjustedTokens : SplitLayout<T> {
  using Layout = SplitLayout<T>;
  using Layout::kSize, Layout::kVectors, Layout::step, Layout::start;
  float values[kVectors][kSize];

  __device__ __forceinline__ float z(int k, int i) const { return values[k][i]; }
  __device__ __forceinline__ void forget(uint32_t zero) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[k][i] = from_bits(to_bits(values[k][i]) + zero);
  }
  __device__ __forceinline__ void extremes_of(int k, float& largest, float& least) const {
    largest = least = values[k][0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) {
      largest = fmaxf(largest, values[k][i]);
      least = fminf(least, values[k][i]);
    }
  }

  // Sums x on the way, whose maximum is another.
  __device__ __forceinline__ Softmax read(const SamplingInputs& in, const SplitPlace& at, bool& bad) {
    GivenTokens<T> x;
    x.read(static_cast<const T*>(in.logits) + at.row * in.row_stride + at.first, at.count, at.thread);
    const Logits<float> adjusted(in, in.adjusted, in.adjusted_stride, at.row);
    const float* own = adjusted.z + at.first + start(at.thread);
    const bool vectors = at.count == kSplit && alignment_of(own) == 16;
    Softmax given = nothing_seen();
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int rest = at.count - start(at.thread) - step(k);
      float peak = -infinity(), sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[k][i] = x.z(k, i);
        bad = bad || !(values[k][i] < infinity());
        peak = fmaxf(peak, values[k][i]);
      }
      if (in.raw) {
        if (peak > given.max) given = raised(given, peak, kLog2E);
        const float center = given.max == -infinity() ? 0.0f : given.max;
#pragma unroll
        for (int i = 0; i < kSize; ++i) sum += exp2_fast((values[k][i] - center) * kLog2E);
        given.sum += static_cast<double>(sum);
      }
      if (in.adjusted != nullptr) {
        if (vectors) {
#pragma unroll
          for (int i = 0; i < kSize; i += 4) {
            const Bytes16 four = read_again<16>(reinterpret_cast<const char*>(own + step(k) + i));
#pragma unroll
            for (int j = 0; j < 4; ++j) values[k][i + j] = from_bits(four.word[j]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[k][i] = i < rest ? own[step(k) + i] : -infinity();
        }
      }
      const uint32_t allowed = rest > 0 ? adjusted.allowed(at.first + start(at.thread) + step(k)) : ~0u;
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[k][i] = (allowed >> i & 1u) != 0 ? values[k][i] : -infinity();
    }
    return given;
  }
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
                                       double (&sums)[kSums]) {
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
__device__ __forceinline__ void add_moments(const Tokens& tokens, float center, double (&moments)[kMoments]) {
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
__device__ __forceinline__ void write_moments(const double (&parts)[kStatisticsWarps][kMoments], float center, double finite,
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
  double sums[kSums] = {}, moments[kMoments] = {};
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
  if (lane % (kLanes / kSums) == 0) shared.sums[warp][lane / (kLanes / kSums)] = sum;
  if (in.sigma) {
    const double moment = fold<kLanes>(moments, Add());
    if (lane % (kLanes / kMoments) == 0) shared.moments[warp][lane / (kLanes / kMoments)] = moment;
  }
  if (lane == 0) {
    shared.best[warp] = winner.key;
    shared.winner[warp] = winner.id;
  }
  __syncthreads();  // the warps' sums and winners are written
  if (warp != 0) return;

  if (lane < kSums) {
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
