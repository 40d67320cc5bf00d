// The second read of a row, by one block: what its filters keep, a draw inside that set, its ids, the rank of the token.
#pragma once

#include "rlkernel/sampling/filter.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

// A token of the kept ones, by their integer masses in order of ids.
template <class T>
__device__ __forceinline__ void draw_kept(const Filter<T>& filter, const KeptSet& kept, int64_t r) {
  constexpr int kSize = Filter<T>::kSize;
  const int64_t seed = filter.in.seeds[r], position = position_of(filter.in, r);
  int64_t own = 0;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) own += kept.has(z[i], id + i) ? Mass(filter.exp_of(z[i])).value() : 0;
  });
  const int64_t of_warp = reduce_lanes(own, Add());
  const auto scan = filter.scan_warps(of_warp);
  int64_t t = stream_below(stream_bits(kKeptDomain, seed, position), scan.total) - scan.before;
  if (t < 0 || t >= of_warp) return;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
    int64_t mass[kSize], here = 0;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      mass[i] = kept.has(z[i], id + i) ? Mass(filter.exp_of(z[i])).value() : 0;
      here += mass[i];
    }
    const int64_t upto = running_sum(here), all = shuffle(upto, kLanes - 1);
    int64_t sum = upto - here;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (sum <= t && t < sum + mass[i]) filter.shared.token = {id + i, z[i], 0.0f};
      sum += mass[i];
    }
    t -= all;
  });
}

// The kept token with the largest noisy logit.
template <class T>
__device__ __forceinline__ void draw_noisy(const Filter<T>& filter, const KeptSet& kept, int64_t r) {
  constexpr int kSize = Filter<T>::kSize;
  const int vocab = filter.logits.vocab;
  const uint32_t prefix = stream_prefix(filter.in.seeds[r], position_of(filter.in, r));
  float best = -infinity(), best_z = 0.0f;
  int best_id = vocab;
  filter.walk(kept.z, [&](const float(&z)[kSize], int id) {
    for (int i = 0; i < kSize; ++i) {
      if (!kept.has(z[i], id + i)) continue;
      const float key = (z[i] - filter.row.max) / filter.temperature + gumbel_noise(prefix, static_cast<uint32_t>(id + i));
      if (best_id == vocab || key > best) {
        best = key;
        best_z = z[i];
        best_id = id + i;
      }
    }
  });
  const auto larger = [](uint32_t x, uint32_t y) { return x > y ? x : y; };
  const uint32_t top = reduce_lanes(best_id == vocab ? 0u : ordered(best), larger);
  const int id = reduce_lanes(best_id != vocab && ordered(best) == top ? best_id : vocab, Least());
  const int warp = static_cast<int>(threadIdx.x) / kLanes;
  if (threadIdx.x % kLanes == 0) {
    filter.shared.parts[warp][0] = top;
    filter.shared.parts[warp][1] = id;
  }
  __syncthreads();  // the warps' best are written
  int64_t most = 0, winner = vocab;
  for (int w = 0; w < kFinishWarps; ++w) {
    const int64_t key = filter.shared.parts[w][0], other = filter.shared.parts[w][1];
    if (other < vocab && (key > most || (key == most && other < winner))) {
      most = key;
      winner = other;
    }
  }
  if (best_id == winner && winner < vocab) filter.shared.token = {best_id, best_z, 0.0f};
}

template <class T>
__device__ __forceinline__ Drawn draw_again(const Filter<T>& filter, const KeptSet& kept, int64_t r) {
  if (filter.in.gumbel) draw_noisy(filter, kept, r);
  else draw_kept(filter, kept, r);
  __syncthreads();  // the token is written
  Drawn token = filter.shared.token;
  __syncthreads();  // the token is read
  token.x = logit_at(filter.in, r, token.id);
  return token;
}

template <class T>
__device__ __forceinline__ int64_t rank_of(const Filter<T>& filter, const Drawn& token, const KeptSet& kept, bool single) {
  constexpr int kSize = Filter<T>::kSize;
  const RankTies ties = filter.in.rank_ties;
  int upto = filter.logits.vocab - 1;  // ids of tokens that tie with this one and count; behind the vocabulary z is -inf too
  if (ties == RankTies::first) upto = token.id;
  else if (ties == RankTies::kept && single && token.id == filter.row.argmax) upto = token.id;
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
__device__ __forceinline__ void write_support(const Filter<T>& filter, const KeptSet& kept, int32_t* support, int64_t size) {
  constexpr int kSize = Filter<T>::kSize;
  const bool fits = kept.count <= size;
  for (int64_t i = (fits ? kept.count : 0) + threadIdx.x; i < size; i += kFinishThreads) support[i] = -1;
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

template <class T>
__device__ __forceinline__ void filter_row(const SamplingInputs& in, const SamplingOutputs& out, int64_t r) {
  RLKERNEL_SHARED(FilterShared, shared);
  const float temperature = of_row(in.temperature, r);
  const bool greedy = temperature == 0.0f, single = is_single(in, temperature);
  __syncthreads();  // nobody reads the row before any more
  if (threadIdx.x < kLanes) {
    const RowSummary summary = combine(in, r, softmax_temperature(temperature));
    if (threadIdx.x == 0) shared.row = summary;
  }
  __syncthreads();  // the summary is written
  const RowSummary& row = shared.row;  // not in the registers of each thread
  const bool valid = is_valid(in, r, row);
  KeptSet kept = {};
  Drawn token = row.token;
  int64_t rank = 1;
  if (valid) {
    const Filter<T> filter(in, shared, row, r);
    if (!greedy) {
      kept = filter.keep(r);
      if (kept.filtered && in.token_ids == nullptr && !kept.has(token.z, token.id)) token = draw_again(filter, kept, r);
    }
    const bool is_first = greedy && in.token_ids == nullptr && in.rank_ties == RankTies::first;
    if (out.rank != nullptr && token.id >= 0 && !is_first) rank = rank_of(filter, token, kept, single);
    if (kept.filtered && out.support != nullptr)
      write_support(filter, kept, out.support + r * out.support_size, out.support_size);
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
