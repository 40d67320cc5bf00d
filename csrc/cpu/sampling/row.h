// Pass B of sampling: what a row is after its splits, and its tokens read a second time.
#pragma once

#include "split.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

// What the splits say together, in fp64 and in their order.
struct Softmax {
  float max = -kInf, max_x = -kInf;
  double sum = 0, weighted = 0, sum_x = 0, finite = 0;
  double mean = 0, squares = 0;
  int64_t argmax = 0;
  double best = -std::numeric_limits<double>::infinity();
  int64_t token = -1;
  float token_z = kNan, token_x = kNan;

  Softmax(const double* records, int64_t splits, double temperature) {
    for (int64_t k = 0; k < splits; ++k) {
      const double* r = records + k * kRecord;
      if (r[kMaxZ] > max) {
        max = static_cast<float>(r[kMaxZ]);
        argmax = static_cast<int64_t>(r[kArgmax]);
      }
      max_x = std::fmax(max_x, static_cast<float>(r[kMaxX]));
    }
    for (int64_t k = 0; k < splits; ++k) {
      const double* r = records + k * kRecord;
      if (r[kSumZ] != r[kSumZ]) sum = r[kSumZ];
      const double shift = (r[kMaxZ] - max) / temperature;
      const double factor = shift == 0 ? 1 : r[kMaxZ] > -kInf ? std::exp(shift) : 0;
      if (factor != 0) {
        sum += r[kSumZ] * factor;
        weighted += (r[kWeighted] + r[kSumZ] * shift) * factor;
      }
      if (r[kMaxX] > -kInf) sum_x += r[kSumX] * (r[kMaxX] == max_x ? 1 : std::exp(r[kMaxX] - max_x));
      if (r[kFinite] > 0) {  // Chan, Golub and LeVeque 1979
        const double count = finite + r[kFinite], apart = r[kMean] - mean;
        squares += r[kM2] + apart * apart * (finite * r[kFinite] / count);
        mean += apart * (r[kFinite] / count);
        finite = count;
      }
      const double key = r[kKey] == kInf ? r[kKey] : r[kKey] + shift;
      if (key > best) {
        best = key;
        token = static_cast<int64_t>(r[kToken]);
        token_z = static_cast<float>(r[kTokenZ]);
        token_x = static_cast<float>(r[kTokenX]);
      }
    }
  }
};

// z of a row, group by group.
class Reader {
 public:
  Reader(const SamplingInputs& in, int64_t row)
      : dtype_(in.dtype), vocab_(in.whole_vocab),
        adjusted_(in.adjusted != nullptr ? in.adjusted + row * in.adjusted_stride : nullptr),
        words_(in.bitmask != nullptr ? in.bitmask + row * in.bitmask_stride : nullptr) {
    const int64_t size = in.dtype == Dtype::f32 ? 4 : 2;
    x_ = static_cast<const char*>(in.logits) + row * in.row_stride * size;
  }

  // 64 floats, in place or in `buffer`; behind the vocabulary -inf.
  const float* operator()(int64_t g, float* buffer) const {
    const int64_t first = g * kGroup;
    const int count = static_cast<int>(vocab_ - first < kGroup ? vocab_ - first : kGroup);
    const float* wide = adjusted_ != nullptr ? adjusted_ : dtype_ == Dtype::f32 ? reinterpret_cast<const float*>(x_) : nullptr;
    if (wide != nullptr && words_ == nullptr && count == kGroup) return wide + first;
    if (wide != nullptr)
      fill(wide + first, count, buffer);
    else if (dtype_ == Dtype::f16)
      fill(reinterpret_cast<const fp16*>(x_) + first, count, buffer);
    else
      fill(reinterpret_cast<const bf16*>(x_) + first, count, buffer);
    if (words_ != nullptr)
      for (int i = 0; i < count; i += kWidth) {
        const uint32_t bits = static_cast<uint32_t>(words_[(first + i) / 32]) >> ((first + i) % 32);
        const Bits set = broadcast_bits(bits) >> iota(0) & 1u;
        store(buffer + i, set != 0u ? load(buffer + i) : broadcast(-kInf));
      }
    return buffer;
  }

  float x(int64_t token) const {
    if (dtype_ == Dtype::f32) return reinterpret_cast<const float*>(x_)[token];
    if (dtype_ == Dtype::f16) return widen_one(reinterpret_cast<const fp16*>(x_)[token]);
    return widen_one(reinterpret_cast<const bf16*>(x_)[token]);
  }

  void prefetch_group(int64_t g) const {
    const bool wide = adjusted_ != nullptr || dtype_ == Dtype::f32;
    const char* p = adjusted_ != nullptr ? reinterpret_cast<const char*>(adjusted_) : x_;
    p += g * kGroup * (wide ? 4 : 2);
    for (int line = 0; line < (wide ? 4 : 2); ++line) prefetch(p + line * 64);
  }

 private:
  template <class T>
  static void fill(const T* p, int count, float* buffer) {
    int i = 0;
    for (; i + kWidth <= count; i += kWidth) store(buffer + i, load(p + i));
    for (; i < kGroup; i += kWidth) {
      const int rest = count > i ? count - i : 0;
      store(buffer + i, fill_tail(load_part(p + i, rest), rest, -kInf));
    }
  }

  Dtype dtype_;
  int64_t vocab_;
  const float* adjusted_;
  const int32_t* words_;
  const char* x_;
};

}  // namespace
}  // namespace rlkernel::cpu::RLKERNEL_ISA
