// The policy loss: a sequence belongs to one thread, and the sequences are joined in their order. Its bits depend neither
// on the other sequences nor on the threads nor on the alignment.
#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

inline Floats fused(Floats a, Floats b, Floats c) { return fma(a, b, c); }
inline Floats magnitude(Floats x) { return abs(x); }
inline Floats power_of_two(Floats n) { return (Floats)((__builtin_convertvector(n, Ints) + 127) << 23); }

}  // namespace rlkernel::cpu::RLKERNEL_ISA

#define RLKERNEL_SPACE rlkernel::cpu::RLKERNEL_ISA
#include "rlkernel/policy_loss_terms.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kBlock = 64 * kWidth;  // tokens whose sums stay in fp32
constexpr int64_t kParallel = 1 << 14;   // tokens from which waking the other threads pays

struct Vector {
  using Value = Floats;
  using Mask = Ints;
  typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

  struct At {
    int64_t i;
    int count;

    Floats load(const float* p) const {
      return count == kWidth ? RLKERNEL_ISA::load(p + i) : load_part(p + i, count);
    }
    Ints mask(const uint8_t* p) const {
      Bytes bytes = {};
      if (count == kWidth) std::memcpy(&bytes, p + i, kWidth);
      else std::memcpy(&bytes, p + i, count);
      return __builtin_convertvector(bytes, Ints) != 0;
    }
    void store(float* p, Floats x) const {
      if (count == kWidth) RLKERNEL_ISA::store(p + i, x);
      else store_part(p + i, x, count);
    }
  };

  template <int kCount>
  struct Sums {
    Floats part[kCount] = {};
    double done[kCount] = {};

    void add(int k, Floats x) { part[k] += x; }
    void flush() {
      for (int k = 0; k < kCount; ++k) {
        done[k] += RLKERNEL_ISA::total(part[k]);
        part[k] = Floats{};
      }
    }
    double total(int k) const { return done[k]; }
  };

  int64_t begin, end;

  template <class S, class Body>
  inline __attribute__((always_inline)) void each(S& sums, Body body) const {
    for (int64_t start = begin; start < end; start += kBlock) {
      const int64_t stop = end - start < kBlock ? end : start + kBlock;
      for (int64_t i = start; i < stop; i += kWidth)
        body(At{i, static_cast<int>(stop - i < kWidth ? stop - i : kWidth)});
      sums.flush();
    }
  }
  template <class S>
  void finish(S&) const {}
  float smallest(Floats x) const { return -RLKERNEL_ISA::largest(-x); }
  float largest(Floats x) const { return RLKERNEL_ISA::largest(x); }
  bool leads() const { return true; }
};

}  // namespace

int policy_loss(const PolicyLoss& p) {
  const int64_t tokens = offset_of(p, p.rows);
#pragma omp parallel for schedule(dynamic, 1) if (p.rows > 1 && tokens >= kParallel)
  for (int64_t r = 0; r < p.rows; ++r) {
    Vector vector{offset_of(p, r), offset_of(p, r + 1)};
    policy_loss_sequence(p, r, vector);
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

}  // namespace rlkernel::cpu::RLKERNEL_ISA
