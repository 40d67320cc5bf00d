// What the norms share: weights in fp32, and the sum over rows that is the gradient of a weight.
#pragma once

#include <memory>

#include "rlkernel/norm_rows.h"
#include "row_sum.h"
#include "vectors.h"

namespace rlkernel::cpu::RLKERNEL_ISA {

// The weights in fp32, `offset` added: as they lie where they are fp32 and nothing is added. Empty: 1 each.
class Weights {
 public:
  Weights(const void* weight, Dtype dtype, float offset, int64_t length) {
    if (weight == nullptr) return;
    if (dtype == Dtype::f32 && offset == 0) {
      start_ = static_cast<const float*>(weight);
      return;
    }
    wide_.reset(new float[length]);
    with_type(dtype, [&](auto type) {
      const auto* narrow = static_cast<const decltype(type)*>(weight);
      each_vector(length, [&](int64_t i, int count) {
        const Floats wide = load(narrow + i, count);
        store(wide_.get() + i, offset == 0 ? wide : wide + broadcast(offset), count);  // -0 stays -0
      });
    });
    start_ = wide_.get();
  }

  const float* data() const { return start_; }

 private:
  const float* start_ = nullptr;
  std::unique_ptr<float[]> wide_;
};

// out[i] = sum of partials[chunk][i] in the order of the chunks, in fp64.
inline void sum_partials(const float* partials, int64_t rows, int64_t length, void* out, Dtype dtype) {
  const int64_t chunks = norm_chunks(rows);
  constexpr int kBlock = 64;
#pragma omp parallel for schedule(static) if (chunks * length >= kParallel)
  for (int64_t start = 0; start < length; start += kBlock) {
    const int count = static_cast<int>(length - start < kBlock ? length - start : kBlock);
    double sums[kBlock] = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int i = 0; i < count; ++i) sums[i] += partials[chunk * length + start + i];
    float narrow[kBlock] = {};
    for (int i = 0; i < kBlock; ++i) narrow[i] = static_cast<float>(sums[i]);
    with_type(dtype, [&](auto type) {
      auto* to = static_cast<decltype(type)*>(out) + start;
      each_vector(count, [&](int64_t i, int part) { store(to + i, load(narrow + i), part); });
    });
  }
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
