// KL-shaped rewards: a chunk of a sequence is one thread's.
#include <limits>

#include "rlkernel/kl_shaped_rewards/arguments.h"
#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // tokens from which waking the other threads pays

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

inline Ints load_mask(const uint8_t* p, int count) {
  Bytes bytes = {};
  std::memcpy(&bytes, p, count);
  return __builtin_convertvector(bytes, Ints) != 0;
}

// exp(x) - 1 within 2 ulp: it keeps its digits as x -> 0, is infinite where exp(x) is, and NaN at NaN.
inline Floats expm1(Floats x) {
  const Floats highest = broadcast(88.72283f), lowest = broadcast(-18.0f), one = broadcast(1.0f);
  Floats c = x > highest ? highest : x;
  c = c < lowest ? lowest : c;
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Floats n = fma(c, broadcast(1.44269504f), magic) - magic;
  Floats r = fma(n, broadcast(-0.693359375f), c);  // ln 2 in two parts: the product with the first is exact
  r = fma(n, broadcast(2.12194440e-4f), r);
  Floats q = fma(broadcast(1.991993e-4f), r, broadcast(1.3945091e-3f));
  q = fma(q, r, broadcast(8.3332649e-3f));
  q = fma(q, r, broadcast(4.1666303e-2f));
  q = fma(q, r, broadcast(1.6666667e-1f));
  q = fma(q, r, broadcast(0.5f));
  q = fma(q * r, r, r);  // exp(r) - 1
  // 2^(n - 1), because n reaches 128; NaN has no exponent to make one of
  const Ints exponent = __builtin_convertvector(x == x ? n : one, Ints);
  const Floats half = (Floats)((exponent + 126) << 23);
  const Floats y = (fma(half, q, half) - broadcast(0.5f)) * broadcast(2.0f);
  const Floats near = exponent == 0 ? q : y;
  return x > highest ? broadcast(std::numeric_limits<float>::infinity()) : x != x ? x : near;
}

// NaN stays NaN.
inline Floats within(Floats x, Floats bound) { return x > bound ? bound : x < -bound ? -bound : x; }

template <KlEstimator kEstimator>
inline Floats kl_of(Floats d) {
  if constexpr (kEstimator == KlEstimator::k1) return d;
  if constexpr (kEstimator == KlEstimator::abs) return abs(d);
  if constexpr (kEstimator == KlEstimator::k2) return d * d * broadcast(0.5f);
  return expm1(-d) + d;
}

// The chunk's last token that counts, or -1 where another one behind the chunk does.
int64_t paid_token(const KlChunk& c) {
  if (c.mask == nullptr) return c.behind > 0 ? -1 : c.count - 1;
  if (c.behind > 0 && std::memchr(c.mask + c.count, 1, c.behind) != nullptr) return -1;
  int64_t last = c.count - 1;
  while (last >= 0 && c.mask[last] == 0) --last;
  return last;
}

template <KlEstimator kEstimator>
void shape(const KlShapedRewards& k, int64_t slot) {
  const KlChunk c = kl_chunk(k, slot);
  if (c.count == 0) return;
  if (c.padding) {
    std::memset(c.out, 0, c.count * sizeof(float));
    return;
  }
  const Floats zero = {}, beta = broadcast(k.beta), input = broadcast(k.kl_input), output = broadcast(k.kl_output);
  const auto at = [&](int64_t i, int count) {
    const bool whole = count == kWidth;
    const auto read = [&](const float* p) { return whole ? load(p + i) : load_part(p + i, count); };
    const Floats d = within(read(c.logprobs) - read(c.ref_logprobs), input);
    Floats result = zero - beta * within(kl_of<kEstimator>(d), output);
    if (!k.per_sequence) result = read(c.rewards) + result;
    if (c.mask != nullptr) result = load_mask(c.mask + i, count) ? result : zero;
    if (whole) store(c.out + i, result);
    else store_part(c.out + i, result, count);
  };
  int64_t i = 0;
  for (; i + kWidth <= c.count; i += kWidth) at(i, kWidth);
  if (i < c.count) at(i, static_cast<int>(c.count - i));
  if (!k.per_sequence) return;
  const int64_t paid = paid_token(c);
  if (paid >= 0) c.out[paid] = *c.rewards + c.out[paid];
}

template <KlEstimator kEstimator>
void run(const KlShapedRewards& k) {
  const int64_t slots = slots_of(k.sequences);
  const int64_t tokens = k.sequences.cu_seqlens ? k.sequences.length : k.sequences.rows * k.sequences.length;
#pragma omp parallel for schedule(static) if (tokens >= kParallel)
  for (int64_t slot = 0; slot < slots; ++slot) shape<kEstimator>(k, slot);
}

}  // namespace

int kl_shaped_rewards(const KlShapedRewards& k) {
  switch (k.estimator) {
    case KlEstimator::k1: run<KlEstimator::k1>(k); return 0;
    case KlEstimator::abs: run<KlEstimator::abs>(k); return 0;
    case KlEstimator::k2: run<KlEstimator::k2>(k); return 0;
    case KlEstimator::k3: run<KlEstimator::k3>(k); return 0;
  }
  return 1;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
