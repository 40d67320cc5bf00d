// The two orders in which lanes take K, see arguments.h, and what a panel holds of a group: the elements that all lanes take
// before the first of them takes another.
#pragma once

#include <type_traits>

#include "lanes.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

// Inside the scope an operand or a result below the normal range is 0, whatever the process has set, and results are rounded
// to nearest.
class Flushed {
 public:
#if defined(__x86_64__)
  Flushed() : before_(_mm_getcsr()) { _mm_setcsr(0x9fc0); }
  ~Flushed() { _mm_setcsr(before_); }
  Flushed(const Flushed&) = delete;
  void operator=(const Flushed&) = delete;

 private:
  unsigned before_;
#else
  Flushed() {}
#endif
};

struct AsTheProcessHasIt {};

// One element to a lane.
struct Singles {
  static constexpr int64_t kDepth = kLanes;  // elements of a group
  static constexpr int kParts = 1;           // rows of eight fp32 that hold it in a panel
  using Numbers = AsTheProcessHasIt;

  // The j-th element that is added to its lane, and that lane.
  static int64_t taken(int64_t j) { return j; }
  static int64_t lane(int64_t k) { return k % kLanes; }

  // The group at `p`, whose K is dense.
  template <class T>
  static Eight along(const T* p) { return eight(p); }

  // What lane i takes of the group at `p`, for eight rows that are next to each other.
  template <class T>
  static Eight across(const T* p, int64_t step, int i) { return eight(p + i * step); }

  // To a panel whose parts are `step` apart, and an element of it.
  static void put(float* p, int64_t, Eight x) { rlkernel::cpu::RLKERNEL_ISA::put(p, x); }
  static float element(const float* p, int64_t, int64_t k) { return p[k % kLanes]; }

  // A part of a group for every chain of a register, from a panel or from where the operand is.
  template <class T>
  static Register spread_part(const T* p, int, int64_t) { return spread(p); }

  static Register added(Register a, Register b, Register lanes) { return fused(a, b, lanes); }

  template <class T>
  static void store(T* p, Floats x) { rlkernel::cpu::RLKERNEL_ISA::store(p, x); }
};

// Two elements of bf16 to a lane, the second first: what the instruction of AVX-512-BF16 adds.
struct Pairs {
  static constexpr int64_t kDepth = 2 * kLanes;
#if defined(__AVX512BF16__)
  static constexpr int kParts = 1;  // the pairs as they are
#else
  static constexpr int kParts = 2;  // the second elements as fp32, then the first
#endif
  using Numbers = Flushed;

  static int64_t taken(int64_t j) { return j ^ 1; }
  static int64_t lane(int64_t k) { return k / 2 % kLanes; }

  static Eight along(const bf16* p) { return eight(reinterpret_cast<const float*>(p)); }
  static Eight across(const bf16* p, int64_t step, int i) { return interleaved(p + 2 * i * step, p + (2 * i + 1) * step); }

  static void put(float* p, int64_t step, Eight pairs) {
    for (int part = 0; part < kParts; ++part)
      rlkernel::cpu::RLKERNEL_ISA::put(p + part * step, kParts == 1 ? pairs : part_of(pairs, part));
  }
  static float element(const float* p, int64_t step, int64_t k) {
    const int part = k % 2 == 0;
    if (kParts == 2) return p[part * step + lane(k)];
    uint32_t pair;
    std::memcpy(&pair, p + lane(k), sizeof pair);
    pair = part == 0 ? pair & 0xffff0000u : pair << 16;
    float x;
    std::memcpy(&x, &pair, sizeof x);
    return x;
  }

  static Register spread_part(const float* p, int part, int64_t step) { return spread(p + part * step); }
  static Register spread_part(const bf16* p, int part, int64_t) {
    const Register pairs = spread(reinterpret_cast<const float*>(p));
    return kParts == 1 ? pairs : part_of(pairs, part);
  }

  template <class T>
  static void store(T* p, Floats x) {
#if defined(__AVX512BF16__)
    if constexpr (std::is_same_v<T, bf16>) {  // flushes what is below the normal range, of which there is nothing here
      const __m256i halves = (__m256i)_mm512_cvtneps_pbh(x);
      std::memcpy(p, &halves, sizeof halves);
      return;
    }
#endif
    rlkernel::cpu::RLKERNEL_ISA::store(p, x);
  }

  static Register added(Register a, Register b, Register lanes) {
#if defined(__AVX512BF16__)
    return _mm512_dpbf16_ps(lanes, (__m512bh)a, (__m512bh)b);
#else
    return fused(a, b, lanes);
#endif
  }

 private:
  template <class Vector>
  static Vector part_of(Vector pairs, int part) {
    typedef uint32_t Words __attribute__((vector_size(sizeof(Vector))));
    return (Vector)(part == 0 ? (Words)pairs & 0xffff0000u : (Words)pairs << 16);
  }
};

inline bool takes_pairs(const Matmul& x) { return x.a.dtype == Dtype::bf16 && x.b.dtype == Dtype::bf16; }

// Calls body with the order of two operands. With AVX-512-BF16 there is code of pairs alone: what else is multiplied has nothing
// of it.
template <class Body>
void with_order([[maybe_unused]] const Matmul& x, Body body) {
#if defined(__AVX512BF16__)
  body(Pairs{});
#else
  if (takes_pairs(x)) body(Pairs{});
  else body(Singles{});
#endif
}

// Calls body with a value of the type of an operand, which the order may leave no choice.
template <class Order, class Body>
void with_operand(Dtype dtype, Body body) {
  if constexpr (std::is_same_v<Order, Pairs>) body(bf16{});
  else with_type(dtype, body);
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
