// The arguments of the kernel of KL-shaped rewards in Python.
#pragma once
#include "rlkernel/batch.h"
#include "rlkernel/kl_shaped_rewards/arguments.h"

namespace rlkernel::calls {

struct kl_shaped_rewards {
  Tensor rewards;
  bool per_sequence;
  Tensor logprobs, ref_logprobs;
  Optional mask, cu_seqlens;
  double beta, kl_input, kl_output;
  KlEstimator estimator;
  Tensor out;

  template <class Launch>
  int run(Launch launch, void* stream) const {
    const Batch batch(logprobs, cu_seqlens);
    return launch({per_sequence ? rewards.dense<const float>(batch.rows) : batch.tokens<const float>(rewards),
                   batch.tokens<const float>(logprobs), batch.tokens<const float>(ref_logprobs), per_sequence,
                   batch.tokens<const uint8_t>(mask), per_sequence ? 0 : rewards.row_stride(), logprobs.row_stride(),
                   ref_logprobs.row_stride(), mask.row_stride(), batch.sequences(), static_cast<float>(beta),
                   static_cast<float>(kl_input), static_cast<float>(kl_output), estimator, out.dense<float>(batch.total)},
                  stream);
  }
};

RLKERNEL_FIELDS(kl_shaped_rewards, rewards, per_sequence, logprobs, ref_logprobs, mask, cu_seqlens, beta, kl_input, kl_output,
                estimator, out)

}  // namespace rlkernel::calls
