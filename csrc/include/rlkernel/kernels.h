// Table of contents of the compiled part: one line per kernel, grouped by op. Each part has all of them, in its namespace.
#pragma once
#include "rlkernel/bind_gae.h"
#include "rlkernel/bind_group_advantages.h"
#include "rlkernel/bind_kl_shaped_rewards.h"
#include "rlkernel/bind_logprob.h"
#include "rlkernel/bind_logprob_support.h"
#include "rlkernel/bind_policy_loss.h"
#include "rlkernel/bind_preference_loss.h"
#include "rlkernel/bind_prefix_shared_attention.h"
#include "rlkernel/bind_sampling.h"
#include "rlkernel/bind_value_loss.h"
#include "rlkernel/bind_whiten.h"

#define RLKERNEL_KERNELS(KERNEL) \
  KERNEL(logprob_forward) \
  KERNEL(logprob_backward) \
  KERNEL(logprob_exp) \
  KERNEL(logprob_support_forward) \
  KERNEL(logprob_support_backward) \
  KERNEL(value_loss_forward) \
  KERNEL(value_loss_backward) \
  KERNEL(gae) \
  KERNEL(whiten) \
  KERNEL(kl_shaped_rewards) \
  KERNEL(group_advantages) \
  KERNEL(policy_loss) \
  KERNEL(policy_select) \
  KERNEL(preference_sums) \
  KERNEL(preference_loss) \
  KERNEL(preference_backward) \
  KERNEL(attention_merge) \
  KERNEL(segment_reduce) \
  KERNEL(gather_kv) \
  KERNEL(sampling_statistics) \
  KERNEL(sampling_finish)
