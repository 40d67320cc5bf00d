// The tokens of a split that a thread of pass A holds in registers.
#pragma once

#include "rlkernel/sampling/row.cuh"

namespace rlkernel::RLKERNEL_DEVICE {

constexpr int kStatisticsThreads = 64, kStatisticsWarps = kStatisticsThreads / kLanes;

struct SplitPlace {  // of a split
  int64_t row;
  int first, count;  // tokens, from the start of the tile
  int split;         // of the whole vocabulary
  uint32_t thread;
};

// A thread's tokens: vector k starts at thread * kSize + step(k) of the split, so that a group lies in kVectors consecutive
// threads. Unaligned rows are read by narrower reads of the same tokens.
template <class T>
struct SplitLayout {
  static constexpr int kSize = kVector<T>, kVectors = kSplit / kStatisticsThreads / kSize;
  static_assert(kVectors * kSize == kGroup, "a lane ends with one group");

  // A constant once the loop over k is unrolled, where the places themselves would fill registers.
  static __device__ __forceinline__ constexpr int step(int k) { return k * kStatisticsThreads * kSize; }
  static __device__ __forceinline__ int start(uint32_t thread) { return static_cast<int>(thread) * kSize; }
  // The group of the split that this lane has after a fold over kVectors lanes.
  static __device__ __forceinline__ int group(uint32_t thread) {
    return static_cast<int>(thread % kVectors * (kStatisticsThreads / kVectors) + thread / kVectors);
  }
};

// Both kinds of tokens can `forget` what was computed from them: adding a zero that the compiler does not know of keeps it from
// holding 64 converted numbers from one loop over them to another, which would not fit the registers.

// The logits as given, kept as they lie in memory: 16-bit ones take half the registers so. Behind the end: -inf.
template <class T>
struct GivenTokens : SplitLayout<T> {
  using Layout = SplitLayout<T>;
  using Layout::kSize, Layout::kVectors, Layout::step, Layout::start;
  Bytes16 bytes[kVectors];

  __device__ __forceinline__ float z(int k, int i) const { return element<T>(bytes[k], i); }
  __device__ __forceinline__ void forget(uint32_t zero) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes[k].word[i] += zero;
  }
  __device__ __forceinline__ float max_of(int k) const { return extreme_of<T, true>(bytes[k]); }
  __device__ __forceinline__ void extremes_of(float& largest, float& least) const {
    Bytes16 high = bytes[0], low = bytes[0];
#pragma unroll
    for (int k = 1; k < kVectors; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        high.word[i] = pick<T, true>(high.word[i], bytes[k].word[i]);
        low.word[i] = pick<T, false>(low.word[i], bytes[k].word[i]);
      }
    largest = extreme_of<T, true>(high);
    least = extreme_of<T, false>(low);
  }

  template <int kAlign, bool kWhole>
  __device__ __forceinline__ void read(const T* first, int count, uint32_t thread) {
    const char* own = reinterpret_cast<const char*>(first + start(thread));
    const int rest = count - start(thread), last = count / kSize * kSize;
    Bytes16 end = nothing<T>();
    if (!kWhole && last < count && static_cast<uint32_t>(last / kSize) % kStatisticsThreads == thread)
      end = read_end(first + last, count - last);  // of one thread: all other vectors are whole or behind the end
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      if (kWhole || step(k) + kSize <= rest) bytes[k] = read_again<kAlign>(own + step(k) * static_cast<int>(sizeof(T)));
      else bytes[k] = step(k) < rest ? end : nothing<T>();
    }
  }

  template <int kAlign>
  __device__ __forceinline__ void read(const T* first, int count, uint32_t thread) {
    if (count == kSplit) read<kAlign, true>(first, count, thread);
    else read<kAlign, false>(first, count, thread);
  }

  __device__ __forceinline__ void read(const SamplingInputs& in, const SplitPlace& at) {
    read(static_cast<const T*>(in.logits) + at.row * in.row_stride + at.first, at.count, at.thread);
  }

  __device__ __forceinline__ void read(const T* first, int count, uint32_t thread) {
    const int align = alignment_of(first);
    if (align == 16) read<16>(first, count, thread);
    else if (sizeof(T) == 4 || align == 4) read<4>(first, count, thread);
    else read<sizeof(T) == 2 ? 2 : 4>(first, count, thread);
  }
};

// z where it is not x.
template <class T>
struct AdjustedTokens : SplitLayout<T> {
  using Layout = SplitLayout<T>;
  using Layout::kSize, Layout::kVectors, Layout::step, Layout::start;
  float values[kVectors][kSize];

  __device__ __forceinline__ float z(int k, int i) const { return values[k][i]; }
  __device__ __forceinline__ void forget(uint32_t zero) {
#pragma unroll
    for (int k = 0; k < kVectors; ++k)
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[k][i] = from_bits(to_bits(values[k][i]) + zero);
  }
  __device__ __forceinline__ float max_of(int k) const {
    float largest = values[k][0];
#pragma unroll
    for (int i = 1; i < kSize; ++i) largest = fmaxf(largest, values[k][i]);
    return largest;
  }
  __device__ __forceinline__ void extremes_of(float& largest, float& least) const {
    largest = max_of(0);
    least = values[0][0];
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      largest = fmaxf(largest, max_of(k));
#pragma unroll
      for (int i = 0; i < kSize; ++i) least = fminf(least, values[k][i]);
    }
  }

  // Returns the largest x of the thread, where it is asked for.
  __device__ __forceinline__ float read(const SamplingInputs& in, const SplitPlace& at, bool& bad) {
    GivenTokens<T> x;
    x.read(in, at);
    const Logits<float> adjusted(in, in.adjusted, in.adjusted_stride, at.row);
    const float* own = adjusted.z + at.first + start(at.thread);
    const bool vectors = at.count == kSplit && alignment_of(own) == 16;
    float largest = -infinity(), least = 0.0f;
    if (in.raw) x.extremes_of(largest, least);
#pragma unroll
    for (int k = 0; k < kVectors; ++k) {
      const int rest = at.count - start(at.thread) - step(k);
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        values[k][i] = x.z(k, i);
        bad = bad || !(values[k][i] < infinity());
      }
      if (in.adjusted != nullptr) {
        if (vectors) {
#pragma unroll
          for (int i = 0; i < kSize; i += 4) {
            const Bytes16 four = read_again<16>(reinterpret_cast<const char*>(own + step(k) + i));
#pragma unroll
            for (int j = 0; j < 4; ++j) values[k][i + j] = from_bits(four.word[j]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSize; ++i) values[k][i] = i < rest ? own[step(k) + i] : -infinity();
        }
      }
      const uint32_t allowed = rest > 0 ? adjusted.allowed(at.first + start(at.thread) + step(k)) : ~0u;
#pragma unroll
      for (int i = 0; i < kSize; ++i) values[k][i] = (allowed >> i & 1u) != 0 ? values[k][i] : -infinity();
    }
    return largest;
  }
};

}  // namespace rlkernel::RLKERNEL_DEVICE
