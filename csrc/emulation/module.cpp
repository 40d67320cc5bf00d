// The device kernels as a Python module that runs them on the CPU; the arguments are those of rlkernel._C.
//
// A build holds all ops, or with -DRLKERNEL_ONLY_<OP> that one: a planted fault is compiled in seconds.
#if !(defined(RLKERNEL_ONLY_LOGPROB) || defined(RLKERNEL_ONLY_VALUE_LOSS) || defined(RLKERNEL_ONLY_GAE) || \
      defined(RLKERNEL_ONLY_WHITEN) || defined(RLKERNEL_ONLY_GROUP_ADVANTAGES) || defined(RLKERNEL_ONLY_POLICY_LOSS) || \
      defined(RLKERNEL_ONLY_PREFERENCE_LOSS) || defined(RLKERNEL_ONLY_PREFIX_SHARED_ATTENTION) || \
      defined(RLKERNEL_ONLY_SAMPLING))
#define RLKERNEL_ONLY_LOGPROB
#define RLKERNEL_ONLY_VALUE_LOSS
#define RLKERNEL_ONLY_GAE
#define RLKERNEL_ONLY_WHITEN
#define RLKERNEL_ONLY_GROUP_ADVANTAGES
#define RLKERNEL_ONLY_POLICY_LOSS
#define RLKERNEL_ONLY_PREFERENCE_LOSS
#define RLKERNEL_ONLY_PREFIX_SHARED_ATTENTION
#define RLKERNEL_ONLY_SAMPLING
#define RLKERNEL_ONLY_KL_SHAPED_REWARDS  // no fault of its own is planted
#endif

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
#include "rlkernel/gae.cuh"
#include "rlkernel/group_advantages.cuh"
#include "rlkernel/kl_shaped_rewards.cuh"
#include "rlkernel/logprob_backward.cuh"
#include "rlkernel/logprob_forward.cuh"
#include "rlkernel/logprob_support.cuh"
#include "rlkernel/policy_loss.cuh"
#include "rlkernel/preference_loss.cuh"
#include "rlkernel/prefix_shared_attention.cuh"
#include "rlkernel/sampling.cuh"
#include "rlkernel/value_loss.cuh"
#include "rlkernel/whiten.cuh"

#include <pybind11/stl.h>

namespace py = pybind11;
using namespace rlkernel;

namespace {

const char* describe(int) { return "invalid arguments"; }

// What the emulated primitives do, for the tests of the emulation itself.
std::vector<uint64_t> ballots(unsigned threads) {
  std::vector<uint64_t> votes(threads);
  emulation::launch(1, threads, [&] { votes[threadIdx.x] = emulation::ballot(threadIdx.x % 3 == 0); });
  return votes;
}

std::vector<int> neighbours(unsigned threads, int mask, int width) {
  std::vector<int> got(threads);
  emulation::launch(1, threads, [&] {
    got[threadIdx.x] = emulation::shuffle_xor(static_cast<int>(threadIdx.x), mask, width);
  });
  return got;
}

std::vector<int> histogram(unsigned blocks, unsigned threads, unsigned bins) {
  std::vector<int> counts(bins);
  emulation::launch(blocks, threads, [&] {
    using Bins = int[64];
    RLKERNEL_SHARED(Bins, local);
    if (threadIdx.x < bins) local[threadIdx.x] = 0;
    __syncthreads();
    emulation::atomic_add(&local[threadIdx.x % bins], 1);
    __syncthreads();
    if (threadIdx.x < bins) emulation::atomic_add(&counts[threadIdx.x], local[threadIdx.x]);
  });
  return counts;
}

}  // namespace

PYBIND11_MODULE(RLKERNEL_MODULE, m) {
  m.attr("warp_size") = RLKERNEL_WARP;
  m.def("configure", [](uint64_t seed, unsigned max_blocks) { emulation::settings() = {seed, max_blocks}; },
        py::arg("seed") = 0, py::arg("max_blocks") = 1 << 20);
  m.def("ballots", &ballots);
  m.def("neighbours", &neighbours);
  m.def("histogram", &histogram);
  m.def("log", [](double x) { return emulated::log_exact(x); });
  m.def("exp", [](float x) { return emulated::exp_exact(x); });
  m.def("expm1", [](float x) { return emulated::expm1_exact(x); });
  m.def("tanh", [](float x) { return std::pair(emulated::tanh_and_slope(x).value, emulated::tanh_and_slope(x).slope); });
  m.def("through_f16", [](float x) { return emulated::to_float(emulated::from_float<emulated::f16>(x)); });
  m.def("through_bf16", [](float x) { return emulated::to_float(emulated::from_float<emulated::bf16>(x)); });

#ifdef RLKERNEL_ONLY_LOGPROB
  bind::logprob_forward(m, "logprob_forward", emulated::launch_forward, describe);
  bind::logprob_backward(m, "logprob_backward", emulated::launch_backward, describe);
  bind::logprob_exp(m, "logprob_exp", emulated::launch_exp, describe);
  bind::logprob_support_forward(m, "logprob_support_forward", emulated::launch_support_forward, describe);
  bind::logprob_support_backward(m, "logprob_support_backward", emulated::launch_support_backward, describe);
#endif
#ifdef RLKERNEL_ONLY_VALUE_LOSS
  bind::value_loss_forward(m, "value_loss_forward", emulated::launch_value_forward, describe);
  bind::value_loss_backward(m, "value_loss_backward", emulated::launch_value_backward, describe);
#endif
#ifdef RLKERNEL_ONLY_GAE
  bind::gae(m, "gae", emulated::launch_gae, describe);
#endif
#ifdef RLKERNEL_ONLY_WHITEN
  bind::whiten(m, "whiten", emulated::launch_whiten, describe);
#endif
#ifdef RLKERNEL_ONLY_KL_SHAPED_REWARDS
  bind::kl_shaped_rewards(m, "kl_shaped_rewards", emulated::launch_kl_shaped_rewards, describe);
#endif
#ifdef RLKERNEL_ONLY_GROUP_ADVANTAGES
  bind::group_advantages(m, "group_advantages", emulated::launch_group_advantages, describe);
#endif
#ifdef RLKERNEL_ONLY_POLICY_LOSS
  bind::policy_loss(m, "policy_loss", emulated::launch_policy_loss, describe);
#endif
#ifdef RLKERNEL_ONLY_PREFERENCE_LOSS
  bind::preference_sums(m, "preference_sums", emulated::launch_preference_sums, describe);
  bind::preference_loss(m, "preference_loss", emulated::launch_preference_loss, describe);
  bind::preference_backward(m, "preference_backward", emulated::launch_preference_backward, describe);
#endif
#ifdef RLKERNEL_ONLY_SAMPLING
  bind::sampling_statistics(m, "sampling_statistics", emulated::launch_sampling_statistics, describe);
  bind::sampling_finish(m, "sampling_finish", emulated::launch_sampling_finish, describe);
#endif
#ifdef RLKERNEL_ONLY_PREFIX_SHARED_ATTENTION
  bind::attention_merge(m, "attention_merge", emulated::launch_attention_merge, describe);
  bind::segment_reduce(m, "segment_reduce", emulated::launch_segment_reduce, describe);
  bind::gather_kv(m, "gather_kv", emulated::launch_gather_kv, describe);
#endif
}
