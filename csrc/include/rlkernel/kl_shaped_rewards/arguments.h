// Arguments of the kernel of KL-shaped rewards: out = rewards - beta * kl where the mask is set, else 0. A reward per sequence
// belongs to the last token of it whose mask is set.
#pragma once
#include "rlkernel/kernel.h"
#include "rlkernel/names.h"
#include "rlkernel/sequences.h"

namespace rlkernel {

RLKERNEL_ENUM(KlEstimator, k1, abs, k2, k3)

struct KlShapedRewards {
  const float *rewards, *logprobs, *ref_logprobs;
  bool per_sequence;     // rewards are one for each sequence
  const uint8_t* mask;   // null: every token counts
  int64_t rewards_stride, logprobs_stride, ref_stride, mask_stride;  // of padded rows, in elements
  Sequences sequences;
  float beta;
  float kl_input, kl_output;  // bounds of the difference and of the estimate, infinity where there is none
  KlEstimator estimator;
  float* out;            // dense
};

// One chunk of a sequence: its tensors from the first token of the chunk on.
struct KlChunk {
  const float *rewards, *logprobs, *ref_logprobs;  // rewards: of the token, or of the sequence
  const uint8_t* mask;
  float* out;
  int64_t count, behind;  // tokens of the chunk; of the sequence behind it
  bool padding;           // behind packed sequences: all zeros
};

RLKERNEL_HOST_DEVICE static inline KlChunk kl_chunk(const KlShapedRewards& k, int64_t slot) {
  const Sequences& s = k.sequences;
  const int64_t row = row_of(s, slot), chunk = slot - first_slot(s, row);
  const Tokens tokens = tokens_of(s, row);
  const int64_t start = tokens.begin + chunk * kChunk, strided = s.cu_seqlens != nullptr ? 0 : row;
  const int64_t left = tokens.count - chunk * kChunk, count = left < kChunk ? left : kChunk;
  return {k.per_sequence ? k.rewards + row : k.rewards + strided * k.rewards_stride + start,
          k.logprobs + strided * k.logprobs_stride + start,
          k.ref_logprobs + strided * k.ref_stride + start,
          k.mask != nullptr ? k.mask + strided * k.mask_stride + start : nullptr,
          k.out + strided * s.length + start,
          count > 0 ? count : 0,  // a slot that no chunk needs
          left - count,
          row == s.rows};
}

RLKERNEL_KERNEL(kl_shaped_rewards, const KlShapedRewards&)

}  // namespace rlkernel
