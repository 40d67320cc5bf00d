// The search among the tokens of a row for the z where a sum of counts, or of masses, ends.
//
// It is searched in the ordered bits of a float: a histogram of 256 bins, counts and integer masses, tells which bin holds the end,
// and is made again of that bin alone: two rounds for 16 bits, four for 32, less where the largest bits are known.
//
// All sums are of integers, so their order, that of the atomics on shared memory and the number of blocks and threads are free.
#pragma once

#include "rlkernel/sampling/walk.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

template <class T>
struct Search : Walk<T> {
  using Base = Walk<T>;
  using typename Base::Place, typename Base::Powers;
  using Base::kSize, Base::kBatch, Base::kResolution, Base::kIdle, Base::in, Base::shared, Base::again, Base::r;
  using Base::row, Base::vocab, Base::groups, Base::temperature, Base::powers, Base::place_in_cluster, Base::threads_of_cluster;
  using Base::walk, Base::mend, Base::each, Base::forget_list, Base::waiting;

  mutable int turn = 0, turn_of_bins = 0;  // of the copies in shared memory

  __device__ __forceinline__ Search(const SamplingInputs& in, FilterShared& shared) : Base(in, shared) {}

  // Two sums over the 32 lanes; every lane gets both.
  struct Pair {
    int64_t first, second;
  };
  __device__ __forceinline__ static Pair sum_pairs(const Pair& own) {
    const int64_t values[2] = {own.first, own.second};
    const int64_t sum = fold<kLanes>(values, Add());
    return {shuffle(sum, 0), shuffle(sum, kLanes / 2)};
  }

  // The sum over the cluster of what each warp has, and over the warps before this one.
  struct Scan {
    int64_t before, total;
  };
  __device__ __forceinline__ Scan scan_warps(int64_t of_warp) const {
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    if (threadIdx.x % kLanes == 0) shared.parts[turn][warp][0] = of_warp;
    __syncthreads();  // the warps' parts are written
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    int64_t part = lane < warps_of_block() ? shared.parts[turn][lane][0] : 0;
    Pair sums = sum_pairs({lane < warp ? part : 0, part});
    Scan scan = {sums.first, sums.second};
    if (cluster_size() > 1) {
      if (threadIdx.x == 0) shared.of_block[turn][0] = scan.total;
      cluster_barrier();  // the blocks' parts are written
      part = lane < static_cast<int>(cluster_size()) ? of_block(&shared.of_block[turn], lane)[0][0] : 0;
      sums = sum_pairs({lane < static_cast<int>(cluster_rank()) ? part : 0, part});
      scan = {scan.before + sums.first, sums.second};
    }
    turn ^= 1;
    return scan;
  }

  // Writes a variable of shared memory in each block of the cluster; one thread does, and a barrier of the cluster follows.
  template <class Value>
  __device__ __forceinline__ static void tell(Value* mine, const Value& value) {
#pragma unroll 1
    for (unsigned b = 0; b < cluster_size(); ++b) *of_block(mine, b) = value;
  }

  __device__ __forceinline__ Sums sum_cluster(const Sums& own) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes, warp = static_cast<int>(threadIdx.x) / kLanes;
    Pair sums = sum_pairs({own.count, own.mass});
    if (lane == 0) {
      shared.parts[turn][warp][0] = sums.first;
      shared.parts[turn][warp][1] = sums.second;
    }
    __syncthreads();  // the warps' sums are written
    const int64_t* part = shared.parts[turn][lane % kFinishWarps];
    sums = lane < warps_of_block() ? Pair{part[0], part[1]} : Pair{0, 0};
    sums = sum_pairs(sums);
    if (cluster_size() > 1) {
      if (threadIdx.x == 0) {
        shared.of_block[turn][0] = sums.first;
        shared.of_block[turn][1] = sums.second;
      }
      cluster_barrier();  // the blocks' sums are written
      sums = {0, 0};
      if (lane < static_cast<int>(cluster_size())) {
        part = *of_block(&shared.of_block[turn], lane);
        sums = {part[0], part[1]};
      }
      sums = sum_pairs(sums);
    }
    turn ^= 1;
    return {static_cast<int>(sums.first), sums.second};
  }

  // The id with the largest key over the cluster, of each warp's best, and of ties the lowest; `none` where no warp has one.
  struct Best {
    int64_t key, id;

    __device__ __forceinline__ void meet(const Best& other, int none) {
      if (other.id < none && (id == none || other.key > key || (other.key == key && other.id < id))) *this = other;
    }
  };
  __device__ __forceinline__ int best_of_warps(const Best& of_warp, int none) const {
    if (threadIdx.x % kLanes == 0) {
      int64_t* const part = shared.parts[turn][threadIdx.x / kLanes];
      part[0] = of_warp.key;
      part[1] = of_warp.id;
    }
    __syncthreads();  // the warps' best are written
    Best best = {0, none};
#pragma unroll 1
    for (int w = 0; w < warps_of_block(); ++w) best.meet({shared.parts[turn][w][0], shared.parts[turn][w][1]}, none);
    if (cluster_size() > 1) {
      if (threadIdx.x == 0) {
        shared.of_block[turn][0] = best.key;
        shared.of_block[turn][1] = best.id;
      }
      cluster_barrier();  // the blocks' best are written
#pragma unroll 1
      for (unsigned b = 0; b < cluster_size(); ++b) {
        const int64_t* const part = *of_block(&shared.of_block[turn], b);
        best.meet({part[0], part[1]}, none);
      }
    }
    turn ^= 1;
    return static_cast<int>(best.id);
  }

  // Adds the tokens to the histogram whose keys are in [low, high]: bins count down from `high`.
  struct Bins {
    uint32_t low, high;
    int shift;
    bool even;    // bins as wide as each other in z instead: the first look at a whole row
    float top, per_z;

    __device__ __forceinline__ int of(float z) const {
      if (even) return static_cast<int>(fminf((top - z) * per_z, static_cast<float>(kBins - 1)));  // NaN, of 0 * inf: the last
      return static_cast<int>((high - ordered(z)) >> shift);
    }
  };

  __device__ __forceinline__ void count_in(int bin, int64_t mass) const {
    Histogram& bins = shared.bins[turn_of_bins];
    atomic_add(&bins.count[bin], 1u);
    const uint32_t low = static_cast<uint32_t>(mass);
    const uint32_t carry = atomic_add(&bins.low[bin], low) > ~low ? 1u : 0u;
    const uint32_t high = static_cast<uint32_t>(mass >> 32) + carry;
    if (high != 0) atomic_add(&bins.high[bin], high);
  }

  // The tokens of the bins, of all of this walk.
  __device__ __forceinline__ void count_tokens(const Bins& bins) const {
    const float low = from_key(bins.low), above = from_key(bins.high + 1);
    const Powers exp = powers();
    walk(low, [&](const float(&z)[kSize], int id) {
      uint32_t inside = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) inside |= static_cast<uint32_t>(z[i] >= low && z[i] < above) << i;
      each(inside, z, id, [&](float value, int) { count_in(bins.of(value), Mass(exp(value)).value()); });
    });
  }

  __device__ __forceinline__ static Bins no_bins() { return {1, 0, 0, false, 0.0f, 0.0f}; }

  // Over the cluster: the sums of all tokens from a key on.
  __device__ __forceinline__ Sums sums_from(uint32_t key) const {
    const float floor = from_key(key);
    const Powers exp = powers();
    Sums own = {0, 0};
    uint32_t high = 0, low = 0, visited = 0;
    walk(floor, [&](const float(&z)[kSize], int) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const bool counts = z[i] >= floor;
        const Mass mass(counts ? exp(z[i]) : 0.0f);
        high += mass.high;
        low += mass.low;
        own.count += counts;
      }
      visited += kSize;
      if (visited == 1024) {  // a thread sees few enough tokens before the words run over
        own.mass += Mass::value(high - visited * Mass::kZero, low - visited * Mass::kZero);
        high = low = visited = 0;
      }
    });
    own.mass += Mass::value(high - visited * Mass::kZero, low - visited * Mass::kZero);
    return sum_cluster(own);
  }

  // 2^40 times the power of a token with less than 2^-17, to the nearest integer, plus 2^23's bits.
  static constexpr uint32_t kLightZero = 0x4B000000u;  // the bits of 2^23: adding that leaves the nearest integer in the low bits
  __device__ __forceinline__ static uint32_t light_word(float z, const Powers& exp) {
    return to_bits(fmaf(exp(z), 0x1p40f, from_bits(kLightZero)));
  }

  // This thread's part of the mass of the groups whose maximum is in [floor, heavy), where every token has less than 2^-17: one
  // word holds its mass, and no bin wants it.
  __device__ __forceinline__ int64_t light_mass(float floor, float heavy) const {
    const Powers exp = powers();
    int64_t sum = 0;
    this->template walk_batches<kBatch, false>(floor, heavy, [&](const Bytes16(&bytes)[kBatch], int) {
      uint32_t word = 0;
#pragma unroll
      for (int i = 0; i < kBatch * kSize; ++i) word += light_word(element<T>(bytes[i / kSize], i % kSize), exp);
      sum += word - kBatch * kSize * kLightZero;
    });
    return sum;
  }

  // This thread's part of the mass of the groups whose maximum reaches `from`, those of the bins counted in the histogram: of
  // tokens from `heavy` on and, where they have one, of those below, which have less than 2^-17 and are in no bin. Heavy ones take
  // eight times the instructions, and some lane has one nearly always: so they wait until there is one for every lane.
  __device__ __forceinline__ int64_t heavy_mass(const Bins& bins, float from, float heavy, bool all) const {
    const float low = from_key(bins.low), above = from_key(bins.high + 1);
    const Powers exp = powers(), light = {all ? exp.max : infinity(), exp.scale};
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    int64_t sum = 0;
    int count = 0;  // of those that wait
    const auto weigh = [&](float z) {
      const int64_t mass = Mass(exp(z)).value();
      sum += mass;
      if (z >= low && z < above) count_in(bins.of(z), mass);
    };
    if constexpr (!kLists) {
      walk(from, [&](const float(&z)[kSize], int id) {
        uint32_t word = 0, mine = 0;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          mine |= static_cast<uint32_t>(z[i] >= heavy) << i;
          word += z[i] < heavy ? light_word(z[i], light) : kLightZero;
        }
        sum += word - kSize * kLightZero;
        each(mine, z, id, [&](float value, int) { weigh(value); });
      });
      return sum;
    }
    forget_list(shared);  // its memory is needed
    this->template walk_batches<2, true>(from, nan(), [&](Bytes16(&bytes)[2], int id) {
      mend(bytes, id);
      const auto z_of = [&](int i) { return element<T>(bytes[i / kSize], i % kSize); };
      uint32_t word = 0;  // the mass of the light ones, and from 2^27 on how many are not
#pragma unroll
      for (int i = 0; i < 2 * kSize; ++i) {
        const uint32_t own = hidden(light_word(z_of(i), light));  // of each, or nvcc makes it a branch that waits for every power
        word += z_of(i) >= heavy ? kLightZero + (1u << 27) : own;
      }
      word -= 2 * kSize * kLightZero;
      sum += word % (1u << 27);
      const int own = static_cast<int>(word >> 27), upto = running_sum(own);
      waiting(count + upto).put(bytes, heavy);
      count += shuffle(upto, kLanes - 1);
      sync_lanes();  // they are written
#pragma unroll 1
      for (; count >= kLanes; count -= kLanes) weigh(waiting(count - kLanes + lane).z());
      sync_lanes();  // those that have been weighed are overwritten
    });
    if (lane < count) weigh(waiting(lane).z());
    return sum;
  }

  // Over the cluster: the mass of all tokens from a key on, those of the bins counted in the histogram. `all`: those below the key
  // have none.
  __device__ __forceinline__ int64_t whole_mass(const Bins& bins, uint32_t key, bool all) const {
    const float floor = from_key(key);
    float heavy = floor;
    if (all) heavy = fmaxf(floor, fminf(row().max - 18.0f / shared.scale, from_key(bins.low)));
    const bool apart = in.bitmask == nullptr && heavy > floor;
    int64_t own = heavy_mass(bins, apart ? heavy : floor, heavy, all);
    if (apart) own += light_mass(floor, heavy);
    return scan_warps(reduce_lanes(own, Add())).total;
  }

  // The groups' maxima, counted.
  __device__ __forceinline__ void count_groups(const Bins& bins) const {
    const int groups = this->groups();
    const float* const group_max = in.group_max + static_cast<int64_t>(r()) * groups;
    const float low = from_key(bins.low), above = from_key(bins.high + 1);
    constexpr int kAtOnce = 4;  // on their way
    const int threads = static_cast<int>(threads_of_cluster());
    for (int g = static_cast<int>(place_in_cluster()); g < groups; g += kAtOnce * threads) {
      float z[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) z[i] = g + i * threads < groups ? group_max[g + i * threads] : nan();
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (z[i] >= low && z[i] < above) atomic_add(&shared.bins[turn_of_bins].count[bins.of(z[i])], 1u);
    }
  }

  // The histogram of this turn. Nobody reads it: that was two turns ago.
  __device__ __forceinline__ void clear() const {
    Histogram& bins = shared.bins[turn_of_bins];
    for (unsigned bin = threadIdx.x; bin < kBins; bin += threads_of_block()) bins.count[bin] = bins.low[bin] = bins.high[bin] = 0;
    __syncthreads();  // the bins are empty
  }

  // The histogram of all blocks, when all have counted their tokens. `met`: all threads of the cluster have met since.
  __device__ __forceinline__ const Histogram& counted(bool met = false) const {
    const int own = turn_of_bins;
    turn_of_bins ^= 1;
    if (!met) cluster_barrier();  // the bins are full
    if (cluster_size() == 1) return shared.bins[own];
    Histogram& all = shared.bins[FilterShared::kOfCluster];
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kBins; i += static_cast<int>(threads_of_block())) {  // a thread for the counts, another for the masses
      const int bin = i % kBins;
      uint32_t count = 0;
      int64_t mass = 0;
#pragma unroll 4  // reads of other blocks take long
      for (unsigned b = 0; b < cluster_size(); ++b) {
        const Histogram& of_its = *of_block(&shared.bins[own], b);
        if (i < kBins) count += of_its.count[bin];
        else mass += of_its.at(bin).mass;
      }
      if (i < kBins) {
        all.count[bin] = count;
      } else {
        all.low[bin] = static_cast<uint32_t>(mass);
        all.high[bin] = static_cast<uint32_t>(static_cast<uint64_t>(mass) >> 32);
      }
    }
    __syncthreads();  // the cluster's bins are full
    return all;
  }

  // Each warp for itself: the bin in which the sum that starts with `above` reaches the target.
  __device__ __forceinline__ Crossing cross(const Histogram& bins, Sums above, bool by_mass, int64_t target, int* found) const {
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    Sums own = {0, 0};  // of eight bins
#pragma unroll
    for (int i = 0; i < kBinsPerLane; ++i) own.add(bins.at(lane * kBinsPerLane + i));
    Sums upto = {above.count + running_sum(own.count), above.mass + running_sum(own.mass)};
    const uint32_t lanes = ballot((by_mass ? upto.mass : upto.count) >= target);
    if (lanes == 0) return {false, 0, {shuffle(upto.count, kLanes - 1), shuffle(upto.mass, kLanes - 1)}, {0, 0}};
    int source = lowest_bit(lanes);
    above = {shuffle(upto.count - own.count, source), shuffle(upto.mass - own.mass, source)};
    const int bin = source * kBinsPerLane + lane % kBinsPerLane;  // the eight again, a lane each
    own = bins.at(bin);
    upto = {above.count + running_sum(own.count), above.mass + running_sum(own.mass)};
    source = lowest_bit(ballot((by_mass ? upto.mass : upto.count) >= target));
    *found = shuffle(bin, source);
    return {true, 0, {shuffle(upto.count - own.count, source), shuffle(upto.mass - own.mass, source)},
            {shuffle(own.count, source), shuffle(own.mass, source)}};
  }

  // The lowest key that `holds`, which is true from some key on, in [low, high]; high + 1 where there is none. The lanes of a
  // warp try 32 keys at a time, and all must call it: halves would be 32 steps of which each waits for the one before.
  template <class Holds>
  __device__ __forceinline__ static uint32_t first_key(uint32_t low, uint32_t high, Holds holds) {
    const uint32_t lane = threadIdx.x % kLanes;
    ++high;
    while (low < high) {
      const uint32_t step = (high - low - 1) / kLanes + 1, key = low + lane * step;
      const uint32_t held = ballot(key >= high || holds(from_key(key)));
      const uint32_t first = held != 0 ? static_cast<uint32_t>(lowest_bit(held)) : kLanes;
      if (held != 0 && low + first * step < high) high = low + first * step;
      if (first > 0) low += (first - 1) * step + 1;
    }
    return low;
  }

  __device__ __forceinline__ Bins bins_of(uint32_t low, uint32_t high, bool even) const {
    // whole bins, with no value that was not in the interval
    low = low >> 31 != 0 ? (low + kIdle) & ~kIdle : low & ~kIdle;
    high = high >> 31 != 0 || (high & kIdle) == kIdle ? high | kIdle : (high & ~kIdle) - 1;
    int shift = kResolution;
    while ((high - low) >> shift >= kBins) ++shift;
    const float top = row().max, range = top - from_key(low);
    return {low, high, shift, even && shift > kResolution, top, static_cast<float>(kBins) / range};
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
    for (;;) {
      const Bins bins = bins_of(low, high, false);
      clear();
      count_tokens(bins);
      int bin = 0;
      Crossing crossing = cross(counted(), above, by_mass, target, &bin);
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
