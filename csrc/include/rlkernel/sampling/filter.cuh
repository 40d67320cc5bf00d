// What the filters keep of a row.
//
// Each keeps a prefix of (z descending, id ascending), which is known by the z where it ends and the last id there. The top k
// tokens cannot lie below the k-th largest of the groups' maxima. Top-p needs the exact mass of all tokens above 2^-42 of the
// largest: a read of nearly the whole row, by then in the L2 cache where the batch's logits fit it, at some 8 instructions a
// token in groups without one of 2^-18 of the largest, some 15 in the others, and two atomics on shared memory for each that
// may be in the nucleus.
#pragma once

#include "rlkernel/sampling/search.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int64_t kAll = int64_t{1} << 62;

template <class T>
struct Filter : Search<T> {
  using Base = Search<T>;
  using typename Base::Bins, typename Base::Scan;
  using Base::kSize, Base::in, Base::shared, Base::row, Base::logits, Base::groups, Base::temperature, Base::scale;
  using Base::bins_of, Base::clear, Base::count_groups, Base::count_in, Base::cross, Base::exp_of, Base::first_key;
  using Base::key_in, Base::narrow;
  using Base::no_bins, Base::scan_warps, Base::search, Base::sums_from, Base::walk, Base::whole_mass;

  __device__ __forceinline__ Filter(const SamplingInputs& in, FilterShared& shared, const RowSummary& row, int64_t r)
      : Base(in, shared, row, r) {}

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
    if (in.order == FilterOrder::joint && cuts) {
      const int64_t target = share_of(p, whole_mass(no_bins(), low_mass));
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
    const int64_t target = share_of(p, whole_mass(bins, low));
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
    if (in.thresholds != nullptr) {
      const double log_sum = log(row.sum), entropy = log_sum - row.weighted / row.sum;
      const double of_row = least_of(in.thresholds + r * kThresholds, log_sum, entropy);
      least = fmaxf(least, static_cast<float>(static_cast<double>(temperature) * of_row));
    }
    *lowest = first_key(kLowestKey, high, [&](float z) { return z - row.max >= least; });
    return least > -infinity();
  }

  // The mean of z - max z over the kept tokens, of integers: in any order the same.
  __device__ __forceinline__ float mean_of(const KeptSet& kept) const {
    int64_t own = 0;
    walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const float e = kept.has(z[i], id + i) ? exp_of(z[i]) : 0.0f;
        own += e > 0.0f ? Mass(e * ((row.max - z[i]) / temperature)).value() : 0;
      }
    });
    const int64_t sum = scan_warps(reduce_lanes(own, Add())).total;
    return static_cast<float>(-static_cast<double>(temperature) * (static_cast<double>(sum) / static_cast<double>(kept.mass)));
  }

  // How far from `mean` the kept tokens reach that have a mass of `target`, the nearest ones first: eight bits of the distance,
  // which is not negative, in a round.
  __device__ __forceinline__ float radius_about(const KeptSet& kept, float mean, int64_t target) const {
    Sums nearer = {0, 0};
    uint32_t radius = 0;
#pragma unroll 1  // four copies would take registers from the rest of the kernel
    for (int shift = 24; shift >= 0; shift -= 8) {
      clear();
      walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
        for (int i = 0; i < kSize; ++i) {
          const uint32_t key = to_bits(fabsf(z[i] - row.max - mean));
          const bool here = shift == 24 || key >> (shift + 8) == radius;
          if (here && kept.has(z[i], id + i)) count_in(static_cast<int>(key >> shift & 255u), Mass(exp_of(z[i])).value());
        }
      });
      __syncthreads();  // the bins are full
      int bin;
      nearer = cross(nearer, true, target, &bin).above;
      radius = radius << 8 | static_cast<uint32_t>(bin);
    }
    return from_bits(radius);
  }

  // Takes what is above `key` from the kept tokens, none of which was before.
  __device__ __forceinline__ static void drop(KeptSet& kept, uint32_t key, const Sums& above) {
    kept.high = from_key(key);
    kept.count -= above.count;
    kept.mass -= above.mass;
  }

  // The share of their mass that is nearest to the mean, with ties. It lies between two z.
  __device__ __forceinline__ void keep_typical(KeptSet& kept, float share) const {
    const uint32_t top = ordered(row.max), low = ordered(kept.z);
    const float mean = mean_of(kept), radius = radius_about(kept, mean, share_of(share, kept.mass));
    const uint32_t from = first_key(low, top, [&](float z) { return z - row.max - mean >= -radius; });
    const uint32_t behind = first_key(from, top, [&](float z) { return z - row.max - mean > radius; });
    if (from > low) {
      const Sums sums = sums_from(from);
      kept = {true, from_key(from), logits.vocab, sums.count, sums.mass, row.max};
    }
    if (behind <= top) drop(kept, behind - 1, sums_from(behind));
  }

  // Drops what is likelier than the least likely one of those that have the threshold of the kept mass.
  __device__ __forceinline__ void exclude_top(KeptSet& kept, float threshold) const {
    const uint32_t high = ordered(kept.high);
    const float least = exclusion_of(threshold, kept.mass, static_cast<double>(temperature));
    const uint32_t from = first_key(ordered(kept.z), high, [&](float z) { return z - row.max >= least; });
    if (from > high) return;
    const Sums reach = sums_from(from), above = sums_from(high + 1);
    if (reach.count == above.count) return;
    const Crossing c = search(from, high, false, reach.count, above);
    drop(kept, c.key, {c.above.count - above.count, c.above.mass - above.mass});
  }

  // What is kept of a row that is not greedy.
  __device__ __forceinline__ KeptSet keep(int64_t r) const {
    const int64_t k = of_row(in.top_k, r);
    const float p = of_row(in.top_p, r);
    const uint32_t high = ordered(row.max);
    uint32_t lowest;
    const bool cuts = cuts_below(r, high, &lowest), k_on = k >= 1 && k < logits.vocab, p_on = p < 1.0f;
    const bool masked = in.bitmask != nullptr && row.finite < logits.vocab;
    if (!cuts && !k_on && !p_on && !masked && band_of(in, r) == nullptr) return {};

    const bool later = in.order == FilterOrder::top_k_first && p_on;  // the thresholds do not change top_p's share
    const uint32_t from = later ? kLowestKey : lowest;
    Prefix prefix = {from, kAll, -1, {-1, -1}};
    if (k_on) {
      const Crossing c = search(bound_of(k, from, high), high, false, k, {0, 0});
      if (c.found) prefix = cut(prefix, c, false, k);
      else prefix.sums = c.total;
    }
    if (p_on) {
      const float least = row.max - 42.0f / scale;
      const uint32_t low_mass = least > from_key(kLowestKey) ? ordered(least) : kLowestKey;
      prefix = nucleus(prefix, p, low_mass, high, (cuts && !later) || k_on);
      if (later && prefix.key < lowest) prefix = {lowest, kAll, -1, sums_from(lowest)};
    } else if (prefix.sums.count < 0) {
      prefix.sums = sums_from(prefix.key);
    }
    const bool banded = band_of(in, r) != nullptr;  // read again where it is needed: no register for it all the way
    if (prefix.sums.count == logits.vocab && !banded) return {};
    const float z = from_key(prefix.key);
    const bool all = prefix.at < 0 || prefix.ties >= prefix.at;
    KeptSet kept = {true, z, all ? logits.vocab : last_tie(z, prefix.ties), prefix.sums.count, prefix.sums.mass, row.max};
    if (banded) {
      const float typical = in.band[r * kBand + kTypical];
      if (typical < 1.0f) keep_typical(kept, typical);
      const float threshold = in.band[r * kBand + kExclude];
      if (threshold < 1.0f) exclude_top(kept, threshold);
      kept.filtered = kept.count < logits.vocab;
    }
    return kept;
  }
};

}  // namespace rlkernel::RLKERNEL_DEVICE
