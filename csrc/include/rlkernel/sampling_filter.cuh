// The second read of a row: the set that its filters keep, a draw inside it, its ids, the rank of the token.
//
// One block a row. Each filter keeps a prefix of (z descending, id ascending), which is known by the z where it ends and the
// last id there. That z is searched in the ordered bits of a float: a histogram of 256 bins, counts and integer masses, tells
// which bin holds the end, and is made again of that bin alone: two rounds for 16 bits, four for 32, less where the largest
// bits are known. Only groups of 64 tokens whose maximum reaches the interval are read: V / 64 floats tell which. The top k
// tokens cannot lie below the k-th largest of those maxima. Top-p needs the exact mass of all tokens above 2^-42 of the
// largest: a read of nearly the whole row, by then in the L2 cache where the batch's logits fit it, at some 15 instructions a
// token, and two atomics on shared memory for each that may be in the nucleus.
//
// All sums are of integers, so their order, and that of the atomics on shared memory, is free.
#pragma once

#include "rlkernel/sampling_finish.cuh"
#include "rlkernel/sampling_mass.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kFinishThreads = 512, kFinishWarps = kFinishThreads / kLanes;
constexpr int kBins = 256, kBinsPerLane = kBins / kLanes;
constexpr int64_t kAll = int64_t{1} << 62;

// Masses of 64 bits are added as two words: CUDA has no 64-bit addition in shared memory but a loop of compare-and-swap.
struct FilterShared {
  uint32_t count[kBins], low[kBins], high[kBins];
  int64_t parts[kFinishWarps][2];
  RowSummary row;
  Drawn token;
  int last;
};

template <class T>
struct Filter {
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

  __device__ __forceinline__ Filter(const SamplingInputs& in, FilterShared& shared, const RowSummary& row, int64_t r)
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

  // Tokens: the histogram, and with kTotal the sums of all with z >= floor.
  template <bool kTotal>
  __device__ __forceinline__ Sums count_tokens(const Bins& bins, float floor) const {
    const float low = from_key(bins.low), above = from_key(bins.high + 1);
    Sums total = {0, 0};
    uint32_t high_sum = 0, low_sum = 0, visited = 0;
    walk(kTotal ? floor : low, [&](const float(&z)[kSize], int) {
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
      count_tokens<false>(bins, 0.0f);
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

  __device__ __forceinline__ int64_t share_of(float p, int64_t mass) const {
    return static_cast<int64_t>(ceil(static_cast<double>(p) * static_cast<double>(mass)));
  }

  // A lower bound for the key of the k-th largest token: that of the k-th largest maximum of a group, to 16 bits.
  __device__ __forceinline__ uint32_t bound_of(int64_t k, uint32_t low, uint32_t high) const {
    if (k > groups) return low;
    const uint32_t lowest = low;
    Sums above = {0, 0};
    for (;;) {
      const Bins bins = bins_of(low, high, false);
      clear();
      count_groups(bins);
      __syncthreads();  // the bins are full
      int bin;
      const Crossing crossing = cross(above, false, k, &bin);
      if (!crossing.found) return lowest;
      above = crossing.above;
      if (narrow(bins, bin, low, high) || bins.shift <= 16) return low > lowest ? low : lowest;
    }
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

  __device__ __forceinline__ Sums sums_from(uint32_t key) const {
    const Bins none = {1, 0, 0, false, 0.0f, 0.0f};  // an empty interval
    return sum_block(count_tokens<true>(none, from_key(key)));
  }

  // Of two keys at which a prefix ends, and of the tokens at the crossing, how many are kept.
  __device__ __forceinline__ static Prefix cut(const Prefix& prefix, const Crossing& c, bool by_mass, int64_t target) {
    const int64_t each = c.at.mass / c.at.count;  // the same for all of them
    int64_t ties = by_mass ? (target - c.above.mass + each - 1) / each : target - c.above.count;
    if (c.key == prefix.key && ties > prefix.ties) ties = prefix.ties;
    return {c.key, ties, c.at.count, {c.above.count + ties, c.above.mass + ties * each}};
  }

  // The nucleus of the prefix. `low_mass`: no token below this key has a mass.
  __device__ __forceinline__ Prefix nucleus(Prefix prefix, float p, uint32_t low_mass, uint32_t high, bool cuts) const {
    const uint32_t low = prefix.key > low_mass ? prefix.key : low_mass;
    if (in.joint && cuts) {
      const int64_t target = share_of(p, sums_from(low_mass).mass);
      const Crossing c = search(low, high, true, target, {0, 0});
      if (c.found) return cut(prefix, c, true, target);
      if (prefix.sums.count < 0) prefix.sums = sums_from(prefix.key);
      return prefix;
    }
    if (prefix.sums.mass >= 0) {
      const int64_t target = share_of(p, prefix.sums.mass);
      return cut(prefix, search(low, high, true, target, {0, 0}), true, target);
    }
    // All tokens count, and the target is known after them. Below `likely` there is less than 1 - p of the mass, so that the
    // end is above it; were it not, for a rounding of the sum, another round would look there.
    const double rest = 0.99 * (1.0 - static_cast<double>(p)) * row.sum / row.finite;
    const float reach = row.max + log_exact(rest) * temperature;
    uint32_t likely = rest > 0 && reach < row.max && reach > from_key(low) ? ordered(reach) : low;
    const Bins bins = bins_of(likely, high, true);
    likely = bins.low;
    clear();
    const Sums whole = sum_block(count_tokens<true>(bins, from_key(low)));
    const int64_t target = share_of(p, whole.mass);
    int bin;
    Crossing c = cross({0, 0}, true, target, &bin);
    uint32_t from = low, to = likely - 1;
    Sums above = c.total;
    if (c.found) {
      above = c.above;
      if (narrow(bins, bin, from, to)) {
        c.key = key_in(from, to);
        return cut(prefix, c, true, target);
      }
    }
    return cut(prefix, search(from, to, true, target, above), true, target);
  }

  // The id of the tie that is number `ties`, from 1, in order of ids.
  __device__ __forceinline__ int last_tie(float z, int64_t ties) const {
    int64_t own = 0;
    walk(z, [&](const float(&values)[kSize], int) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) own += values[i] == z;
    });
    const int64_t of_warp = reduce_lanes(own, Add());
    const Scan scan = scan_warps(of_warp);
    int64_t wanted = ties - scan.before;
    if (wanted > 0 && wanted <= of_warp) {
      walk(z, [&](const float(&values)[kSize], int id) {
        int64_t here = 0;
#pragma unroll
        for (int i = 0; i < kSize; ++i) here += values[i] == z;
        const int64_t upto = running_sum(here), all = shuffle(upto, kLanes - 1);
        int64_t left = wanted - (upto - here);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (values[i] == z && --left == 0) shared.last = id + i;
        }
        wanted -= all;
      });
    }
    __syncthreads();  // the last tie is written
    const int found = shared.last;
    __syncthreads();  // the last tie is read
    return found;
  }

  __device__ __forceinline__ bool cuts_below(int64_t r, uint32_t high, uint32_t* lowest) const {
    const float min_p = of_row(in.min_p, r), sigmas = of_row(in.top_n_sigma, r);
    float least = -infinity();
    if (min_p > 0.0f) least = static_cast<float>(static_cast<double>(temperature) * log(static_cast<double>(min_p)));
    if (sigmas < infinity()) {
      const float below = static_cast<float>(-static_cast<double>(sigmas) * sqrt(row.moments.squares / row.moments.count));
      least = fmaxf(least, below);
    }
    *lowest = first_key(kLowestKey, high, [&](float z) { return z - row.max >= least; });
    return least > -infinity();
  }

  // What is kept of a row that is not greedy.
  __device__ __forceinline__ KeptSet keep(int64_t r) const {
    const int64_t k = of_row(in.top_k, r);
    const float p = of_row(in.top_p, r);
    const uint32_t high = ordered(row.max);
    uint32_t lowest;
    const bool cuts = cuts_below(r, high, &lowest), k_on = k >= 1 && k < logits.vocab, p_on = p < 1.0f;
    const bool masked = in.bitmask != nullptr && row.finite < logits.vocab;
    if (!cuts && !k_on && !p_on && !masked) return {};

    Prefix prefix = {lowest, kAll, -1, {-1, -1}};
    if (k_on) {
      const Crossing c = search(bound_of(k, lowest, high), high, false, k, {0, 0});
      if (c.found) prefix = cut(prefix, c, false, k);
      else prefix.sums = c.total;
    }
    if (p_on) {
      const float least = row.max - 42.0f / scale;
      const uint32_t low_mass = least > from_key(kLowestKey) ? ordered(least) : kLowestKey;
      prefix = nucleus(prefix, p, low_mass, high, cuts || k_on);
    } else if (prefix.sums.count < 0) {
      prefix.sums = sums_from(prefix.key);
    }
    if (prefix.sums.count == logits.vocab) return {};
    const float z = from_key(prefix.key);
    const bool all = prefix.at < 0 || prefix.ties >= prefix.at;
    return {true, z, all ? logits.vocab : last_tie(z, prefix.ties), prefix.sums.count, prefix.sums.mass};
  }

  // A token of the kept ones, by their integer masses in order of ids.
  __device__ __forceinline__ void draw_kept(const KeptSet& kept, int64_t r) const {
    const int64_t seed = in.seeds[r], position = in.positions[r];
    int64_t own = 0;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) own += kept.has(z[i], id + i) ? Mass(exp_of(z[i])).value() : 0;
    });
    const int64_t of_warp = reduce_lanes(own, Add());
    const Scan scan = scan_warps(of_warp);
    int64_t t = stream_below(stream_word(kKeptDomain.high, seed, position, 0), stream_word(kKeptDomain.low, seed, position, 0),
                             scan.total) - scan.before;
    if (t < 0 || t >= of_warp) return;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
      int64_t mass[kSize], here = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        mass[i] = kept.has(z[i], id + i) ? Mass(exp_of(z[i])).value() : 0;
        here += mass[i];
      }
      const int64_t upto = running_sum(here), all = shuffle(upto, kLanes - 1);
      int64_t sum = upto - here;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (sum <= t && t < sum + mass[i]) shared.token = {id + i, z[i], 0.0f};
        sum += mass[i];
      }
      t -= all;
    });
  }

  // The kept token with the largest noisy logit.
  __device__ __forceinline__ void draw_noisy(const KeptSet& kept, int64_t r) const {
    const uint32_t prefix = stream_prefix(kGumbelDomain, in.seeds[r], in.positions[r]);
    float best = -infinity(), best_z = 0.0f;
    int best_id = logits.vocab;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
      for (int i = 0; i < kSize; ++i) {
        if (!kept.has(z[i], id + i)) continue;
        const float key = (z[i] - row.max) / temperature + gumbel_noise(prefix, static_cast<uint32_t>(id + i));
        if (best_id == logits.vocab || key > best) {
          best = key;
          best_z = z[i];
          best_id = id + i;
        }
      }
    });
    const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
    const uint32_t top = reduce_lanes(best_id == logits.vocab ? 0u : ordered(best), larger);
    const int id = reduce_lanes(best_id != logits.vocab && ordered(best) == top ? best_id : logits.vocab, Least());
    const int warp = static_cast<int>(threadIdx.x) / kLanes;
    if (threadIdx.x % kLanes == 0) {
      shared.parts[warp][0] = top;
      shared.parts[warp][1] = id;
    }
    __syncthreads();  // the warps' best are written
    int64_t most = 0, winner = logits.vocab;
    for (int w = 0; w < kFinishWarps; ++w) {
      const int64_t key = shared.parts[w][0], other = shared.parts[w][1];
      if (other < logits.vocab && (key > most || (key == most && other < winner))) {
        most = key;
        winner = other;
      }
    }
    if (best_id == winner && winner < logits.vocab) shared.token = {best_id, best_z, 0.0f};
  }

  __device__ __forceinline__ Drawn draw_again(const KeptSet& kept, int64_t r) const {
    if (in.gumbel) draw_noisy(kept, r);
    else draw_kept(kept, r);
    __syncthreads();  // the token is written
    Drawn token = shared.token;
    __syncthreads();  // the token is read
    token.x = logit_at(in, r, token.id);
    return token;
  }

  __device__ __forceinline__ int64_t rank_of(const Drawn& token) const {
    int64_t before = 0;
    walk(token.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) before += z[i] > token.z || (z[i] == token.z && id + i < token.id);
    });
    return 1 + scan_warps(reduce_lanes(before, Add())).total;
  }

  // The kept ids in ascending order, behind them -1; only -1 where there are more than fit.
  __device__ __forceinline__ void write_support(const KeptSet& kept, int32_t* support, int64_t size) const {
    const bool fits = kept.count <= size;
    for (int64_t i = (fits ? kept.count : 0) + threadIdx.x; i < size; i += kFinishThreads) support[i] = -1;
    if (!fits) return;
    int own = 0;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) own += kept.has(z[i], id + i);
    });
    int64_t place = scan_warps(reduce_lanes(own, Add())).before;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
      int here = 0;
#pragma unroll
      for (int i = 0; i < kSize; ++i) here += kept.has(z[i], id + i);
      const int upto = running_sum(here), all = shuffle(upto, kLanes - 1);
      int64_t next = place + upto - here;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (kept.has(z[i], id + i)) support[next++] = id + i;
      }
      place += all;
    });
  }
};

template <class T>
__device__ __forceinline__ void filter_row(const SamplingInputs& in, const SamplingOutputs& out, int64_t r) {
  RLKERNEL_SHARED(FilterShared, shared);
  const float temperature = of_row(in.temperature, r);
  const bool greedy = temperature == 0.0f;
  __syncthreads();  // nobody reads the row before any more
  if (threadIdx.x < kLanes) {
    const RowSummary summary = combine(in, r, softmax_temperature(temperature));
    if (threadIdx.x == 0) shared.row = summary;
  }
  __syncthreads();  // the summary is written
  const RowSummary& row = shared.row;  // not in the registers of each thread
  const bool valid = is_valid(row);
  KeptSet kept = {};
  Drawn token = row.token;
  int64_t rank = 1;
  if (valid) {
    const Filter<T> filter(in, shared, row, r);
    if (!greedy) {
      kept = filter.keep(r);
      if (kept.filtered && in.token_ids == nullptr && !kept.has(token.z, token.id)) token = filter.draw_again(kept, r);
    }
    if (out.rank != nullptr && token.id >= 0 && (!greedy || in.token_ids != nullptr)) rank = filter.rank_of(token);
    if (kept.filtered && out.support != nullptr)
      filter.write_support(kept, out.support + r * out.support_size, out.support_size);
  }
  if (!kept.filtered) write_short_support(out, r, valid && greedy ? row.argmax : -1);
  if (threadIdx.x == 0) write_row(in, out, r, row, kept, token, rank, valid);
}

template <class T>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kFinishThreads, 1) filter_kernel(SamplingInputs in, SamplingOutputs out) {
  for (int64_t r = blockIdx.x; r < in.rows; r += gridDim.x) {
    if (in.skip != nullptr && in.skip[r]) continue;
    filter_row<T>(in, out, r);
  }
}

}  // namespace rlkernel::RLKERNEL_DEVICE
