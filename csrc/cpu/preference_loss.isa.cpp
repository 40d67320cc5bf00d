// The sums over a sequence's tokens, and their gradient: a sequence belongs to one thread. The bits of a sum depend neither
// on the other sequences nor on the threads nor on the alignment.
#include "rlkernel/preference_loss/terms.h"

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

using namespace ::rlkernel::preference;

constexpr int64_t kParallel = 1 << 14;  // tokens from which waking the other threads pays

typedef double Doubles __attribute__((vector_size(kWidth * 4)));
typedef float HalfFloats __attribute__((vector_size(kWidth * 2)));
typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

// Half of the lanes, from `first` on. A conversion of all at once is wider than a register: the compiler takes it apart.
inline Doubles doubles(Floats x, int first) {
  HalfFloats half;
  std::memcpy(&half, reinterpret_cast<const float*>(&x) + first, sizeof half);
#if defined(__AVX512F__)
  return (Doubles)_mm512_maskz_cvtps_pd(0xff, (__m256)half);
#else
  return __builtin_convertvector(half, Doubles);
#endif
}

// Lane i sums every kWidth-th token, in fp64; then the lanes pairwise.
struct Sum {
  Doubles low = {}, high = {};
  void add(Floats x) { low += doubles(x, 0), high += doubles(x, kWidth / 2); }
  double total() const {
    double lane[kWidth];
    std::memcpy(lane, &low, sizeof low);
    std::memcpy(lane + kWidth / 2, &high, sizeof high);
    for (int half = kWidth / 2; half > 0; half /= 2)
      for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
    return lane[0];
  }
};

inline Ints kept(const uint8_t* mask, int count) {
  Bytes bytes = {};
  if (count == kWidth) std::memcpy(&bytes, mask, kWidth);
  else std::memcpy(&bytes, mask, count);
#if defined(__AVX512F__)
  const Ints wide = (Ints)_mm512_maskz_cvtepu8_epi32(kAll, (__m128i)bytes);
#elif defined(__AVX2__)
  int64_t eight;
  std::memcpy(&eight, &bytes, sizeof eight);
  const Ints wide = (Ints)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(eight));
#else
  const Ints wide = __builtin_convertvector(bytes, Ints);
#endif
  return wide != 0;
}

inline Floats values(const float* p, Ints kept, int count) {
  const Floats x = count == kWidth ? load(p) : load_part(p, count);
  return kept ? x : Floats{};
}

int64_t counted(const uint8_t* mask, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) count += mask[i] != 0;
  return count;
}

// What a stretch of a row adds: `with_nll` where the likelihood has tokens of its own.
struct RowSums {
  Sum logps, ref, nll, aligned;
  int64_t tokens = 0, nll_tokens = 0;

  template <bool with_nll>
  void add(const PreferenceSums& p, int64_t begin, int64_t end) {
    Ints present = {}, likely = {};
    for (int64_t i = begin; i < end; i += kWidth) {
      const int count = static_cast<int>(end - i < kWidth ? end - i : kWidth);
      const Ints here = kept(p.mask + i, count);
      logps.add(values(p.logprobs + i, here, count));
      if (p.ref_per_token) ref.add(values(p.ref_logprobs + i, here, count));
      if (p.log_sum_sq_probs != nullptr) {
        aligned.add(values(p.logprobs + i, here, count));
        aligned.add(-values(p.log_sum_sq_probs + i, here, count));
      }
      present -= here;  // -1 where it counts
      if constexpr (with_nll) {
        const Ints other = kept(p.nll_mask + i, count);
        nll.add(values(p.logprobs + i, other, count));
        likely -= other;
      }
    }
    for (int k = 0; k < kWidth; ++k) tokens += present[k], nll_tokens += likely[k];
  }
};

template <bool with_nll>
void sum_row(const PreferenceSums& p, int64_t row) {
  const int64_t begin = preference_offset(p.cu_seqlens, p.length, row);
  const int64_t end = preference_offset(p.cu_seqlens, p.length, row + 1);
  int64_t cutoff = end;
  if (p.ld_alpha != 1) {
    const int64_t half = p.rows / 2, other = row < half ? row + half : row - half;
    int64_t shared = counted(p.mask, preference_offset(p.cu_seqlens, p.length, other),
                             preference_offset(p.cu_seqlens, p.length, other + 1));
    if (shared < counted(p.mask, begin, end))
      for (cutoff = begin; shared > 0; ++cutoff) shared -= p.mask[cutoff] != 0;
  }
  RowSums head, tail;
  head.add<with_nll>(p, begin, cutoff);
  tail.add<with_nll>(p, cutoff, end);
  const double a = p.ld_alpha;
  const double logps = head.logps.total(), ref = head.ref.total(), behind = tail.logps.total();
  double* s = p.stats + row * kSequenceSums;
  s[kLogps] = logps + a * behind;
  s[kRefLogps] = p.ref_per_token ? ref + a * tail.ref.total() : p.ref_logprobs != nullptr ? p.ref_logprobs[row] : 0;
  s[kCounted] = static_cast<double>(head.tokens + tail.tokens);
  s[kNll] = with_nll ? head.nll.total() + tail.nll.total() : logps + behind;
  s[kNllTokens] = with_nll ? static_cast<double>(head.nll_tokens + tail.nll_tokens) : s[kCounted];
  s[kAligned] = head.aligned.total() + tail.aligned.total();
  s[kCutoff] = static_cast<double>(cutoff - begin);
}

void spread_stretch(const PreferenceBackward& b, int64_t begin, int64_t end, float alone, float both, float nll) {
  const Floats without = broadcast(alone), with = broadcast(both), only = broadcast(nll);
  for (int64_t i = begin; i < end; i += kWidth) {
    const int count = static_cast<int>(end - i < kWidth ? end - i : kWidth);
    const Ints present = kept(b.mask + i, count);
    const Ints likely = b.nll_mask == nullptr ? present : kept(b.nll_mask + i, count);
    const Floats grad = present ? (likely ? with : without) : (likely ? only : Floats{});
    if (count == kWidth) store(b.grad + i, grad);
    else store_part(b.grad + i, grad, count);
  }
}

}  // namespace

int preference_sums(const PreferenceSums& p) {
  const int64_t tokens = preference_offset(p.cu_seqlens, p.length, p.rows);
#pragma omp parallel for schedule(dynamic, 1) if (p.rows > 1 && tokens >= kParallel)
  for (int64_t row = 0; row < p.rows; ++row) {
    if (p.nll_mask != nullptr) sum_row<true>(p, row);
    else sum_row<false>(p, row);
  }
  return 0;
}

int preference_backward(const PreferenceBackward& b) {
  const int64_t tokens = preference_offset(b.cu_seqlens, b.length, b.rows);
#pragma omp parallel for schedule(dynamic, 1) if (b.rows > 1 && tokens >= kParallel)
  for (int64_t row = 0; row < b.rows; ++row) {
    const int64_t begin = preference_offset(b.cu_seqlens, b.length, row);
    const int64_t end = preference_offset(b.cu_seqlens, b.length, row + 1);
    const RowSlopes s = row_slopes(b, row);
    const int64_t cutoff = end - begin < s.cutoff ? end : begin + s.cutoff;
    spread_stretch(b, begin, cutoff, s.head, s.head_nll, s.nll);
    spread_stretch(b, cutoff, end, s.tail, s.tail_nll, s.nll);
  }
  if (b.cu_seqlens != nullptr && b.rows > 0)  // what lies behind the last sequence
    for (int64_t i = tokens; i < b.length; ++i) b.grad[i] = 0;
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
