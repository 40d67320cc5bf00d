// The tokens of a row read a second time, and the search among them for the z where a sum of counts, or of masses, ends.
//
// One block a row or, of few rows, a cluster of blocks; smaller blocks of many rows. That z is searched in the ordered bits of a float: a histogram of 256
// bins, counts and integer masses, tells which bin holds the end, and is made again of that bin alone: two rounds for 16 bits,
// four for 32, less where the largest bits are known. Only groups of 64 tokens whose maximum reaches the interval are read:
// V / 64 floats tell which.
//
// All sums are of integers, so their order, that of the atomics on shared memory and the number of blocks and threads are free.
#pragma once

#include "rlkernel/cluster.cuh"
#include "rlkernel/sampling/finish.cuh"
#include "rlkernel/sampling/mass.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// Of a block, at most: the launch decides.
constexpr int kFinishThreads = 512, kFinishWarps = kFinishThreads / kLanes;
constexpr int kBins = 256, kBinsPerLane = kBins / kLanes;

// Masses of 64 bits are added as two words: CUDA has no 64-bit addition in shared memory but a loop of compare-and-swap.
struct Histogram {
  uint32_t count[kBins], low[kBins], high[kBins];

  __device__ __forceinline__ Sums at(int bin) const {
    return {static_cast<int>(count[bin]), static_cast<int64_t>(static_cast<uint64_t>(high[bin]) << 32 | low[bin])};
  }
};

// What threads and blocks tell each other comes in turns, of which each has a barrier of all between writing and reading: with
// two copies what is written in a turn does not overwrite what somebody still reads of the turn before.
struct FilterShared {
  static constexpr int kOfCluster = 2;
  Histogram bins[3];  // of this block, in turns; of the cluster
  int64_t parts[2][kFinishWarps][2], of_block[2][2];
  uint32_t r;
  RowSummary row;
  float temperature, scale;  // of its powers
  bool valid;
  uint32_t lowest;  // key that the thresholds keep
  bool cuts;        // they are on
  Prefix prefix;
  KeptSet kept;
  Drawn token;
  int last;
};

__device__ __forceinline__ unsigned threads_of_block() {
#if defined(__HIP__) && !defined(RLKERNEL_EMULATION)
  return kFinishThreads;
#else
  return blockDim.x;
#endif
}
__device__ __forceinline__ int warps_of_block() { return static_cast<int>(threads_of_block()) / kLanes; }

template <class T>
struct Search {
  static constexpr int kSize = kVector<T>, kSpan = kGroup / kSize, kPick = kLanes / kSpan;
  // The low bits of a key that say nothing: 0 where z is positive, 1 where it is negative.
  static constexpr int kResolution = sizeof(T) == 4 ? 0 : kIsBf16<T> ? 16 : 13;
  static constexpr uint32_t kIdle = (uint32_t{1} << kResolution) - 1;

  const SamplingInputs& in;
  FilterShared& shared;
  mutable int turn = 0, turn_of_bins = 0;  // of the copies in shared memory

  __device__ __forceinline__ Search(const SamplingInputs& in, FilterShared& shared) : in(in), shared(shared) {}

  // What all threads know of the row is read from shared memory where it is needed: kept from one walk to the next it would fill
  // the registers of all that lies between. Hence volatile; clang for AMD forgets of a volatile read that it is of shared memory.
  template <class Value>
  __device__ __forceinline__ static Value again(const Value& value) {
#if defined(__HIP__) && !defined(RLKERNEL_EMULATION)
    return __hip_atomic_load(&value, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
#else
    return *const_cast<const volatile Value*>(&value);
#endif
  }
  __device__ __forceinline__ uint32_t r() const { return again(shared.r); }

  __device__ __forceinline__ const RowSummary& row() const { return shared.row; }
  __device__ __forceinline__ int vocab() const { return static_cast<int>(in.vocab); }
  __device__ __forceinline__ int groups() const { return (vocab() + kGroup - 1) / kGroup; }
  __device__ __forceinline__ float temperature() const { return again(shared.temperature); }

  // exp((z - max z) / T)
  struct Powers {
    float max, scale;
    __device__ __forceinline__ float operator()(float z) const { return exp2_fast((z - max) * scale); }
  };
  __device__ __forceinline__ Powers powers() const { return {again(row().max), again(shared.scale)}; }

  // What a warp has to know of the row to read it, and the groups that it reads: consecutive ones. Found again for each walk.
  struct Place {
    Logits<T> logits;
    const float* group_max;
    bool aligned;
    int first, last;

    __device__ __forceinline__ Place(const SamplingInputs& in, uint32_t r, int groups)
        : logits(in, in.adjusted != nullptr ? static_cast<const void*>(in.adjusted) : in.logits,
                 in.adjusted != nullptr ? in.adjusted_stride : in.row_stride, r),
          group_max(in.group_max + static_cast<int64_t>(r) * groups), aligned(alignment_of(logits.z) == 16) {
      const unsigned in_block = threads_of_block() / kLanes;
      const int shift = lowest_bit(cluster_size() * in_block), warps = 1 << shift;  // a power of 2
      const int each = (((groups + warps - 1) >> shift) + kPick - 1) / kPick * kPick;
      const int warp = static_cast<int>(cluster_rank() * in_block + hidden(threadIdx.x) / kLanes);
      first = warp * each < groups ? warp * each : groups;
      last = first + each < groups ? first + each : groups;
    }

    __device__ __forceinline__ float peak_at(int group) const { return group < last ? group_max[group] : nan(); }

    // The rows of odd vocabularies start anywhere, and are read token by token: an instruction more for each, where a way of
    // its own for every alignment is a third of the kernel's code.
    __device__ __forceinline__ Bytes16 read(int id) const {
      const int rest = logits.vocab - id;
      if (aligned && rest >= kSize) return read_again<16>(reinterpret_cast<const char*>(logits.z + id));
      return read_few(logits.z + id, rest);
    }
  };
  __device__ __forceinline__ Place place() const { return Place(in, r(), groups()); }

  // Of this thread among all of the cluster.
  __device__ __forceinline__ static unsigned place_in_cluster() { return cluster_rank() * threads_of_block() + threadIdx.x; }
  __device__ __forceinline__ static unsigned threads_of_cluster() { return cluster_size() * threads_of_block(); }

  // What a lane reads in one step of a walk.
  struct Vector {
    Bytes16 bytes;
    uint32_t allowed;
    int id;  // of the first token; the vocabulary's size: none
  };

  // Calls visit(z, id) for vectors of this warp's tokens, ids ascending from lane to lane and from call to call, in those
  // groups whose maximum reaches `lowest`. All lanes make all calls. Where there is no token, z is NaN. The next vectors, and
  // the next groups' maxima, are on their way while visit runs.
  template <class Visit>
  __device__ __forceinline__ void walk(float lowest, Visit visit) const {
    const Place place = this->place();
    const int lane = static_cast<int>(hidden(threadIdx.x)) % kLanes;
    int base = place.first - kLanes;
    uint32_t mask = 0;
    float peak = place.peak_at(place.first + lane);
    const auto next = [&](Vector& vector) {
      while (mask == 0) {
        base += kLanes;
        if (base >= place.last) return false;
        mask = ballot(peak >= lowest);
        peak = place.peak_at(base + kLanes + lane);
      }
      uint32_t mine = mask;
#pragma unroll
      for (int i = 0; i < kPick; ++i) {
        if (i == lane / kSpan) mine = mask;
        mask &= mask - 1;  // 0 stays 0
      }
      const int id = mine != 0 ? (base + lowest_bit(mine)) * kGroup + lane % kSpan * kSize : vocab();
      vector = {place.read(id), id < vocab() ? place.logits.allowed(id) : 0, id};
      return true;
    };
    // All that a step may leave alone starts as something: else it would keep its registers from one walk to the next.
    Vector vector = {{}, 0, 0};
    for (bool is_read = false;; is_read = true) {
      Vector ahead = {{}, 0, 0};
      const bool more = next(ahead);
      if (is_read) {
        float z[kSize];
        const int rest = vocab() - vector.id;
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const float value = (vector.allowed >> i & 1u) != 0 ? element<T>(vector.bytes, i) : -infinity();
          z[i] = i < rest ? value : nan();
        }
        visit(z, vector.id);
      }
      if (!more) break;
      vector = ahead;
    }
  }

  // Calls visit(z, id) for each kept token of a vector: one copy of what takes many instructions.
  template <class Visit>
  __device__ __forceinline__ static void each_kept(const KeptSet& kept, const float (&z)[kSize], int id, Visit visit) {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) mine |= static_cast<uint32_t>(kept.has(z[i], id + i)) << i;
    while (mine != 0) {
      const int place = lowest_bit(mine);
      mine &= mine - 1;
      float value = z[0];
#pragma unroll
      for (int i = 1; i < kSize; ++i) value = i == place ? z[i] : value;
      visit(value, id + place);
    }
  }

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
      if (even) {
        const float distance = (top - z) * per_z;
        return distance < kBins - 1 ? static_cast<int>(distance) : kBins - 1;
      }
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

  // Tokens: the histogram, and with kTotal the sums of all with z >= floor, in groups whose maximum reaches `from`.
  template <bool kTotal>
  __device__ __forceinline__ Sums count_tokens(const Bins& bins, float floor, float from) const {
    const float low = from_key(bins.low), above = from_key(bins.high + 1);
    const Powers exp = powers();
    Sums total = {0, 0};
    uint32_t high_sum = 0, low_sum = 0, visited = 0;
    walk(from, [&](const float(&z)[kSize], int) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const bool inside = z[i] >= low && z[i] < above;
        if constexpr (kTotal) {
          const bool counts = z[i] >= floor;
          const Mass mass(counts ? exp(z[i]) : 0.0f);
          high_sum += mass.high;
          low_sum += mass.low;
          total.count += counts;
          if (inside) count_in(bins.of(z[i]), mass.value());
        } else {
          if (inside) count_in(bins.of(z[i]), Mass(exp(z[i])).value());
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

  // Over the cluster: the sums of all tokens from a key on.
  __device__ __forceinline__ Sums sums_from(uint32_t key) const {
    return sum_cluster(count_tokens<true>(no_bins(), from_key(key), from_key(key)));
  }

  // What 2^40 times the powers of a vector add up to, each to the nearest integer, plus 2^23's bits for each.
  static constexpr uint32_t kLightZero = 0x4B000000u;  // the bits of 2^23: adding that leaves the nearest integer in the low bits
  __device__ __forceinline__ static uint32_t light_word(const Bytes16& bytes, const Powers& exp) {
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) word += to_bits(fmaf(exp(element<T>(bytes, i)), 0x1p40f, from_bits(kLightZero)));
    return word;
  }

  // This thread's part of the mass of the groups whose maximum is in [floor, heavy), where every token has less than 2^-17: one
  // word holds its mass, and no bin wants it.
  __device__ __forceinline__ int64_t light_mass(float floor, float heavy) const {
    constexpr int kBatch = 16 / static_cast<int>(sizeof(T)), kGroups = kBatch * kPick;  // vectors on their way
    const Place place = this->place();
    const Powers exp = powers();
    const int lane = static_cast<int>(threadIdx.x) % kLanes;
    int64_t sum = 0;
    float peak = lane < kGroups ? place.peak_at(place.first + lane) : nan();
    for (int base = place.first; base < place.last; base += kGroups) {
      const uint32_t light = ballot(peak >= floor && peak < heavy);
      peak = lane < kGroups ? place.peak_at(base + kGroups + lane) : nan();
      if (light == 0) continue;
      // Of four groups at a time, this lane's vector, and whether it is to be read.
      const int id = base * kGroup + lane * kSize;
      const T* const first = place.logits.z + id;
      const uint32_t mine = light >> lane / kSpan;
      Bytes16 bytes[kBatch];
      if (place.aligned && (base + kGroups) * kGroup <= vocab()) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          bytes[k] = nothing<T>();
          if ((mine >> (k * kPick) & 1u) != 0)
            bytes[k] = read_again<16>(reinterpret_cast<const char*>(first + k * kPick * kGroup));
        }
      } else {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int rest = (mine >> (k * kPick) & 1u) != 0 ? vocab() - id - k * kPick * kGroup : 0;
          bytes[k] = read_few(first + k * kPick * kGroup, rest);
        }
      }
      uint32_t word = 0;
#pragma unroll
      for (int k = 0; k < kBatch; ++k) word += light_word(bytes[k], exp);
      sum += word - kBatch * kSize * kLightZero;
    }
    return sum;
  }

  // Over the cluster: the mass of all tokens, those of the bins counted in the histogram. `low`: no token below this key has one.
  __device__ __forceinline__ int64_t whole_mass(const Bins& bins, uint32_t low) const {
    const float floor = from_key(low);
    float heavy = floor;
    if (in.bitmask == nullptr) heavy = fmaxf(floor, fminf(row().max - 18.0f / shared.scale, from_key(bins.low)));
    Sums own = count_tokens<true>(bins, floor, heavy);
    if (heavy > floor) own.mass += light_mass(floor, heavy);
    return sum_cluster(own).mass;
  }

  // The groups' maxima, counted.
  __device__ __forceinline__ void count_groups(const Bins& bins) const {
    const int groups = this->groups();
    const float* const group_max = in.group_max + static_cast<int64_t>(r()) * groups;
    for (int g = static_cast<int>(place_in_cluster()); g < groups; g += static_cast<int>(threads_of_cluster())) {
      const float z = group_max[g];
      if (z >= from_key(bins.low) && z < from_key(bins.high + 1)) atomic_add(&shared.bins[turn_of_bins].count[bins.of(z)], 1u);
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
      count_tokens<false>(bins, 0.0f, from_key(bins.low));
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
