// Table of contents of rlkernel._C: one line per function and part, grouped by op.
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
#include "rlkernel/errors.h"

namespace py = pybind11;
using namespace rlkernel;

namespace {

// The build names the parts it compiles and their architectures in RLKERNEL_BUILT_<PART>.
py::dict built() {
  py::dict parts;
  const auto archs = [](const char* names) { return py::str(names).attr("split")(); };
  parts["cpu"] = archs(RLKERNEL_BUILT_CPU);
#ifdef RLKERNEL_BUILT_CUDA
  parts["cuda"] = archs(RLKERNEL_BUILT_CUDA);
#endif
#ifdef RLKERNEL_BUILT_HIP
  parts["hip"] = archs(RLKERNEL_BUILT_HIP);
#endif
  return parts;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("built", &built);

  // logprob
  bind::logprob_forward(m, "logprob_forward_cpu", cpu::logprob_forward, cpu::error_string);
  bind::logprob_backward(m, "logprob_backward_cpu", cpu::logprob_backward, cpu::error_string);
  bind::logprob_exp(m, "logprob_exp_cpu", cpu::logprob_exp, cpu::error_string);
  bind::logprob_support_forward(m, "logprob_support_forward_cpu", cpu::logprob_support_forward, cpu::error_string);
  bind::logprob_support_backward(m, "logprob_support_backward_cpu", cpu::logprob_support_backward, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::logprob_forward(m, "logprob_forward_cuda", cuda::logprob_forward, cuda::error_string);
  bind::logprob_backward(m, "logprob_backward_cuda", cuda::logprob_backward, cuda::error_string);
  bind::logprob_exp(m, "logprob_exp_cuda", cuda::logprob_exp, cuda::error_string);
  bind::logprob_support_forward(m, "logprob_support_forward_cuda", cuda::logprob_support_forward, cuda::error_string);
  bind::logprob_support_backward(m, "logprob_support_backward_cuda", cuda::logprob_support_backward, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::logprob_forward(m, "logprob_forward_hip", hip::logprob_forward, hip::error_string);
  bind::logprob_backward(m, "logprob_backward_hip", hip::logprob_backward, hip::error_string);
  bind::logprob_exp(m, "logprob_exp_hip", hip::logprob_exp, hip::error_string);
  bind::logprob_support_forward(m, "logprob_support_forward_hip", hip::logprob_support_forward, hip::error_string);
  bind::logprob_support_backward(m, "logprob_support_backward_hip", hip::logprob_support_backward, hip::error_string);
#endif

  // value_loss
  bind::value_loss_forward(m, "value_loss_forward_cpu", cpu::value_loss_forward, cpu::error_string);
  bind::value_loss_backward(m, "value_loss_backward_cpu", cpu::value_loss_backward, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::value_loss_forward(m, "value_loss_forward_cuda", cuda::value_loss_forward, cuda::error_string);
  bind::value_loss_backward(m, "value_loss_backward_cuda", cuda::value_loss_backward, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::value_loss_forward(m, "value_loss_forward_hip", hip::value_loss_forward, hip::error_string);
  bind::value_loss_backward(m, "value_loss_backward_hip", hip::value_loss_backward, hip::error_string);
#endif

  // gae
  bind::gae(m, "gae_cpu", cpu::gae, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::gae(m, "gae_cuda", cuda::gae, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::gae(m, "gae_hip", hip::gae, hip::error_string);
#endif

  // whiten
  bind::whiten(m, "whiten_cpu", cpu::whiten, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::whiten(m, "whiten_cuda", cuda::whiten, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::whiten(m, "whiten_hip", hip::whiten, hip::error_string);
#endif

  // kl_shaped_rewards
  bind::kl_shaped_rewards(m, "kl_shaped_rewards_cpu", cpu::kl_shaped_rewards, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::kl_shaped_rewards(m, "kl_shaped_rewards_cuda", cuda::kl_shaped_rewards, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::kl_shaped_rewards(m, "kl_shaped_rewards_hip", hip::kl_shaped_rewards, hip::error_string);
#endif

  // group_advantages
  bind::group_advantages(m, "group_advantages_cpu", cpu::group_advantages, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::group_advantages(m, "group_advantages_cuda", cuda::group_advantages, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::group_advantages(m, "group_advantages_hip", hip::group_advantages, hip::error_string);
#endif

  // policy_loss
  bind::policy_loss(m, "policy_loss_cpu", cpu::policy_loss, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::policy_loss(m, "policy_loss_cuda", cuda::policy_loss, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::policy_loss(m, "policy_loss_hip", hip::policy_loss, hip::error_string);
#endif

  // preference_loss
  bind::preference_sums(m, "preference_sums_cpu", cpu::preference_sums, cpu::error_string);
  bind::preference_loss(m, "preference_loss_cpu", cpu::preference_loss, cpu::error_string);
  bind::preference_backward(m, "preference_backward_cpu", cpu::preference_backward, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::preference_sums(m, "preference_sums_cuda", cuda::preference_sums, cuda::error_string);
  bind::preference_loss(m, "preference_loss_cuda", cuda::preference_loss, cuda::error_string);
  bind::preference_backward(m, "preference_backward_cuda", cuda::preference_backward, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::preference_sums(m, "preference_sums_hip", hip::preference_sums, hip::error_string);
  bind::preference_loss(m, "preference_loss_hip", hip::preference_loss, hip::error_string);
  bind::preference_backward(m, "preference_backward_hip", hip::preference_backward, hip::error_string);
#endif

  // prefix_shared_attention
  bind::attention_merge(m, "attention_merge_cpu", cpu::attention_merge, cpu::error_string);
  bind::segment_reduce(m, "segment_reduce_cpu", cpu::segment_reduce, cpu::error_string);
  bind::gather_kv(m, "gather_kv_cpu", cpu::gather_kv, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::attention_merge(m, "attention_merge_cuda", cuda::attention_merge, cuda::error_string);
  bind::segment_reduce(m, "segment_reduce_cuda", cuda::segment_reduce, cuda::error_string);
  bind::gather_kv(m, "gather_kv_cuda", cuda::gather_kv, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::attention_merge(m, "attention_merge_hip", hip::attention_merge, hip::error_string);
  bind::segment_reduce(m, "segment_reduce_hip", hip::segment_reduce, hip::error_string);
  bind::gather_kv(m, "gather_kv_hip", hip::gather_kv, hip::error_string);
#endif

  // sampling
  bind::sampling_statistics(m, "sampling_statistics_cpu", cpu::sampling_statistics, cpu::error_string);
  bind::sampling_finish(m, "sampling_finish_cpu", cpu::sampling_finish, cpu::error_string);
#ifdef RLKERNEL_BUILT_CUDA
  bind::sampling_statistics(m, "sampling_statistics_cuda", cuda::sampling_statistics, cuda::error_string);
  bind::sampling_finish(m, "sampling_finish_cuda", cuda::sampling_finish, cuda::error_string);
#endif
#ifdef RLKERNEL_BUILT_HIP
  bind::sampling_statistics(m, "sampling_statistics_hip", hip::sampling_statistics, hip::error_string);
  bind::sampling_finish(m, "sampling_finish_hip", hip::sampling_finish, hip::error_string);
#endif
}
