// Log-probability, entropy and log-sum-exp over the support of each row, and their gradient there: one block a row.
//
// Floor: 4 bytes an id and a sector of 32 bytes for each logit, which lie far apart; 8192 rows with 40 tokens each are
// 12 MB, next to the 2.5 GB of the whole logits. Sums are sums of integers, so neither the threads nor the order matter.
#pragma once

#include "rlkernel/logprob/arguments.h"
#include "rlkernel/math.cuh"
#include "rlkernel/vec.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kSupportThreads = 128;
constexpr int kSupportGroups = kSupportThreads / kLanes;
constexpr float kSmallestExponent = -200.0f;  // 2^u is 0 there, and its product with u too

// The nearest integer, ties to even, of x: scaling by 2^40 was exact, and rintf is.
__device__ __forceinline__ int64_t mass_of(float e) { return static_cast<int64_t>(rintf(e * kMassOne)); }

struct SupportSums {
  int64_t mass, weighted;
};

// What every thread of the block sees after its own part of the row.
struct SupportSeen {
  float max, at_target;  // at_target: -inf where no thread met the target, as its logit then is
  int found, bad;
};

__device__ __forceinline__ SupportSeen merge(SupportSeen a, SupportSeen b) {
  return {fmaxf(a.max, b.max), fmaxf(a.at_target, b.at_target), a.found | b.found, a.bad | b.bad};
}
__device__ __forceinline__ SupportSums merge(SupportSums a, SupportSums b) {
  return {a.mass + b.mass, a.weighted + b.weighted};
}

__device__ __forceinline__ SupportSeen other_lane(SupportSeen s, int distance) {
  return {shuffle_xor(s.max, distance), shuffle_xor(s.at_target, distance), shuffle_xor(s.found, distance),
          shuffle_xor(s.bad, distance)};
}
__device__ __forceinline__ SupportSums other_lane(SupportSums s, int distance) {
  return {shuffle_xor(s.mass, distance), shuffle_xor(s.weighted, distance)};
}

// Every thread gets the result; no order of merging gives another one.
template <class Part>
__device__ __forceinline__ Part over_block(Part part) {
  using Parts = Part[kSupportGroups];
  RLKERNEL_SHARED(Parts, parts);
  for (int distance = kLanes / 2; distance > 0; distance /= 2) part = merge(part, other_lane(part, distance));
  __syncthreads();  // what a former row left is read
  if (threadIdx.x % kLanes == 0) parts[threadIdx.x / kLanes] = part;
  __syncthreads();  // the parts are written
  part = parts[0];
  for (int g = 1; g < kSupportGroups; ++g) part = merge(part, parts[g]);
  return part;
}

__device__ __forceinline__ float row_temperature(const LogprobSupport& s, int64_t r) {
  return s.temperatures != nullptr ? s.temperatures[r] : s.temperature;
}

__device__ __forceinline__ void write_row(const LogprobSupportForward& f, int64_t r, float logprob, float entropy, float lse,
                                          float row_max, float log_sum) {
  if (threadIdx.x != 0) return;
  f.logprobs[r] = logprob;
  if (f.entropy != nullptr) f.entropy[r] = entropy;
  f.lse[r] = lse;
  f.row_max[r] = row_max;
  f.log_sum[r] = log_sum;
}

template <class T>
__device__ __forceinline__ void support_forward_row(const LogprobSupportForward& f, int64_t r) {
  const LogprobSupport& s = f.support;
  const int64_t begin = s.offsets[r], count = s.offsets[r + 1] - begin, target = s.target_ids[r];
  if (count <= 0 || target == s.ignore_index) return write_row(f, r, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f);
  T* values = static_cast<T*>(f.values) + begin;
  const int32_t* ids = s.ids + begin;
  const T* x = static_cast<const T*>(f.logits);
  const bool given = x == nullptr;
  if (!given) x += r / f.inner * f.outer_stride + r % f.inner * f.inner_stride;

  SupportSeen seen{-infinity(), -infinity(), 0, 0};
  for (int64_t i = threadIdx.x; i < count; i += kSupportThreads) {
    const int32_t id = ids[i];
    const bool inside = id >= 0 && id < s.vocab;
    if (!given) values[i] = inside ? x[id] : from_float<T>(nan());
    const float y = to_float(values[i]);
    seen.max = fmaxf(seen.max, y);
    seen.bad |= !(y < infinity());  // NaN too
    if (id == target) {
      seen.at_target = y;
      seen.found = 1;
    }
  }
  seen = over_block(seen);
  if (seen.bad || seen.max == -infinity()) return write_row(f, r, nan(), nan(), nan(), nan(), nan());

  const float temperature = row_temperature(s, r), scale = kLog2E / temperature;
  SupportSums sums{0, 0};
  for (int64_t i = threadIdx.x; i < count; i += kSupportThreads) {
    const float u = (to_float(values[i]) - seen.max) * scale;
    const float e = exp2_fast(u);
    sums.mass += mass_of(e);
    if (f.entropy != nullptr) sums.weighted += mass_of(e * fmaxf(u, kSmallestExponent));  // 0 * -inf would be NaN
  }
  sums = over_block(sums);
  const double sum = static_cast<double>(sums.mass);
  const float log_sum = log_exact(sum / kMassOne);
  const float logprob = seen.found ? (seen.at_target - seen.max) / temperature - log_sum : -infinity();
  const float mean = static_cast<float>(static_cast<double>(sums.weighted) / sum);
  write_row(f, r, logprob, log_sum - mean * kLn2, seen.max / temperature + log_sum, seen.max, log_sum);
}

template <class T>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kSupportThreads, 8) support_forward_kernel(LogprobSupportForward f) {
  for (int64_t r = blockIdx.x; r < f.support.rows; r += gridDim.x) support_forward_row<T>(f, r);
}

template <class In, class Out>
__device__ __forceinline__ void support_backward_row(const LogprobSupportBackward& b, int64_t r) {
  const LogprobSupport& s = b.support;
  const int64_t begin = s.offsets[r], count = s.offsets[r + 1] - begin, target = s.target_ids[r];
  if (count <= 0 || target == s.ignore_index) return;
  const float logprob = b.logprobs[r], log_sum = b.log_sum[r], row_max = b.row_max[r];
  // a token of probability 0 cannot be made likelier by a small step
  const float grad_logprob = b.grad_logprobs != nullptr && logprob != -infinity() ? b.grad_logprobs[r] : 0.0f;
  const float grad_entropy = b.grad_entropy != nullptr ? b.grad_entropy[r] : 0.0f;
  const float grad_lse = b.grad_lse != nullptr ? b.grad_lse[r] : 0.0f;
  if (grad_logprob == 0.0f && grad_entropy == 0.0f && grad_lse == 0.0f) return;

  const float factor = 1.0f / row_temperature(s, r), scale = kLog2E / row_temperature(s, r);
  const float entropy = grad_entropy != 0.0f ? b.entropy[r] : 0.0f;
  // p * (g_lse - g_logprob - g_entropy * (log p + H)) / T, where log p = (y - max) / T - log_sum
  const float inverse_sum = (is_finite(log_sum) ? exp_exact(-log_sum) : nan()) * factor;
  const float constant = (grad_lse - grad_logprob - grad_entropy * (entropy - log_sum)) * inverse_sum;
  const float linear = -grad_entropy * kLn2 * inverse_sum;
  const float p = logprob < -87.0f ? 0.0f : exp_exact(logprob);
  float at_target = fmaf(p, grad_lse, grad_logprob == 0.0f ? 0.0f : -grad_logprob * expm1_exact(logprob));
  if (grad_entropy != 0.0f && p != 0.0f) at_target -= grad_entropy * p * (logprob + entropy);
  at_target = logprob != logprob ? nan() : at_target * factor;

  const In* values = static_cast<const In*>(b.values) + begin;
  const int32_t* ids = s.ids + begin;
  Out* out = static_cast<Out*>(b.out);
  out += b.scattered ? r / b.inner * b.out_outer_stride + r % b.inner * b.out_inner_stride : begin;
  for (int64_t i = threadIdx.x; i < count; i += kSupportThreads) {
    const int32_t id = ids[i];
    const float u = max_or_nan((to_float(values[i]) - row_max) * scale, kSmallestExponent);
    const float gradient = id == target ? at_target : exp2_fast(u) * fmaf(linear, u, constant);
    if (!b.scattered) out[i] = from_float<Out>(gradient);
    else if (id >= 0 && id < s.vocab) out[id] = from_float<Out>(gradient);
  }
}

template <class In, class Out>
__global__ void RLKERNEL_LAUNCH_BOUNDS(kSupportThreads, 8) support_backward_kernel(LogprobSupportBackward b) {
  for (int64_t r = blockIdx.x; r < b.support.rows; r += gridDim.x) support_backward_row<In, Out>(b, r);
}

inline unsigned support_blocks(int64_t rows) { return static_cast<unsigned>(rows < 1 << 20 ? rows : 1 << 20); }

int logprob_support_forward(const LogprobSupportForward& f, void* stream) {
  if (f.support.rows == 0) return 0;
  return with_dtype(f.dtype, [&](auto in) {
    RLKERNEL_LAUNCH((support_forward_kernel<decltype(in)>), support_blocks(f.support.rows), kSupportThreads, stream, f);
    return launch_error();
  });
}

int logprob_support_backward(const LogprobSupportBackward& b, void* stream) {
  if (b.support.rows == 0) return 0;
  return with_dtype(b.dtype, [&](auto in) {
    return with_dtype(b.out_dtype, [&](auto out) {
      using In = decltype(in);
      using Out = decltype(out);
      if constexpr (sizeof(In) == 2 && sizeof(Out) == 2 && kIsBf16<In> != kIsBf16<Out>) {
        return kInvalidArguments;  // nobody wants a bf16 gradient of fp16 logits, or the reverse
      } else {
        RLKERNEL_LAUNCH((support_backward_kernel<In, Out>), support_blocks(b.support.rows), kSupportThreads, stream, b);
        return launch_error();
      }
    });
  });
}

}  // namespace rlkernel::RLKERNEL_DEVICE
