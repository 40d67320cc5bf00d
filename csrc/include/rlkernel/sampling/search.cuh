// The tokens of a row read a second time, and the search among them for the z where a sum of counts, or of masses, ends.
//
// One block a row. That z is searched in the ordered bits of a float: a histogram of 256 bins, counts and integer masses, tells
// which bin holds the end, and is made again of that bin alone: two rounds for 16 bits, four for 32, less where the largest
// bits are known. Only groups of 64 tokens whose maximum reaches the interval are read: V / 64 floats tell which.
//
// All sums are of integers, so their order, and that of the atomics on shared memory, is free.
#pragma once

#include "rlkernel/sampling/finish.cuh"
#include "rlkernel/sampling/mass.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kFinishThreads = 512, kFinishWarps = kFinishThreads / kLanes;
constexpr int kBins = 256, kBinsPerLane = kBins / kLanes;

// Masses of 64 bits are added as two words: CUDA has no 64-bit addition in shared memory but a loop of compare-and-swap.
struct FilterShared {
  uint32_t count[kBins], low[kBins], high[kBins];
  int64_t parts[kFinishWarps][2];
  RowSummary row;
  Drawn token;
  int last;
};

template <class T>
struct Search {
  static constexpr int kSize = kVector<T>, kSpan = kGroup / kSize, kPick = kLanes / kSpan;
  // The low bits of a key that say nothing: 0 where z is positive, 1 where it is negative.
  static constexpr int kResolution = sizeof(T) == 4 ? 0 : kIsBf16<T> ? 16 : 13;
  static constexpr uint32_t kIdle = (uint32_t{1} << kResolution) - 1;

  const SamplingInputs& in;
  FilterShared& shared;
  const RowSummary& row;
  Logits<T> logits;
  const float* group_max;
  int align, groups, first, last;  // of this warp: consecutive groups
  float temperature, scale;

  __device__ __forceinline__ Search(const SamplingInputs& in, FilterShared& shared, const RowSummary& row, int64_t r)
      : in(in), shared(shared), row(row),
        logits(in, in.adjusted != nullptr ? static_cast<const void*>(in.adjusted) : in.logits,
               in.adjusted != nullptr ? in.adjusted_stride : in.row_stride, r),
        align(alignment_of(logits.z)), groups((logits.vocab + kGroup - 1) / kGroup),
        temperature(softmax_temperature(of_row(in.temperature, r))), scale(power_scale(temperature)) {
    group_max = in.group_max + r * groups;
    const int each = ((groups + kFinishWarps - 1) / kFinishWarps + kPick - 1) / kPick * kPick;
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    first = warp * each < groups ? warp * each : groups;
    last = first + each < groups ? first + each : groups;
  }

  __device__ __forceinline__ float exp_of(float z) const { return exp2_fast((z - row.max) * scale); }

  // Calls visit(z, id) for vectors of this warp's tokens, ids ascending from lane to lane and from call to call, in those
  // groups whose maximum reaches `lowest`. All lanes make all calls. Where there is no token, z is NaN.
  template <class Visit>
  __device__ __forceinline__ void walk(float lowest, Visit visit) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    for (int base = first; base < last; base += kLanes) {
      const int group = base + lane;
      uint32_t mask = ballot(group < last && group_max[group < last ? group : base] >= lowest);
      while (mask != 0) {
        uint32_t mine = mask;
#pragma unroll
        for (int i = 0; i < kPick; ++i) {
          if (i == lane / kSpan) mine = mask;
          mask &= mask - 1;  // 0 stays 0
        }
        float z[kSize];
        const int id = mine != 0 ? (base + lowest_bit(mine)) * kGroup + lane % kSpan * kSize : logits.vocab;
        const int rest = logits.vocab - id;
        const Bytes16 bytes = read_vector(logits.z + id, rest, align);
        const uint32_t allowed = rest > 0 ? logits.allowed(id) : 0;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float value = (allowed >> i & 1u) != 0 ? element<T>(bytes, i) : -infinity();
          z[i] = i < rest ? value : nan();
        }
        visit(z, id);
      }
    }
  }

  // The sum over the block of what each thread has, and over the warps before this one.
  struct Scan {
    int64_t before, total;
  };
  __device__ __forceinline__ Scan scan_warps(int64_t of_warp) const {
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    if (threadIdx.x % kLanes == 0) shared.parts[warp][0] = of_warp;
    __syncthreads();  // the warps' parts are written
    Scan scan = {0, 0};
    for (int w = 0; w < kFinishWarps; ++w) {
      if (w < warp) scan.before += shared.parts[w][0];
      scan.total += shared.parts[w][0];
    }
    __syncthreads();  // the warps' parts are read
    return scan;
  }

  __device__ __forceinline__ Sums sum_block(Sums own) const {
    const int64_t values[2] = {own.count, own.mass};
    const int64_t sum = fold<kLanes>(values, Add());
    const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
    if (lane % (kLanes / 2) == 0) shared.parts[warp][lane / (kLanes / 2)] = sum;
    __syncthreads();  // the warps' sums are written
    Sums total = {0, 0};
    for (int w = 0; w < kFinishWarps; ++w) {
      total.count += shared.parts[w][0];
      total.mass += shared.parts[w][1];
    }
    __syncthreads();  // the warps' sums are read
    return total;
  }

  // Adds the tokens to the histogram whose keys are in [low, high]: bins count down from `high`.
  struct Bins {
    uint32_t low, high;
    int shift;
    bool even;    // bins as wide as each other in z instead: the first look at a whole row
    float top, per_z;

    __device__ __forceinline__ int of(float z) const {
      if (even) {
        const float distance = (top - z) * per_z;
        return distance < kBins - 1 ? static_cast<int>(distance) : kBins - 1;
      }
      return static_cast<int>((high - ordered(z)) >> shift);
    }
  };

  __device__ __forceinline__ void count_in(int bin, int64_t mass) const {
    atomic_add(&shared.count[bin], 1u);
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t carry = atomic_add(&shared.low[bin], low) > ~low ? 1u : 0u;
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
    if (high != 0) atomic_add(&shared.high[bin], high);
  }

  // Tokens: the histogram, and with kTotal the sums of all with z >= floor, in groups whose maximum reaches `from`.
  template <bool kTotal>
  __device__ __forceinline__ Sums count_tokens(const Bins& bins, float floor, float from) const {
    const float low = from_key(bins.low), above = from_key(bins.high + 1);
    Sums total = {0, 0};
    uint32_t high_sum = 0, low_sum = 0, visited = 0;
    walk(from, [&](const float(&z)[kSize], int) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const bool inside = z[i] >= low && z[i] < above;
        if constexpr (kTotal) {
          const bool counts = z[i] >= floor;
          const Mass mass(counts ? exp_of(z[i]) : 0.0f);
          high_sum += mass.high;
          low_sum += mass.low;
          total.count += counts;
          if (inside) count_in(bins.of(z[i]), mass.value());
        } else {
          if (inside) count_in(bins.of(z[i]), Mass(exp_of(z[i])).value());
        }
      }
      if constexpr (kTotal) {  // a thread sees few enough tokens before the words run over
        visited += kSize;
        if (visited == 1024) {
          total.mass += Mass::value(high_sum - visited * Mass::kZero, low_sum - visited * Mass::kZero);
          high_sum = low_sum = visited = 0;
        }
      }
    });
    if constexpr (kTotal) total.mass += Mass::value(high_sum - visited * Mass::kZero, low_sum - visited * Mass::kZero);
    return total;
  }

  __device__ __forceinline__ static Bins no_bins() { return {1, 0, 0, false, 0.0f, 0.0f}; }

  // Over the block: the sums of all tokens from a key on.
  __device__ __forceinline__ Sums sums_from(uint32_t key) const {
    return sum_block(count_tokens<true>(no_bins(), from_key(key), from_key(key)));
  }

  // This thread's part of the mass of the groups whose maximum is in [floor, heavy), where every token has less than 2^-17: one
  // word holds its mass, and no bin wants it.
  __device__ __forceinline__ int64_t light_mass(float floor, float heavy) const {
    constexpr int kBatch = 16 / static_cast<int>(sizeof(T)), kGroups = kBatch * kPick;  // vectors on their way
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    constexpr uint32_t kZero = 0x4B000000u;  // the bits of 2^23: adding that leaves the nearest integer in the low bits
    int64_t sum = 0;
    for (int base = first; base < last; base += kGroups) {
      const int own = base + lane;
      const float peak = lane < kGroups && own < last ? group_max[own] : -infinity();
      const uint32_t light = ballot(peak >= floor && peak < heavy);
      if (light == 0) continue;
      Bytes16 bytes[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const int group = k * kPick + lane / kSpan, id = (base + group) * kGroup + lane % kSpan * kSize;
        const int rest = (light >> group & 1u) != 0 ? logits.vocab - id : 0;
        if (rest >= kSize) bytes[k] = read_vector(logits.z + id, rest, align);
        else bytes[k] = rest > 0 ? read_end(logits.z + id, rest) : nothing<T>();
      }
      uint32_t word = 0;
#pragma unroll
      for (int k = 0; k < kBatch; ++k)
#pragma unroll
        for (int i = 0; i < kSize; ++i)
          word += to_bits(fmaf(exp_of(element<T>(bytes[k], i)), 0x1p40f, from_bits(kZero)));
      sum += word - kBatch * kSize * kZero;
    }
    return sum;
  }

  // Over the block: the mass of all tokens, those of the bins counted in the histogram. `low`: no token below this key has one.
  __device__ __forceinline__ int64_t whole_mass(const Bins& bins, uint32_t low) const {
    const float floor = from_key(low);
    float heavy = floor;
    if (logits.mask == nullptr) heavy = fmaxf(floor, fminf(row.max - 18.0f / scale, from_key(bins.low)));
    Sums own = count_tokens<true>(bins, floor, heavy);
    if (heavy > floor) own.mass += light_mass(floor, heavy);
    return sum_block(own).mass;
  }

  // The groups' maxima, counted.
  __device__ __forceinline__ void count_groups(const Bins& bins) const {
    for (int g = threadIdx.x; g < groups; g += kFinishThreads) {
      const float z = group_max[g];
      if (z >= from_key(bins.low) && z < from_key(bins.high + 1)) atomic_add(&shared.count[bins.of(z)], 1u);
    }
  }

  __device__ __forceinline__ void clear() const {
    __syncthreads();  // what was there is read
    for (int bin = threadIdx.x; bin < kBins; bin += kFinishThreads) shared.count[bin] = shared.low[bin] = shared.high[bin] = 0;
    __syncthreads();  // the bins are empty
  }

  // Each warp for itself: the bin in which the sum that starts with `above` reaches the target.
  __device__ __forceinline__ Crossing cross(Sums above, bool by_mass, int64_t target, int* bin_found) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    Sums bins[kBinsPerLane], own = {0, 0};
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) {
      const int bin = lane * kBinsPerLane + i;
      bins[i] = {shared.count[bin], static_cast<int64_t>(static_cast<uint64_t>(shared.high[bin]) << 32 | shared.low[bin])};
      own.count += bins[i].count;
      own.mass += bins[i].mass;
    }
    Sums before = {above.count + running_sum(own.count) - own.count, above.mass + running_sum(own.mass) - own.mass};
    const Sums total = {shuffle(before.count + own.count, kLanes - 1) - above.count,
                        shuffle(before.mass + own.mass, kLanes - 1) - above.mass};
    bool here = false;
    int bin = 0;
    Sums at = {0, 0};
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) {
      const bool reaches = (by_mass ? before.mass + bins[i].mass : before.count + bins[i].count) >= target;
      if (!here && reaches) {
        here = true;
        bin = lane * kBinsPerLane + i;
        at = bins[i];
      }
      if (!here) {
        before.count += bins[i].count;
        before.mass += bins[i].mass;
      }
    }
    const uint32_t lanes = ballot(here);
    const int source = lanes != 0 ? lowest_bit(lanes) : 0;
    *bin_found = shuffle(bin, source);
    return {lanes != 0, 0, {shuffle(before.count, source), shuffle(before.mass, source)},
            {shuffle(at.count, source), shuffle(at.mass, source)}, total};
  }

  // The lowest key that `holds`, which is true from some key on, in [low, high]; high + 1 where there is none.
  template <class Holds>
  __device__ __forceinline__ static uint32_t first_key(uint32_t low, uint32_t high, Holds holds) {
    ++high;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (holds(from_key(middle))) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  __device__ __forceinline__ Bins bins_of(uint32_t low, uint32_t high, bool even) const {
    // whole bins, with no value that was not in the interval
    low = low >> 31 != 0 ? (low + kIdle) & ~kIdle : low & ~kIdle;
    high = high >> 31 != 0 || (high & kIdle) == kIdle ? high | kIdle : (high & ~kIdle) - 1;
    int shift = kResolution;
    while ((high - low) >> shift >= kBins) ++shift;
    const float range = row.max - from_key(low);
    return {low, high, shift, even && shift > kResolution, row.max, static_cast<float>(kBins) / range};
  }

  // Goes on inside the bin that was found; true where it holds one value.
  __device__ __forceinline__ bool narrow(const Bins& bins, int bin, uint32_t& low, uint32_t& high) const {
    if (bins.even) {
      const uint32_t l = bins.low, h = bins.high;
      low = first_key(l, h, [&](float z) { return bins.of(z) <= bin; });
      high = bin == 0 ? h : first_key(l, h, [&](float z) { return bins.of(z) <= bin - 1; }) - 1;
      return low == high;
    }
    const uint32_t width = (uint32_t{1} << bins.shift) - 1;
    high = bins.high - (static_cast<uint32_t>(bin) << bins.shift);
    low = high - bins.low > width ? high - width : bins.low;
    return bins.shift == kResolution;
  }

  // The key of the one value in an interval as wide as a bin of the last round.
  __device__ __forceinline__ static uint32_t key_in(uint32_t low, uint32_t high) { return low >> 31 != 0 ? low : high; }

  // Where the sum of counts, or of masses, over the tokens in [low, high] reaches the target.
  __device__ __forceinline__ Crossing search(uint32_t low, uint32_t high, bool by_mass, int64_t target, Sums above) const {
    Crossing crossing = {};
    for (bool is_first = true;; is_first = false) {
      const Bins bins = bins_of(low, high, false);
      clear();
      count_tokens<false>(bins, 0.0f, from_key(bins.low));
      __syncthreads();  // the bins are full
      int bin;
      const Sums total = crossing.total;
      crossing = cross(above, by_mass, target, &bin);
      if (!is_first) crossing.total = total;
      if (!crossing.found) return crossing;
      above = crossing.above;
      if (narrow(bins, bin, low, high)) {
        crossing.key = key_in(low, high);
        return crossing;
      }
    }
  }
};

}  // namespace rlkernel::RLKERNEL_DEVICE
