// What the filters keep of a row.
//
// Each keeps a prefix of (z descending, id ascending), which is known by the z where it ends and the last id there. The top k
// tokens cannot lie below the k-th largest of the groups' maxima. Top-p needs the exact mass of all tokens above 2^-42 of the
// largest: a read of nearly the whole row, by then in the L2 cache where the batch's logits fit it, at some 8 instructions a
// token in groups without one of 2^-18 of the largest, some 18 in the others, and some 60 with three atomics on shared memory for
// each that may be in the nucleus. A list of what may be kept is made after it, which all that follows reads.
#pragma once

#include "rlkernel/sampling/search.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kAll = 0x7fffffff;

template <class T>
struct Filter : Search<T> {
  using Base = Search<T>;
  using typename Base::Bins, typename Base::Powers, typename Base::Scan;
  using Base::kSize, Base::in, Base::shared, Base::r, Base::again, Base::row, Base::vocab, Base::groups, Base::temperature, Base::powers;
  using Base::bins_of, Base::clear, Base::count_groups, Base::count_in, Base::counted, Base::cross, Base::first_key;
  using Base::key_in, Base::narrow, Base::no_bins, Base::scan_warps, Base::search, Base::sums_from, Base::tell, Base::walk;
  using Base::each_kept, Base::kIdle, Base::make_list, Base::whole_mass;

  __device__ __forceinline__ Filter(const SamplingInputs& in, FilterShared& shared) : Base(in, shared) {}

  __device__ __forceinline__ int64_t share_of(float p, int64_t mass) const {
    return static_cast<int64_t>(ceil(static_cast<double>(p) * static_cast<double>(mass)));
  }

  // A lower bound for the key of the k-th largest token: that of the k-th largest maximum of a group, to 16 bits.
  __device__ __forceinline__ uint32_t bound_of(int64_t k, uint32_t low, uint32_t high) const {
    if (k > groups()) return low;
    const uint32_t lowest = low;
    Sums above = {0, 0};
    for (;;) {
      const Bins bins = bins_of(low, high, false);
      clear();
      count_groups(bins);
      int bin = 0;
      const Crossing crossing = cross(counted(), above, false, k, &bin);
      if (!crossing.found) return lowest;
      above = crossing.above;
      if (narrow(bins, bin, low, high) || bins.shift <= 16) return low > lowest ? low : lowest;
    }
  }

  // Of two keys at which a prefix ends, and of the tokens at the crossing, how many are kept.
  __device__ __forceinline__ static Prefix cut(const Prefix& prefix, const Crossing& c, bool by_mass, int64_t target) {
    const int64_t each = c.at.mass / c.at.count;  // the same for all of them
    int ties = static_cast<int>(by_mass ? (target - c.above.mass + each - 1) / each : target - c.above.count);
    if (c.key == prefix.key && ties > prefix.ties) ties = prefix.ties;
    return {c.key, ties, c.at.count, {c.above.count + ties, c.above.mass + ties * each}};
  }

  // Where a filter looks for its end, and what it knows of that before.
  struct Aim {
    uint32_t low, high;
    int64_t target;
    Crossing crossing;  // found, or with the sums of what lies above `high`
  };

  // The end of the nucleus of a prefix. `low_mass`: no token below this key has a mass.
  __device__ __forceinline__ Aim aim_at_nucleus(uint32_t low_mass, bool joint) const {
    const float p = of_row(in.top_p, r());
    const uint32_t high = ordered(again(row().max));
    const Prefix& prefix = shared.prefix;
    const uint32_t low = prefix.key > low_mass ? prefix.key : low_mass;
    Aim aim = {low, high, 0, {}};
    if (!joint && prefix.sums.mass >= 0) {
      aim.target = share_of(p, prefix.sums.mass);
      return aim;
    }
    // All tokens count, and the target is known after them. Below `likely` there is less than 1 - p of the mass, so that the
    // end is above it; were it not, for a rounding of the sum, another round would look there.
    Bins bins = no_bins();
    uint32_t likely = low;
    if (!joint) {
      const double rest = 0.99 * (1.0 - static_cast<double>(p)) * row().sum / row().finite;
      const float reach = row().max + log_exact(rest) * temperature();
      if (rest > 0 && reach < row().max && reach > from_key(low)) likely = ordered(reach);
      bins = bins_of(likely, high, true);
    }
    clear();
    aim.target = share_of(p, whole_mass(bins, joint ? low_mass : low, joint || low == low_mass));
    if (joint) return aim;
    int bin = 0;
    aim.crossing = cross(counted(true), {0, 0}, true, aim.target, &bin);
    if (!aim.crossing.found) {
      aim.high = bins.low - 1;
      return aim;
    }
    if (narrow(bins, bin, aim.low, aim.high)) aim.crossing.key = key_in(aim.low, aim.high);
    else aim.crossing.found = false;
    return aim;
  }

  // The id of the tie that is number `ties`, from 1, in order of ids.
  __device__ __forceinline__ int last_tie(float z, int ties) const {
    int own = 0;
    walk(z, [&](const float(&values)[kSize], int) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) own += values[i] == z;
    });
    const int of_warp = reduce_lanes(own, Add());
    const Scan scan = scan_warps(of_warp);
    int wanted = ties - static_cast<int>(scan.before);
    if (wanted > 0 && wanted <= of_warp) {
      walk(z, [&](const float(&values)[kSize], int id) {
        int here = 0;
#pragma unroll
        for (int i = 0; i < kSize; ++i) here += values[i] == z;
        const int upto = running_sum(here), all = shuffle(upto, kLanes - 1);
        int left = wanted - (upto - here);
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          if (values[i] == z && --left == 0) tell(&shared.last, id + i);
        }
        wanted -= all;
        return wanted > 0;
      });
    }
    cluster_barrier();  // the last tie is written
    return shared.last;
  }

  // Puts the lowest key that the thresholds keep; whether there are any.
  __device__ __forceinline__ bool put_lowest() const {
    const float min_p = of_row(in.min_p, r()), sigmas = of_row(in.top_n_sigma, r());
    float least = -infinity();
    if (min_p > 0.0f) least = static_cast<float>(static_cast<double>(temperature()) * log(static_cast<double>(min_p)));
    if (sigmas < infinity()) {
      const float below = static_cast<float>(-static_cast<double>(sigmas) * sqrt(row().moments.squares / row().moments.count));
      least = fmaxf(least, below);
    }
    if (in.thresholds != nullptr) {
      const double log_sum = log(row().sum), entropy = log_sum - row().weighted / row().sum;
      const double of_row = least_of(in.thresholds + int64_t{r()} * kThresholds, log_sum, entropy);
      least = fmaxf(least, static_cast<float>(static_cast<double>(temperature()) * of_row));
    }
    const float max = again(row().max);
    uint32_t lowest = kLowestKey;
    if (least > -infinity()) lowest = first_key(kLowestKey, ordered(max), [&](float z) { return z - max >= least; });
    if (threadIdx.x == 0) {
      shared.lowest = lowest;
      shared.cuts = least > -infinity();
    }
    __syncthreads();  // the lowest key is written
    return shared.cuts;
  }

  // What is kept, and a prefix of it, for all threads: too much to stay in their registers while they read the row again. Thread 0
  // changes it in place; of a copy that is changed in part clang holds the rest in scratch memory. Whoever has read what it
  // overwrites has met a barrier since, in a sum over the block or in `clear`.
  template <class Value, class Change>
  __device__ __forceinline__ static void change(Value& shared, Change how) {
    if (threadIdx.x == 0) how(shared);
    __syncthreads();  // the change is written
  }
  __device__ __forceinline__ void put(const KeptSet& kept) const {
    change(shared.kept, [&](KeptSet& to) { to = kept; });
  }

  // The mean of z - max z over the kept tokens, of integers: in any order the same.
  __device__ __forceinline__ float mean_of_kept() const {
    const KeptSet kept = shared.kept;
    const Powers exp = powers();
    const float t = temperature();
    int64_t own = 0;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
      each_kept(kept, z, id, [&](float value, int) {
        const float e = exp(value);
        if (e > 0.0f) own += Mass(e * ((exp.max - value) / t)).value();
      });
    });
    const int64_t sum = scan_warps(reduce_lanes(own, Add())).total;
    return static_cast<float>(-static_cast<double>(t) * (static_cast<double>(sum) / static_cast<double>(shared.kept.mass)));
  }

  // How far from `mean` the kept tokens reach that have a mass of `target`, the nearest ones first: eight bits of the distance,
  // which is not negative, in a round.
  __device__ __forceinline__ float radius_about(float mean, int64_t target) const {
    Sums nearer = {0, 0};
    uint32_t radius = 0;
#pragma unroll 1  // four copies would take registers from the rest of the kernel
    for (int shift = 24; shift >= 0; shift -= 8) {
      const KeptSet kept = shared.kept;
      const Powers exp = powers();
      clear();
      walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const uint32_t key = to_bits(fabsf(z[i] - exp.max - mean));
          const bool here = shift == 24 || key >> (shift + 8) == radius;
          if (here && kept.has(z[i], id + i)) count_in(static_cast<int>(key >> shift & 255u), Mass(exp(z[i])).value());
        }
      });
      int bin = 0;
      nearer = cross(counted(), nearer, true, target, &bin).above;
      radius = radius << 8 | static_cast<uint32_t>(bin);
    }
    return from_bits(radius);
  }

  // Takes what is above `key` from the kept tokens, none of which was before.
  __device__ __forceinline__ void drop(uint32_t key, const Sums& above) const {
    change(shared.kept, [&](KeptSet& kept) {
      kept.high = from_key(key);
      kept.count -= above.count;
      kept.mass -= above.mass;
    });
  }

  // The share of their mass that is nearest to the mean, with ties. It lies between two z.
  __device__ __forceinline__ void keep_typical(float share) const {
    const float max = again(row().max), mean = mean_of_kept(), radius = radius_about(mean, share_of(share, shared.kept.mass));
    const uint32_t top = ordered(max), low = ordered(shared.kept.z);
    const uint32_t from = first_key(low, top, [&](float z) { return z - max - mean >= -radius; });
    const uint32_t behind = first_key(from, top, [&](float z) { return z - max - mean > radius; });
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      if (end == 0 ? from <= low : behind > top) continue;
      const Sums sums = sums_from(end == 0 ? from : behind);
      if (end == 0) put({true, from_key(from), vocab(), sums.count, sums.mass, row().max});
      else drop(behind - 1, sums);
    }
  }

  // Drops what is likelier than the least likely one of those that have the threshold of the kept mass.
  __device__ __forceinline__ void exclude_top(float threshold) const {
    const float max = again(row().max), least = exclusion_of(threshold, shared.kept.mass, static_cast<double>(temperature()));
    const uint32_t from = first_key(ordered(shared.kept.z), ordered(shared.kept.high), [&](float z) { return z - max >= least; });
    if (from > ordered(shared.kept.high)) return;
    Sums reach = {0, 0}, above = {0, 0};
#pragma unroll 1
    for (int end = 0; end < 2; ++end) {
      reach = above;
      above = sums_from(end == 0 ? from : ordered(shared.kept.high) + 1);
    }
    if (reach.count == above.count) return;
    const Crossing c = search(from, ordered(shared.kept.high), false, reach.count, above);
    drop(c.key, {c.above.count - above.count, c.above.mass - above.mass});
  }

  // Read where they are asked for: no register for them all the way.
  __device__ __forceinline__ bool k_on() const {
    const int64_t k = of_row(in.top_k, r());
    return k >= 1 && k < vocab();
  }
  __device__ __forceinline__ bool p_on() const { return of_row(in.top_p, r()) < 1.0f; }
  // The thresholds do not change the share of top_p.
  __device__ __forceinline__ bool later() const { return in.order == FilterOrder::top_k_first && p_on(); }

  // Puts what is kept of a row that is not greedy; left alone where that is all of it.
  __device__ __forceinline__ void keep() const {
    const bool masked = in.bitmask != nullptr && row().finite < vocab();
    if (!put_lowest() && !k_on() && !p_on() && !masked && band_of(in, r()) == nullptr) return;

    change(shared.prefix, [&](Prefix& to) { to = {later() ? kLowestKey : shared.lowest, kAll, -1, {-1, -1}}; });
#pragma unroll 1
    for (int by_mass = 0; by_mass < 2; ++by_mass) {
      if (by_mass != 0 ? !p_on() : !k_on()) continue;
      Aim aim = {};
      if (by_mass != 0) {
        const float least = row().max - 42.0f / shared.scale;
        const uint32_t low_mass = least > from_key(kLowestKey) ? ordered(least) : kLowestKey;
        aim = aim_at_nucleus(low_mass, in.order == FilterOrder::joint && (shared.cuts || k_on()));
      } else {
        const int64_t k = of_row(in.top_k, r());
        aim = {bound_of(k, shared.prefix.key, ordered(again(row().max))), ordered(again(row().max)), k, {}};
      }
      Crossing& c = aim.crossing;
      make_list(from_key((c.found ? c.key : aim.low) & ~kIdle));
      if (!c.found) c = search(aim.low, aim.high, by_mass != 0, aim.target, c.above);
      change(shared.prefix, [&](Prefix& prefix) {
        if (c.found) prefix = cut(prefix, c, by_mass != 0, aim.target);
        else if (by_mass == 0) prefix.sums = c.above;
      });
    }
    Prefix prefix = shared.prefix;
    if (later() && prefix.key < shared.lowest) prefix = {shared.lowest, kAll, -1, {-1, -1}};
    if (prefix.sums.count < 0) prefix.sums = sums_from(prefix.key);
    const bool banded = band_of(in, r()) != nullptr;
    if (prefix.sums.count == vocab() && !banded) return;
    const float z = from_key(prefix.key);
    const bool all = prefix.at < 0 || prefix.ties >= prefix.at;
    const int last = all ? vocab() : last_tie(z, prefix.ties);
    put({true, z, last, prefix.sums.count, prefix.sums.mass, row().max});
    if (!banded) return;
    const float typical = in.band[int64_t{r()} * kBand + kTypical];
    if (typical < 1.0f) keep_typical(typical);
    const float threshold = in.band[int64_t{r()} * kBand + kExclude];
    if (threshold < 1.0f) exclude_top(threshold);
    change(shared.kept, [&](KeptSet& kept) { kept.filtered = kept.count < vocab(); });
  }
};

}  // namespace rlkernel::RLKERNEL_DEVICE
