// The tokens of a row read a second time: by a walk over the groups whose maximum says that there may be something, or over a list.
//
// One block a row or, of few rows, a cluster of blocks; smaller blocks of many rows. Only groups of 64 tokens whose maximum reaches
// the z from which a walk looks are read: V / 64 floats tell which. In a row of no sharp peak those are all groups though few
// vectors have such a token. So whoever is about to walk from about the same z on several times makes a list of these vectors
// before: their numbers alone, in shared memory, and their bytes come from the caches again.
#pragma once

#include <type_traits>

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

// Whether there are lists, and tokens wait for others: not on AMD's GPUs, whose registers clang fills with constants.
#if defined(RLKERNEL_EMULATION)
constexpr bool kLists = RLKERNEL_WARP == 32;
#elif defined(__HIP__)
constexpr bool kLists = false;
#else
constexpr bool kLists = true;
#endif

// Of each warp its own part: the vectors with a token from some z on, or tokens that wait until there is one for every lane.
constexpr int kListed = kLists ? 9216 : 16;  // vectors of a block
struct ShortList {
  float from[kFinishWarps];  // the z; NaN where there is no list
  int count[kFinishWarps];
  union {
    uint16_t vector[kListed];  // from the warp's first one
    uint16_t waiting16[kListed];
    uint32_t waiting32[kListed / 2];
  };
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
  ShortList list;
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
struct Walk {
  static constexpr int kSize = kVector<T>, kSpan = kGroup / kSize, kPick = kLanes / kSpan;
  static constexpr int kBatch = 16 / static_cast<int>(sizeof(T));  // vectors of a lane, on their way together
  // The low bits of a key that say nothing: 0 where z is positive, 1 where it is negative.
  static constexpr int kResolution = sizeof(T) == 4 ? 0 : kIsBf16<T> ? 16 : 13;
  static constexpr uint32_t kIdle = (uint32_t{1} << kResolution) - 1;

  // Tokens that wait are fewer than lanes before each of these has the next two vectors.
  static constexpr int kWaiting = kListed * 2 / static_cast<int>(sizeof(T)) / kFinishWarps;
  static_assert(!kLists || kWaiting >= (2 * kSize + 1) * kLanes - 1, "two vectors of every lane must find room");

  const SamplingInputs& in;
  FilterShared& shared;

  __device__ __forceinline__ Walk(const SamplingInputs& in, FilterShared& shared) : in(in), shared(shared) {}

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

  // Puts -inf where a mask forbids a token and, with kEnds, NaN behind the row's end, which no comparison holds for.
  template <bool kEnds>
  __device__ __forceinline__ void mend(Vector& vector) const {
    constexpr uint32_t kEvery = (1u << kSize) - 1;
    const int rest = vocab() - vector.id;
    if ((vector.allowed & kEvery) == kEvery && (!kEnds || rest >= kSize)) return;
    constexpr uint32_t kNaN = sizeof(T) == 4 ? 0x7fc00000u : kIsBf16<T> ? 0x7fc07fc0u : 0x7e007e00u;
    const uint32_t least = nothing<T>().word[0];
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const uint32_t part = sizeof(T) == 4 ? ~0u : i % 2 != 0 ? 0xffff0000u : 0xffffu;
      uint32_t& word = vector.bytes.word[i * static_cast<int>(sizeof(T)) / 4];
      if (kEnds && i >= rest) word = (word & ~part) | (kNaN & part);
      else if ((vector.allowed >> i & 1u) == 0) word = (word & ~part) | (least & part);
    }
  }

  // Calls visit(bytes, id) for vectors of this warp's tokens, ids ascending from lane to lane and from call to call: those of a
  // list that begins no higher than `lowest`, or of the groups whose maximum reaches it. All lanes make all calls, as long as
  // visit returns true, to all of them. The next vectors, and the next groups' maxima, are on their way while visit runs.
  template <class Visit>
  __device__ __forceinline__ void walk_vectors(float lowest, Visit visit) const {
    const Place place = this->place();
    const int lane = static_cast<int>(hidden(threadIdx.x)) % kLanes;
    const bool listed = kLists && again(shared.list.from[warp()]) <= lowest;
    const int end = listed ? again(shared.list.count[warp()]) : place.last;
    int base = listed ? 0 : place.first - kLanes;
    uint32_t mask = 0;
    float peak = listed ? nan() : place.peak_at(place.first + lane);
    const auto next = [&](Vector& vector) {
      int id = vocab();
      if (listed) {
        if (base >= end) return false;
        if (base + lane < end) id = place.first * kGroup + list()[base + lane] * kSize;
        base += kLanes;
      } else {
        while (mask == 0) {
          base += kLanes;
          if (base >= end) return false;
          mask = ballot(peak >= lowest);
          peak = place.peak_at(base + kLanes + lane);
        }
        uint32_t mine = mask;
#pragma unroll
        for (int i = 0; i < kPick; ++i) {
          if (i == lane / kSpan) mine = mask;
          mask &= mask - 1;  // 0 stays 0
        }
        if (mine != 0) id = (base + lowest_bit(mine)) * kGroup + lane % kSpan * kSize;
      }
      vector = {place.read(id), id < vocab() ? place.logits.allowed(id) : ~0u, id};
      return true;
    };
    // All that a step may leave alone starts as something: else it would keep its registers from one walk to the next.
    Vector vector = {{}, 0, 0};
    for (bool is_read = false;; is_read = true) {
      Vector ahead = {{}, 0, 0};
      const bool more = next(ahead);
      if (is_read) {
        mend<true>(vector);
        if (!visit(vector.bytes, vector.id)) break;
      }
      if (!more) break;
      vector = ahead;
    }
  }

  // The same for visit(z, id), which returns nothing or whether to go on. Where there is no token, z is NaN.
  template <class Visit>
  __device__ __forceinline__ void walk(float lowest, Visit visit) const {
    walk_vectors(lowest, [&](const Bytes16& bytes, int id) {
      float z[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) z[i] = element<T>(bytes, i);
      if constexpr (std::is_same_v<decltype(visit(z, id)), bool>) {
        return visit(z, id);
      } else {
        visit(z, id);
        return true;
      }
    });
  }

  // Calls visit(bytes, id) for kBatch vectors of each lane, of which number k starts k * kPick groups behind `id`: those of the
  // groups whose maximum is at least `from` and, if that is a number, less than `below`; -inf for others. No mask is looked at.
  // All lanes make all calls. Cheaper than a walk where most groups are visited. With kAhead the next vectors are on their way
  // while visit runs.
  template <int kBatch, bool kAhead, class Visit>
  __device__ __forceinline__ void walk_batches(float from, float below, Visit visit) const {
    constexpr int kGroups = kBatch * kPick;
    static_assert(kGroups <= kLanes, "a lane looks at one group");
    const Place place = this->place();
    const int lane = static_cast<int>(hidden(threadIdx.x)) % kLanes;
    int base = place.first - kGroups;
    float peak = lane < kGroups ? place.peak_at(place.first + lane) : nan();
    struct Batch {
      Bytes16 bytes[kBatch];
      int id;
    };
    const auto next = [&](Batch& batch) {
      uint32_t wanted = 0;
      while (wanted == 0) {
        base += kGroups;
        if (base >= place.last) return false;
        wanted = ballot(peak >= from && !(peak >= below));
        peak = lane < kGroups ? place.peak_at(base + kGroups + lane) : nan();
      }
      // Of this lane's vectors, which are to be read.
      const int id = base * kGroup + lane * kSize;
      const T* const first = place.logits.z + id;
      const uint32_t mine = wanted >> lane / kSpan;
      batch.id = id;
      if (place.aligned && (base + kGroups) * kGroup <= vocab()) {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          batch.bytes[k] = nothing<T>();
          if ((mine >> (k * kPick) & 1u) != 0)
            batch.bytes[k] = read_again<16>(reinterpret_cast<const char*>(first + k * kPick * kGroup));
        }
      } else {
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const int rest = (mine >> (k * kPick) & 1u) != 0 ? vocab() - id - k * kPick * kGroup : 0;
          batch.bytes[k] = read_few(first + k * kPick * kGroup, rest);
        }
      }
      return true;
    };
    if constexpr (kAhead) {
      Batch batch = {};
      for (bool is_read = false;; is_read = true) {
        Batch ahead = {};
        const bool more = next(ahead);
        if (is_read) visit(batch.bytes, batch.id);
        if (!more) break;
        batch = ahead;
      }
    } else {
      for (Batch batch; next(batch);) visit(batch.bytes, batch.id);
    }
  }

  // Puts -inf in a batch where a mask forbids a token.
  template <int kBatch>
  __device__ __forceinline__ void mend(Bytes16 (&bytes)[kBatch], int id) const {
    if (in.bitmask == nullptr) return;
    const Logits<T> logits(in, in.logits, 0, r());
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      const int first = id + k * kPick * kGroup;
      Vector vector = {bytes[k], first < vocab() ? logits.allowed(first) : ~0u, first};
      mend<false>(vector);
      bytes[k] = vector.bytes;
    }
  }

  // Of the block.
  __device__ __forceinline__ static int warp() { return static_cast<int>(hidden(threadIdx.x)) / kLanes; }
  __device__ __forceinline__ uint16_t* list() const {
    return shared.list.vector + warp() * (kListed >> lowest_bit(static_cast<uint32_t>(warps_of_block())));
  }

  using Bits = std::conditional_t<sizeof(T) == 4, uint32_t, uint16_t>;
  __device__ __forceinline__ static Bits bits_of(const Bytes16& bytes, int i) {
    if constexpr (sizeof(T) == 4) return bytes.word[i];
    else return static_cast<uint16_t>(bytes.word[i / 2] >> i % 2 * 16);
  }

  // A place among the tokens that wait, or behind them.
  struct Waiting {
    Bits* at;

    __device__ __forceinline__ float z() const { return element<T>(Bytes16{{*at, 0, 0, 0}}, 0); }

    // Puts what is at least `bound` of some vectors before this place, one before the other. Of nvcc's own making each takes five
    // instructions instead of three.
    template <int kCount>
    __device__ __forceinline__ void put(const Bytes16 (&bytes)[kCount], float bound) {
#if defined(__CUDA_ARCH__)
      uint32_t address = static_cast<uint32_t>(__cvta_generic_to_shared(at));
#endif
#pragma unroll
      for (int i = 0; i < kCount * kSize; ++i) {
        const float z = element<T>(bytes[i / kSize], i % kSize);
        const Bits bits = bits_of(bytes[i / kSize], i % kSize);
#if defined(__CUDA_ARCH__)
        if constexpr (sizeof(T) == 4)
          asm volatile("{.reg .pred p; setp.ge.f32 p, %2, %3; @p add.u32 %0, %0, -4; @p st.shared.u32 [%0], %1;}"
                       : "+r"(address) : "r"(bits), "f"(z), "f"(bound) : "memory");
        else
          asm volatile("{.reg .pred p; setp.ge.f32 p, %2, %3; @p add.u32 %0, %0, -2; @p st.shared.u16 [%0], %1;}"
                       : "+r"(address) : "h"(bits), "f"(z), "f"(bound) : "memory");
#else
        if (z >= bound) *--at = bits;
#endif
      }
    }
  };
  __device__ __forceinline__ Waiting waiting(int place) const {
    if constexpr (sizeof(T) == 4) return {shared.list.waiting32 + warp() * kWaiting + place};
    else return {shared.list.waiting16 + warp() * kWaiting + place};
  }

  // There is none of this warp. A barrier of the block follows before it looks for one.
  __device__ __forceinline__ static void forget_list(FilterShared& shared) {
    if (threadIdx.x % kLanes == 0) shared.list.from[threadIdx.x / kLanes] = nan();
  }

  // Of the vectors with a token from `lowest` on, whether a mask allows it or not, for walks from there on; none where they do not
  // fit. A barrier of the block follows before the first of these.
  __device__ __forceinline__ void make_list(float lowest) const {
    if (!kLists || again(shared.list.from[warp()]) <= lowest) return;
    const int lane = static_cast<int>(threadIdx.x) % kLanes, most = kListed >> lowest_bit(static_cast<uint32_t>(warps_of_block()));
    const Place place = this->place();
    const int first = place.first * kGroup;
    int count = 0;
    walk_batches<kBatch, false>(lowest, nan(), [&](const Bytes16(&bytes)[kBatch], int id) {
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        const bool has = extreme_of<T, true>(bytes[k]) >= lowest;
        const uint32_t lanes = ballot(has);
        const int at = count + count_bits(lanes & ((1u << lane) - 1));
        if (has && at < most) list()[at] = static_cast<uint16_t>((id - first) / kSize + k * kLanes);
        count += count_bits(lanes);
      }
    });
    const bool fits = count <= most && (place.last - place.first) * kSpan <= 1 << 16;
    sync_lanes();  // all of them have looked whether there is one
    if (lane == 0) {
      shared.list.count[warp()] = count;
      shared.list.from[warp()] = fits ? lowest : nan();
    }
  }

  // Calls visit(z, id) for the tokens of a vector whose bits are set: one copy of what takes many instructions.
  template <class Visit>
  __device__ __forceinline__ static void each(uint32_t mine, const float (&z)[kSize], int id, Visit visit) {
    while (mine != 0) {
      const int place = lowest_bit(mine);
      mine &= mine - 1;
      float value = z[0];
#pragma unroll
      for (int i = 1; i < kSize; ++i) value = i == place ? z[i] : value;
      visit(value, id + place);
    }
  }

  // Of the kept tokens of a vector.
  template <class Visit>
  __device__ __forceinline__ static void each_kept(const KeptSet& kept, const float (&z)[kSize], int id, Visit visit) {
    uint32_t mine = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) mine |= static_cast<uint32_t>(kept.has(z[i], id + i)) << i;
    each(mine, z, id, visit);
  }
};

}  // namespace rlkernel::RLKERNEL_DEVICE
