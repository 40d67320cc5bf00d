// Clipped value loss. A chunk belongs to one thread and its partial has a slot; one thread merges the slots in order, so
// the bits depend neither on the threads nor, for a sequence, on the others.
#include <cmath>
#include <limits>
#include <type_traits>

#include "rlkernel/value_loss/terms.h"
#include "simd.h"

namespace rlkernel::cpu::RLKERNEL_ISA {
namespace {

constexpr int64_t kParallel = 1 << 15;  // tokens from which waking the other threads pays
constexpr int kBlock = 16;              // vectors that are summed in fp32 before the sum goes to fp64
constexpr float kInf = std::numeric_limits<float>::infinity();

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));

inline Floats select(Ints which, Floats a, Floats b) { return which ? a : b; }

inline Ints load_mask(const uint8_t* p, int count) {
  Bytes bytes = {};
  std::memcpy(&bytes, p, count);
  return __builtin_convertvector(bytes, Ints) != 0;
}

inline int count_of(Ints kept) {  // lanes of -1
  int count = 0;
  for (int i = 0; i < kWidth; ++i) count -= kept[i];
  return count;
}

template <bool kWhole, class T>
inline Floats at(const T* p, int count) {
  if constexpr (kWhole) return load(p);
  else return load_part(p, count);
}

struct Terms {
  Floats loss, slope;
};

template <bool kHuber>
Terms token_loss(Floats difference, float delta) {
  const Floats square = broadcast(0.5f) * difference * difference;
  if constexpr (!kHuber) return {square, difference};
  const Floats size = abs(difference), limit = broadcast(delta);
  const Ints far = size >= limit;
  return {select(far, limit * (size - broadcast(0.5f * delta)), square), select(far, copy_sign(limit, difference), difference)};
}

// One chunk of a sequence; `old_values` and `slope` may be null.
template <class T, class Other>
struct Chunk {
  const T* values;
  const Other *returns, *old_values;
  const uint8_t* mask;
  float* slope;
  int64_t count;
};

template <class T, class Other>
Chunk<T, Other> chunk_at(const ValueLossForward& f, int64_t row, int64_t chunk, Tokens tokens) {
  const int64_t start = tokens.begin + chunk * kChunk, strided = f.sequences.cu_seqlens != nullptr ? 0 : row;
  const int64_t left = tokens.count - chunk * kChunk;
  return {static_cast<const T*>(f.values) + strided * f.values_stride + start,
          static_cast<const Other*>(f.returns) + strided * f.returns_stride + start,
          f.old_values ? static_cast<const Other*>(f.old_values) + strided * f.old_stride + start : nullptr,
          f.mask + strided * f.mask_stride + start,
          f.slope ? f.slope + strided * f.sequences.length + start : nullptr,
          left < kChunk ? left : kChunk};
}

template <class T, class Other, bool kClip, bool kHuber>
ValueSums sum_chunk(const ValueLossForward& f, const Chunk<T, Other>& c) {
  ValueSums sums = {};
  int64_t first = 0;
  while (first < c.count && c.mask[first] == 0) ++first;
  if (first == c.count) {
    if (c.slope) std::memset(c.slope, 0, c.count * sizeof(float));
    return sums;
  }
  // moments from the first token on: of equal returns the variance is exactly 0
  const float first_return = load_part(c.returns + first, 1)[0], first_error = first_return - load_part(c.values + first, 1)[0];
  double returned = 0, returned_squares = 0, missed = 0, missed_squares = 0;
  const Floats zero = {}, range = broadcast(f.cliprange), start_return = broadcast(first_return),
               start_error = broadcast(first_error);
  for (int64_t begin = 0; begin < c.count; begin += kBlock * kWidth) {
    Floats loss = zero, returns = zero, return_squares = zero, errors = zero, error_squares = zero;
    Ints kept_count = {}, odd_count = {}, clipped_count = {};
    const int64_t end = begin + kBlock * kWidth < c.count ? begin + kBlock * kWidth : c.count;
    const auto add = [&](int64_t i, auto part) {  // a constant where the vector is whole
      constexpr bool whole = sizeof part != sizeof(int);
      const Ints kept = load_mask(c.mask + i, part);
      const Floats value = at<whole>(c.values + i, part);
      const Floats target = at<whole>(c.returns + i, part);
      Terms token = token_loss<kHuber>(value - target, f.huber_delta);
      if constexpr (kClip) {
        const Floats old = at<whole>(c.old_values + i, part);
        const Floats low = old - range, high = old + range;
        const Floats below = select(value > high, high, value);
        const Floats bounded = select(below < low, low, below);
        const Floats other = select(old != old, old, token_loss<kHuber>(bounded - target, f.huber_delta).loss);
        const Ints clipped = other > token.loss, odd = other != other;
        token.slope = select(clipped, zero, select(odd, other, token.slope));
        token.loss = select(clipped | odd, other, token.loss);
        clipped_count += clipped & kept;
      }
      token.loss = select(kept, token.loss, zero);
      if (c.slope) {
        token.slope = select(kept, token.slope, zero);
        if constexpr (whole) store(c.slope + i, token.slope);
        else store_part(c.slope + i, token.slope, part);
      }
      loss += token.loss;
      kept_count += kept;
      odd_count += ~(Ints)(abs(token.loss) < broadcast(kInf));
      const Floats r = select(kept, target - start_return, zero);
      const Floats e = select(kept, target - value - start_error, zero);
      returns += r, return_squares = return_squares + r * r;
      errors += e, error_squares = error_squares + e * e;
    };
    int64_t i = begin;
    for (; i + kWidth <= end; i += kWidth) add(i, std::integral_constant<int, kWidth>());
    if (i < end) add(i, static_cast<int>(end - i));
    sums.count += count_of(kept_count);
    sums.nonfinite += count_of(odd_count);
    sums.clipped += count_of(clipped_count);
    sums.loss += total(loss);
    returned += total(returns), returned_squares += total(return_squares);
    missed += total(errors), missed_squares += total(error_squares);
  }
  sums.return_mean = first_return + returned / sums.count;
  sums.return_squares = returned_squares - returned * (returned / sums.count);
  sums.error_mean = first_error + missed / sums.count;
  sums.error_squares = missed_squares - missed * (missed / sums.count);
  return sums;
}

template <class T, class Other>
void sum_slot(const ValueLossForward& f, int64_t slot) {
  const int64_t row = row_of(f.sequences, slot), index = slot - first_slot(f.sequences, row);
  const Tokens tokens = tokens_of(f.sequences, row);
  if (index >= chunks_of(tokens.count)) return;  // a slot that no chunk needs
  const Chunk<T, Other> chunk = chunk_at<T, Other>(f, row, index, tokens);
  if (row == f.sequences.rows) {  // padding
    if (chunk.slope) std::memset(chunk.slope, 0, chunk.count * sizeof(float));
    return;
  }
  const bool huber = f.huber_delta > 0;
  f.partials[slot] = f.old_values ? (huber ? sum_chunk<T, Other, true, true> : sum_chunk<T, Other, true, false>)(f, chunk)
                                  : (huber ? sum_chunk<T, Other, false, true> : sum_chunk<T, Other, false, false>)(f, chunk);
}

template <class T>
void multiply_slot(const ValueLossBackward& b, int64_t slot) {
  const int64_t row = row_of(b.sequences, slot), index = slot - first_slot(b.sequences, row);
  const Tokens tokens = tokens_of(b.sequences, row);
  const int64_t left = tokens.count - index * kChunk, count = left < kChunk ? left : kChunk;
  const int64_t start = tokens.begin + index * kChunk + (b.sequences.cu_seqlens ? 0 : row * b.sequences.length);
  const Floats factor = broadcast(row < b.sequences.rows ? *b.grad_loss * b.scale[row] : 0);
  T* out = static_cast<T*>(b.out) + start;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) store(out + i, load(b.slope + start + i) * factor);
  if (i < count) store_part(out + i, load_part(b.slope + start + i, static_cast<int>(count - i)) * factor, static_cast<int>(count - i));
}

template <class Arguments>
void each_slot(const Sequences& sequences, void (*body)(const Arguments&, int64_t), const Arguments& arguments) {
  const int64_t slots = slots_of(sequences);
  const int64_t tokens = sequences.cu_seqlens ? sequences.length : sequences.rows * sequences.length;
#pragma omp parallel for schedule(static) if (tokens >= kParallel)
  for (int64_t slot = 0; slot < slots; ++slot) body(arguments, slot);
}

void merge_rows(const ValueLossForward& f) {
  ValueTotal total = {};
  for (int64_t row = 0; row < f.sequences.rows; ++row) {
    const ValueSums* partials = f.partials + first_slot(f.sequences, row);
    const int64_t chunks = chunks_of(tokens_of(f.sequences, row).count);
    ValueSums sums = {};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) sums = merge(sums, partials[chunk]);
    f.scale[row] = static_cast<float>(sums.count);
    add_sequence(total, sums, f.unit);
  }
  write_results(f, total);
  const double weight = weight_of(f, total);
  for (int64_t row = 0; row < f.sequences.rows; ++row) f.scale[row] = scale_of(weight, f.scale[row], f.unit);
}

}  // namespace

int value_loss_forward(const ValueLossForward& f) {
  void (*body)(const ValueLossForward&, int64_t) = nullptr;
  switch (f.dtype) {
    case Dtype::f32: body = sum_slot<float, float>; break;
    case Dtype::f16: body = f.other_dtype == Dtype::f32 ? sum_slot<fp16, float> : sum_slot<fp16, fp16>; break;
    case Dtype::bf16: body = f.other_dtype == Dtype::f32 ? sum_slot<bf16, float> : sum_slot<bf16, bf16>; break;
  }
  if (body == nullptr || (f.other_dtype != f.dtype && f.other_dtype != Dtype::f32)) return 1;
  each_slot(f.sequences, body, f);
  merge_rows(f);
  return 0;
}

int value_loss_backward(const ValueLossBackward& b) {
  switch (b.out_dtype) {
    case Dtype::f32: each_slot(b.sequences, multiply_slot<float>, b); break;
    case Dtype::f16: each_slot(b.sequences, multiply_slot<fp16>, b); break;
    case Dtype::bf16: each_slot(b.sequences, multiply_slot<bf16>, b); break;
    default: return 1;
  }
  return 0;
}

}  // namespace rlkernel::cpu::RLKERNEL_ISA
