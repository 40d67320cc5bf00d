// Whitening: the moments of each chunk in two passes, one thread's; one thread merges the chunks in order. Sums have eight
// lanes on every instruction set, so that all of them give the same bits.
#include <cstring>

#include "rlkernel/whiten/arguments.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // elements from which waking the other threads pays
constexpr int kEight = 8;

typedef double Doubles __attribute__((vector_size(kEight * 8)));
typedef float Singles __attribute__((vector_size(kEight * 4)));
typedef int64_t Longs __attribute__((vector_size(kEight * 8)));
typedef uint8_t Bytes __attribute__((vector_size(kEight)));

inline Doubles load(const double* p, int count) {
  Doubles x = {};
  std::memcpy(&x, p, count * sizeof(double));
  return x;
}

inline Doubles load(const float* p, int count) {
  Singles x = {};
  std::memcpy(&x, p, count * sizeof(float));
  return __builtin_convertvector(x, Doubles);
}

inline Longs load(const uint8_t* p, int count) {
  Bytes x = {};
  std::memcpy(&x, p, count);
  return __builtin_convertvector(x, Longs) != 0;
}

inline double total(Doubles x) {
  for (int half = kEight / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) x[i] += x[i + half];
  return x[0];
}

// How many elements each of the eight stands for; 0 under the mask and behind the end.
template <bool kMasked, bool kWeighted>
inline Doubles weights_at(const Whiten& w, int64_t i, int count) {
  const Doubles zero = {};
  Doubles weight = zero;
  if constexpr (kWeighted) weight = load(w.weights + i, count);
  else if (count == kEight) weight += 1;
  else for (int k = 0; k < count; ++k) weight[k] = 1;
  if constexpr (kMasked) weight = load(w.mask + i, count) ? weight : zero;
  return weight;
}

template <class T, bool kMasked, bool kWeighted>
Moments moments_of(const Whiten& w, int64_t begin, int64_t end) {
  const T* x = static_cast<const T*>(w.x);
  int64_t at = begin;
  while (at < end && ((kMasked && w.mask[at] == 0) || (kWeighted && w.weights[at] == 0))) ++at;
  if (at == end) return {};
  // differences to the first element that counts: of equal ones the squares are exactly 0
  const double first = x[at];
  const Doubles zero = {};
  const auto each = [&](auto body) {
    int64_t i = begin;
    for (; i + kEight <= end; i += kEight) body(load(x + i, kEight), weights_at<kMasked, kWeighted>(w, i, kEight));
    const int rest = static_cast<int>(end - i);
    if (rest > 0) body(load(x + i, rest), weights_at<kMasked, kWeighted>(w, i, rest));
  };
  Doubles count = zero, sum = zero;
  each([&](Doubles value, Doubles weight) {
    count += weight;
    sum += weight != 0 ? weight * (value - first) : zero;
  });
  const double n = total(count), above = total(sum) / n;
  Doubles squares = zero;
  each([&](Doubles value, Doubles weight) {
    const Doubles d = value - first - above;
    squares += weight != 0 ? weight * (d * d) : zero;
  });
  return {n, first + above, total(squares)};
}

template <class T>
Moments moments_of_chunk(const Whiten& w, int64_t chunk) {
  const int64_t begin = chunk * kChunk, end = begin + kChunk < w.n ? begin + kChunk : w.n;
  if (w.mask != nullptr)
    return (w.weights != nullptr ? moments_of<T, true, true> : moments_of<T, true, false>)(w, begin, end);
  return (w.weights != nullptr ? moments_of<T, false, true> : moments_of<T, false, false>)(w, begin, end);
}

inline Singles scaled_eight(const Scaling& s, Doubles x, double clip) {
  const Doubles zero = {}, centred = x - s.mean, top = zero + clip;
  Doubles y = (centred == 0 ? zero : centred * s.scale) + s.back;
  y = y > top ? top : y < -top ? -top : y;
  return __builtin_convertvector(y, Singles);
}

template <class T, bool kMasked>
void scale_chunk(const Whiten& w, const Scaling& s, int64_t chunk) {
  const T* x = static_cast<const T*>(w.x);
  const int64_t begin = chunk * kChunk, end = begin + kChunk < w.n ? begin + kChunk : w.n;
  typedef int32_t Ints __attribute__((vector_size(kEight * 4)));
  const auto at = [&](int64_t i, int count) {
    Singles y = scaled_eight(s, load(x + i, count), w.clip);
    if constexpr (kMasked) y = __builtin_convertvector(load(w.mask + i, count), Ints) ? y : Singles{};
    std::memcpy(w.out + i, &y, count * sizeof(float));
  };
  int64_t i = begin;
  for (; i + kEight <= end; i += kEight) at(i, kEight);
  if (i < end) at(i, static_cast<int>(end - i));
}

template <class T>
void run(const Whiten& w) {
  const int64_t chunks = chunks_of(w.n);
  const bool parallel = w.n >= kParallel;
  Moments moments = {};
  for (int64_t i = 0; i < w.state_count; ++i) moments = merge(moments, w.states[i]);
  if (w.update) {
#pragma omp parallel for schedule(static) if (parallel)
    for (int64_t chunk = 0; chunk < chunks; ++chunk) w.partials[chunk] = moments_of_chunk<T>(w, chunk);
    Moments batch = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) batch = merge(batch, w.partials[chunk]);
    moments = merge(moments, batch);
  }
  if (w.state != nullptr) *w.state = moments;
  if (w.out == nullptr) return;
  const Scaling scaling = scaling_of(w, moments);
#pragma omp parallel for schedule(static) if (parallel)
  for (int64_t chunk = 0; chunk < chunks; ++chunk)
    (w.mask != nullptr ? scale_chunk<T, true> : scale_chunk<T, false>)(w, scaling, chunk);
}

}  // namespace

int whiten(const Whiten& w) {
  w.wide ? run<double>(w) : run<float>(w);
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
