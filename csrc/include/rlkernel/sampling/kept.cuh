// The second read of a row, by one block or a cluster of them: what its filters keep, a draw inside that set, its ids, the rank of the token.
#pragma once

#include "rlkernel/sampling/filter.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// A token of the kept ones, by their integer masses in order of ids.
template <class T>
__device__ __forceinline__ void draw_kept(const Filter<T>& filter) {
  constexpr int kSize = Filter<T>::kSize;
  const KeptSet kept = filter.shared.kept;
  const auto exp = filter.powers();
  const auto mass_of = [&](float z) { return Mass(exp(z)).value(); };
  int64_t own = 0;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
    filter.each_kept(kept, z, id, [&](float value, int) { own += mass_of(value); });
  });
  const int64_t of_warp = reduce_lanes(own, Add());
  const auto scan = filter.scan_warps(of_warp);
  const StreamBits bits = stream_bits(kKeptDomain, filter.in.seeds[filter.r()], position_of(filter.in, filter.r()));
  int64_t t = stream_below(bits, scan.total) - scan.before;
  if (t < 0 || t >= of_warp) return;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
    int64_t here = 0;
    filter.each_kept(kept, z, id, [&](float value, int) { here += mass_of(value); });
    const int64_t upto = running_sum(here), all = shuffle(upto, kLanes - 1);
    int64_t left = t - (upto - here);
    t -= all;
    if (left >= 0 && left < here) {
      filter.each_kept(kept, z, id, [&](float value, int token) {  // their masses again: in registers they would be too many
        const int64_t mass = mass_of(value);
        if (left >= 0 && left < mass) filter.tell(&filter.shared.token, {token, value, 0.0f});
        left -= mass;
      });
    }
    return t >= 0;
  });
}

// The kept token with the largest noisy logit.
template <class T>
__device__ __forceinline__ void draw_noisy(const Filter<T>& filter) {
  constexpr int kSize = Filter<T>::kSize;
  const KeptSet kept = filter.shared.kept;
  const int vocab = filter.vocab();
  const float max = filter.row().max, temperature = filter.temperature();
  const uint32_t prefix = stream_prefix(filter.in.seeds[filter.r()], position_of(filter.in, filter.r()));
  float best = -infinity(), best_z = 0.0f;
  int best_id = vocab;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
    filter.each_kept(kept, z, id, [&](float value, int token) {
      const float key = (value - max) / temperature + gumbel_noise(prefix, static_cast<uint32_t>(token));
      if (best_id == vocab || key > best) {
        best = key;
        best_z = value;
        best_id = token;
      }
    });
  });
  const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
  const uint32_t top = reduce_lanes(best_id == vocab ? 0u : ordered(best), larger);
  const int id = reduce_lanes(best_id != vocab && ordered(best) == top ? best_id : vocab, Least());
  const int winner = filter.best_of_warps({static_cast<int64_t>(top), id}, vocab);
  if (best_id == winner && winner < vocab) filter.tell(&filter.shared.token, {best_id, best_z, 0.0f});
}

template <class T>
__device__ __forceinline__ void draw_again(const Filter<T>& filter) {
  if (filter.in.gumbel) draw_noisy(filter);
  else draw_kept(filter);
  cluster_barrier();  // the token is written
}

template <class T>
__device__ __forceinline__ int64_t rank_of(const Filter<T>& filter, bool single) {
  constexpr int kSize = Filter<T>::kSize;
  const RankTies ties = filter.in.rank_ties;
  const KeptSet& kept = filter.shared.kept;
  const Drawn token = filter.shared.token;
  int upto = filter.vocab() - 1;  // ids of tokens that tie with this one and count; behind the vocabulary z is -inf too
  if (ties == RankTies::first) upto = token.id;
  else if (ties == RankTies::kept && single && token.id == filter.row().argmax) upto = token.id;
  else if (ties == RankTies::kept && kept.filtered && kept.z == token.z && kept.has(token.z, token.id)) upto = kept.last;
  int64_t count = 0;
  filter.walk(token.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) count += z[i] > token.z || (z[i] == token.z && id + i <= upto);
  });
  return filter.scan_warps(reduce_lanes(count, Add())).total;
}

// The kept ids in ascending order, behind them -1; only -1 where there are more than fit.
template <class T>
__device__ __forceinline__ void write_support(const Filter<T>& filter, int32_t* support, int64_t size) {
  constexpr int kSize = Filter<T>::kSize;
  const KeptSet kept = filter.shared.kept;
  const bool fits = kept.count <= size;
  for (int64_t i = (fits ? kept.count : 0) + filter.place_in_cluster(); i < size; i += filter.threads_of_cluster()) support[i] = -1;
  if (!fits) return;
  int own = 0;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) own += kept.has(z[i], id + i);
  });
  int64_t place = filter.scan_warps(reduce_lanes(own, Add())).before;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
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

// Of one row, which it returns: the caller's register is free meanwhile.
template <class T>
__device__ __forceinline__ uint32_t filter_row(const SamplingInputs& in, const SamplingOutputs& out, uint32_t r) {
  RLKERNEL_SHARED(FilterShared, shared);
  if (threadIdx.x < kLanes) {
    const float temperature = softmax_temperature(of_row(in.temperature, r));
    const RowSummary summary = combine(in, r, temperature);
    if (threadIdx.x == 0) {
      shared.r = r;
      shared.row = summary;
      shared.temperature = temperature;
      shared.scale = power_scale(temperature);
      shared.valid = is_valid(in, r, summary);
      shared.kept = {};
      shared.token = summary.token;
    }
  }
  Filter<T>::forget_list(shared);
  __syncthreads();  // the summary is written
  // None of these is in the registers of each thread.
  const RowSummary& row = shared.row;
  const KeptSet& kept = shared.kept;
  const Drawn& token = shared.token;
  const Filter<T> filter(in, shared);
  const auto asked = [&] { return of_row(in.temperature, filter.r()); };
  int64_t rank = 1;
  if (shared.valid) {
    if (asked() != 0.0f) {
      filter.keep();
      if (kept.filtered && in.token_ids == nullptr && !kept.has(token.z, token.id)) draw_again(filter);
    }
    if (kept.filtered && out.support != nullptr)
      write_support(filter, out.support + filter.r() * out.support_size, out.support_size);
    const bool is_first = asked() == 0.0f && in.token_ids == nullptr && in.rank_ties == RankTies::first;
    if (out.rank != nullptr && token.id >= 0 && !is_first) rank = rank_of(filter, is_single(in, asked()));
  }
  r = filter.r();
  if (cluster_rank() == 0) {
    if (!kept.filtered) write_short_support(out, r, shared.valid && asked() == 0.0f ? row.argmax : -1);
    if (threadIdx.x == 0) {
      Drawn drawn = token;
      if (drawn.id != row.token.id) drawn.x = logit_at(in, r, drawn.id);
      write_row(in, out, r, row, kept, drawn, rank, shared.valid);
    }
  }
  cluster_barrier();  // nobody reads of this row any more: its memory is free, and so is a block to leave
  return r;
}

template <class T>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kFinishThreads, 1) filter_kernel(SamplingInputs in, SamplingOutputs out) {
  for (uint32_t r = blockIdx.x / cluster_size(); r < in.rows; r += gridDim.x / cluster_size()) {
    if (in.skip != nullptr && in.skip[r]) continue;
    r = filter_row<T>(in, out, r);
  }
}

}  // namespace rlkernel::RLKERNEL_DEVICE
