// Rotary position embedding: a thread takes a token. What an element becomes follows from its pair and its angle alone, by
// products and a sum that are each rounded: the bits are those of any instruction set.
#include "rlkernel/rotary/arguments.h"

#include <initializer_list>
#include <memory>

#include "shuffles.h"
#include "vectors.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

// A token's cosines and sines, for each element of a head: the sine with the sign that the partner has.
class Angles {
 public:
  explicit Angles(int64_t rotary_dim) : size_(rotary_dim), all_(new float[4 * rotary_dim]) {}

  const float* cos() const { return all_.get(); }
  const float* sin() const { return all_.get() + size_; }

  template <class T>
  void read(const Rotary& r, int64_t token) {
    float *cos = all_.get(), *sin = cos + size_, *cosines = sin + size_, *sines = cosines + size_;
    with_type(r.table_dtype, [&](auto type) {
      row<T>(r, static_cast<const decltype(type)*>(r.cos.start) + rotary_row(r, r.cos, token), cosines);
      row<T>(r, static_cast<const decltype(type)*>(r.sin.start) + rotary_row(r, r.sin, token), sines);
    });
    const int64_t half = size_ / 2;
    for (int64_t i = 0; i < size_; ++i) {
      const int64_t partner = r.interleaved ? i ^ 1 : i < half ? i + half : i - half;
      const bool first = r.interleaved ? i % 2 == 0 : i < half;
      const float s = sines[rotary_column(r, r.inverse ? partner : i)];
      cos[i] = cosines[rotary_column(r, i)];
      sin[i] = first != r.inverse ? -s : s;
    }
  }

 private:
  template <class T, class From>
  static void row(const Rotary& r, const From* from, float* to) {
    each_vector(r.width, [&](int64_t i, int count) {
      const Floats x = load(from + i, count);
      store(to + i, r.round_each ? rounded<T>(x) : x, count);
    });
  }

  int64_t size_;
  std::unique_ptr<float[]> all_;
};

template <class T, bool kRoundEach>
inline Floats turned(Floats x, Floats cos, Floats partner, Floats sin) {
  if constexpr (kRoundEach) return rounded<T>(x * cos) + rounded<T>(partner * sin);
  else return x * cos + partner * sin;
}

template <class T, bool kRoundEach>
void turn(const Rotary& r, const Angles& angles, const T* x, T* out) {
  const float *cos = angles.cos(), *sin = angles.sin();
  if (r.interleaved) {
    each_vector(r.rotary_dim, [&](int64_t i, int count) {
      const Floats y = load(x + i, count), partner = AllLanes::other<1>(y, y);
      store(out + i, turned<T, kRoundEach>(y, load(cos + i, count), partner, load(sin + i, count)), count);
    });
  } else {
    const int64_t half = r.rotary_dim / 2;
    each_vector(half, [&](int64_t i, int count) {
      const Floats a = load(x + i, count), b = load(x + half + i, count);
      store(out + i, turned<T, kRoundEach>(a, load(cos + i, count), b, load(sin + i, count)), count);
      store(out + half + i, turned<T, kRoundEach>(b, load(cos + half + i, count), a, load(sin + half + i, count)), count);
    });
  }
  if (out != x) std::memcpy(out + r.rotary_dim, x + r.rotary_dim, (r.length - r.rotary_dim) * sizeof(T));
}

template <class T, bool kRoundEach>
void all_tokens(const Rotary& r) {
  const int64_t tokens = r.outer * r.inner;
#pragma omp parallel if (tokens * (r.q.heads + r.k.heads) * r.length >= kParallel)
  {
    Angles angles(r.rotary_dim);
#pragma omp for schedule(static)
    for (int64_t token = 0; token < tokens; ++token) {
      angles.read<T>(r, token);
      for (const RotaryHeads* heads : {&r.q, &r.k}) {
        const RotaryHeads& h = *heads;
        const int64_t outer = token / r.inner, inner = token % r.inner;
        const T* x = static_cast<const T*>(h.x) + outer * h.x_outer + inner * h.x_inner;
        T* out = static_cast<T*>(h.out) + outer * h.out_outer + inner * h.out_inner;
        for (int64_t i = 0; i < h.heads; ++i) turn<T, kRoundEach>(r, angles, x + i * h.x_head, out + i * h.out_head);
      }
    }
  }
}

}  // namespace

int rotary(const Rotary& r) {
  with_type(r.dtype, [&](auto type) {
    using T = decltype(type);
    if (r.round_each && sizeof(T) < sizeof(float)) all_tokens<T, true>(r);
    else all_tokens<T, false>(r);
  });
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
