// The policy loss: a sequence belongs to one thread, and the sequences are joined in their order. Its bits depend neither
// on the other sequences nor on the threads nor on the alignment.
#include <algorithm>
#include <type_traits>

#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

inline Floats fused(Floats a, Floats b, Floats c) { return fma(a, b, c); }
inline Floats magnitude(Floats x) { return abs(x); }
inline Floats keep(Ints mask, Floats x) { return (Floats)((Ints)x & mask); }
// What `a < b ? a : b` is, in one instruction, which GCC does not see.
inline Floats smaller(Floats a, Floats b) { return min(a, b); }
inline Floats larger(Floats a, Floats b) { return max(a, b); }
inline Bits raw(Floats x) { return (Bits)x; }
inline Ints bits_of(Floats x) { return (Ints)x; }
inline Floats floats_of(Ints bits) { return (Floats)bits; }
inline Floats as_float(Ints x) { return __builtin_convertvector(x, Floats); }
inline Floats power_of_two(Floats n) { return (Floats)((__builtin_convertvector(n, Ints) + 127) << 23); }


// The same for one number, which a whole sequence has.
inline float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float power_of_two(float n) {
  const int bits = static_cast<int>(static_cast<unsigned>(static_cast<int>(n) + 127) << 23);
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA

#define RLKERNEL_SPACE rlkernel::cpu::RLKERNEL_ISA
#include "rlkernel/policy_loss/selection.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kBlock = 64 * kWidth;  // tokens whose sums stay in fp32
constexpr int64_t kParallel = 1 << 14;   // tokens from which waking the other threads pays

typedef double Doubles __attribute__((vector_size(kWidth * 8)));

// GCC 12 takes __builtin_convertvector of bytes apart, one by one: half of the time of the loss.
inline Ints widen_bytes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (Ints)_mm512_maskz_cvtepu8_epi32(kAll, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#elif defined(__AVX2__)
  return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
#else
  Ints x;
  for (int i = 0; i < kWidth; ++i) x[i] = p[i];
  return x;
#endif
}

inline void narrow_mask(Ints mask, uint8_t* p) {
#if defined(__AVX512F__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_maskz_cvtepi32_epi8(kAll, (__m512i)(mask & 1)));
#else
  for (int i = 0; i < kWidth; ++i) p[i] = static_cast<uint8_t>(mask[i] & 1);
#endif
}

// Positions wrap around at 2^32, as the counts of a GPU do.
inline Bits positions(int64_t first) {
  Bits x{};
  for (int i = 0; i < kWidth; ++i) x[i] = static_cast<uint32_t>(first + i);
  return x;
}

inline void add_to(uint32_t* counts, Ints counted, Bits bins) {
  if (!any((Bits)counted)) return;
  for (int i = 0; i < kWidth; ++i) counts[bins[i]] -= static_cast<uint32_t>(counted[i]);  // true is -1
}

struct Full {
  int64_t i;

  Floats load(const float* p) const { return RLKERNEL_ISA::load(p + i); }
  void store(float* p, Floats x) const { RLKERNEL_ISA::store(p + i, x); }
  void store(uint8_t* p, Ints x) const { narrow_mask(x, p + i); }
  Ints mask(const uint8_t* p) const { return widen_bytes(p + i) != 0; }
  Bits position(int64_t begin) const { return positions(i - begin); }
  void tally(uint32_t* counts, Ints counted, Bits bins) const { add_to(counts, counted, bins); }
};

struct Tail {
  int64_t i;
  int count;

  Floats load(const float* p) const { return load_part(p + i, count); }
  void store(float* p, Floats x) const { store_part(p + i, x, count); }
  void store(uint8_t* p, Ints x) const {
    uint8_t bytes[kWidth];
    narrow_mask(x, bytes);
    std::memcpy(p + i, bytes, count);
  }
  Ints mask(const uint8_t* p) const {
    uint8_t bytes[kWidth] = {};
    std::memcpy(bytes, p + i, count);
    return Full{0}.mask(bytes);
  }
  Bits position(int64_t begin) const { return positions(i - begin); }
  void tally(uint32_t* counts, Ints counted, Bits bins) const { add_to(counts, counted, bins); }
};

struct Vector {
  using Value = Floats;

  template <int kCount>
  struct Sums {
    Floats part[kCount] = {};
    Doubles done[kCount] = {};

    inline __attribute__((always_inline)) void add(int k, Floats x) { part[k] += x; }
    void add_wide(int k, Floats x) { done[k] += __builtin_convertvector(x, Doubles); }
    void flush() {
      for (int k = 0; k < kCount; ++k) {
        done[k] += __builtin_convertvector(part[k], Doubles);
        part[k] = Floats{};
      }
    }
    double total(int k) const {  // pairwise
      Doubles lane = done[k];
      for (int half = kWidth / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) lane[i] += lane[i + half];
      return lane[0];
    }
  };

  int64_t begin, end;

  template <class S, class Body>
  inline __attribute__((always_inline)) void each(S& sums, Body body) const {
    // Blocks begin at places in the sequence and end with its tail: what is padded to another length has the same sums.
    int64_t i = begin;
    while (i < end) {
      const int64_t stop = end - i < kBlock ? end : i + kBlock;
      for (; stop - i >= kWidth; i += kWidth) body(Full{i});
      if (i < stop) body(Tail{i, static_cast<int>(stop - i)});
      i = stop;
      sums.flush();
    }
  }
  template <class S>
  void finish(S&) const {}
  float smallest(Floats x) const { return -RLKERNEL_ISA::largest(-x); }
  float largest(Floats x) const { return RLKERNEL_ISA::largest(x); }
  bool leads() const { return true; }
};

template <class Rows, class Body>
void over_sequences(const Rows& p, Body body) {
  const int64_t tokens = offset_of(p, p.rows);
#pragma omp parallel for schedule(dynamic, 1) if (p.rows > 1 && tokens >= kParallel)
  for (int64_t r = 0; r < p.rows; ++r) {
    Vector vector{offset_of(p, r), offset_of(p, r + 1)};
    body(r, vector);
  }
}

void count_level(const PolicySelection& p, int level, uint32_t prefix, uint32_t* counts) {
  std::fill_n(counts, kBins, 0u);
#pragma omp parallel if (p.rows > 1 && offset_of(p, p.rows) >= kParallel)
  {
    uint32_t own[kBins] = {};
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t r = 0; r < p.rows; ++r) {
      Vector vector{offset_of(p, r), offset_of(p, r + 1)};
      selection_count(p, r, vector, level, prefix, own);
    }
#pragma omp critical
    for (int i = 0; i < kBins; ++i) counts[i] += own[i];
  }
}

}  // namespace

int policy_loss(const PolicyLoss& p) {
  if (p.rule.normalize) {
    over_sequences(p, [&](int64_t r, Vector& vector) { policy_loss_weights(p, r, vector); });
    double weights = 0, count = 0;
    for (int64_t r = 0; r < p.rows; ++r) {
      weights += p.partials[r * kPartials];
      count += p.partials[r * kPartials + 1];
    }
    p.values[kValues] = mean_weight(weights, count);
  }
  const bool whole = p.rule.level != Level::token;
  if (!is_plain(p)) {
    over_sequences(p, [&](int64_t r, Vector& vector) { policy_loss_sequence<false>(p, r, vector, whole); });
  } else if (whole) {
    over_sequences(p, [&](int64_t r, Vector& vector) { policy_loss_sequence<true>(p, r, vector, std::true_type{}); });
  } else {
    over_sequences(p, [&](int64_t r, Vector& vector) { policy_loss_sequence<true>(p, r, vector, std::false_type{}); });
  }
  double sums[kSums] = {}, largest = 0;
  for (int64_t r = 0; r < p.rows; ++r) {
    const double* part = p.partials + r * kPartials;
    for (int k = 0; k < kSums; ++k) sums[k] += part[k];
    largest = part[kSums] > largest ? part[kSums] : largest;
  }
  policy_loss_values(p.rule, sums, largest, p.values);
  return 0;
}

int policy_select(const PolicySelection& p) {
  over_sequences(p, [&](int64_t r, Vector& vector) { selection_sums(p, r, vector); });
  double* sums = p.partials + p.rows * kSelectionSums;
  std::fill_n(sums, kSelectionSums, 0.0);
  for (int64_t i = 0; i < p.rows * kSelectionSums; ++i) sums[i % kSelectionSums] += p.partials[i];

  Cut cut{0, static_cast<uint32_t>(batch_of(p).wanted)};
  for (int level = 0; level < kLevels; ++level) {
    uint32_t* counts = p.counts + level * kBins;
    count_level(p, level, cut.rank, counts);
    uint32_t bin = bins_of(level) - 1;
    for (; bin > 0 && counts[bin] < cut.wanted; --bin) cut.wanted -= counts[bin];
    cut.rank = cut.rank * bins_of(level) + bin;
  }
  const bool tied = is_tied(p, cut);
  if (tied) {
    over_sequences(p, [&](int64_t r, Vector& vector) { selection_ties(p, r, vector, cut); });
    double before = 0;  // in the first column, how many there are; in the second, in the sequences before it
    for (int64_t r = 0; r < p.rows; ++r) {
      p.partials[r * kSelectionSums + 1] = before;
      before += p.partials[r * kSelectionSums];
    }
  }
  over_sequences(p, [&](int64_t r, Vector& vector) {
    const double left = cut.wanted - (tied ? p.partials[r * kSelectionSums + 1] : 0);
    selection_write(p, r, vector, cut, tied ? end_of_ties(p, r, vector, cut, left) : vector.end);
  });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
