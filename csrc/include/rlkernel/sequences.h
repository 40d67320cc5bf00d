// How a batch of sequences is cut: a sequence into chunks of its own, counted from its first token, so that nothing in a chunk
// depends on the sequences around it. Chunks have slots; a slot's sequence is found from the offsets on the device, so the
// host need not know them.
#pragma once
#include "rlkernel/kernel.h"

namespace rlkernel {

constexpr int64_t kChunk = 2048;  // tokens of a sequence that are summed together

// `rows` padded sequences of `length` tokens; or packed ones, where `length` is N and sequence r holds the tokens
// [cu_seqlens[r], cu_seqlens[r + 1]). What lies behind the last one is padding: a sequence without a sum.
struct Sequences {
  int64_t rows, length;
  const void* cu_seqlens;  // [rows + 1] of `offset_bytes` bytes each, or null: padded
  int offset_bytes;
};

struct Tokens {
  int64_t begin, count;
};

// Static: the files for each instruction set must not share one copy. Offsets that are no offsets are bent into [0, N].
RLKERNEL_HOST_DEVICE static inline int64_t begin_of(const Sequences& s, int64_t row) {
  if (row > s.rows) return s.length;
  const int64_t at = s.offset_bytes == 4 ? static_cast<const int32_t*>(s.cu_seqlens)[row]
                                         : static_cast<const int64_t*>(s.cu_seqlens)[row];
  return at < 0 ? 0 : at > s.length ? s.length : at;
}

// Packed: positions in the flat tensor. Padded: `begin` is 0, rows have strides of their own.
RLKERNEL_HOST_DEVICE static inline Tokens tokens_of(const Sequences& s, int64_t row) {
  if (s.cu_seqlens == nullptr) return {0, s.length};
  const int64_t begin = begin_of(s, row), end = begin_of(s, row + 1);
  return {begin, end > begin ? end - begin : 0};
}

RLKERNEL_HOST_DEVICE static inline int64_t chunks_of(int64_t count) { return (count + kChunk - 1) / kChunk; }

// The slot of a sequence's first chunk. Packed: floor(b / C) + r + 1 - floor(a / C) - r >= ceil((b - a) / C), so the
// chunks of [a, b) fit before the next sequence's.
RLKERNEL_HOST_DEVICE static inline int64_t first_slot(const Sequences& s, int64_t row) {
  return s.cu_seqlens == nullptr ? row * chunks_of(s.length) : begin_of(s, row) / kChunk + row;
}

// More than any slot; the padding behind packed sequences takes part.
RLKERNEL_HOST_DEVICE static inline int64_t slots_of(const Sequences& s) {
  return s.cu_seqlens == nullptr ? s.rows * chunks_of(s.length) : s.length / kChunk + s.rows + 1;
}

// The sequence in whose range a slot lies; `rows` for the padding.
RLKERNEL_HOST_DEVICE static inline int64_t row_of(const Sequences& s, int64_t slot) {
  if (s.cu_seqlens == nullptr) return slot / chunks_of(s.length);
  int64_t low = 0, high = s.rows;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (first_slot(s, middle) <= slot) low = middle;
    else high = middle - 1;
  }
  return low;
}

}  // namespace rlkernel
