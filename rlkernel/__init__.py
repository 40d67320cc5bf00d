"""GPU kernels for the operators of LLM reinforcement learning."""

import importlib
import sys
from typing import TYPE_CHECKING, Any

from rlkernel import routing_replay
from rlkernel._explain import explain, last_backend
from rlkernel._frameworks import (
    packed_logprobs,
    patch_areal,
    patch_axolotl,
    patch_deepspeed,
    patch_llamafactory,
    patch_megatron,
    patch_openrlhf,
    patch_sglang,
    patch_skyrl,
    patch_swift,
    patch_trl,
    patch_verl,
    patch_vllm,
    register_hf,
    unpatch_all,
)
from rlkernel._version import __version__
from rlkernel._warm_up import warm_up
from rlkernel.calls.divergence import DivergenceOutput
from rlkernel.calls.gae import GaeOutput
from rlkernel.calls.linear_logprob import LinearLogprobStatistics
from rlkernel.calls.linear_policy_loss import LinearPolicyLossOutput
from rlkernel.calls.logprob import LogprobOutput
from rlkernel.calls.paged_prefix_attention import PagedPlan
from rlkernel.calls.policy_loss import (
    POLICY_METRICS,
    PolicyLossOutput,
)
from rlkernel.calls.preference_loss import PREFERENCE_METRICS, PreferenceLossOutput
from rlkernel.calls.rms_norm import RmsNormOutput
from rlkernel.calls.rotary import RotaryOutput
from rlkernel.calls.running_normalize import RunningOutput
from rlkernel.calls.sampling import SampleOutput, VerifyOutput
from rlkernel.calls.value_loss import VALUE_METRICS, ValueLossOutput
from rlkernel.dispatch import use_backend
from rlkernel.ops.attention import attention
from rlkernel.ops.divergence import divergence
from rlkernel.ops.gae import gae
from rlkernel.ops.group_advantages import group_advantages
from rlkernel.ops.kl_shaped_rewards import kl_shaped_rewards
from rlkernel.ops.layer_norm import layer_norm
from rlkernel.ops.linear_divergence import linear_divergence
from rlkernel.ops.linear_logprob import linear_logprob, linear_logprob_statistics
from rlkernel.ops.linear_policy_loss import linear_policy_loss
from rlkernel.ops.logprob import entropy_from_logits, logprob, logprobs_from_logits, selective_log_softmax
from rlkernel.ops.matmul import matmul
from rlkernel.ops.paged_prefix_attention import paged_prefix_attention, paged_prefix_plan
from rlkernel.ops.policy_loss import policy_loss, policy_loss_preset
from rlkernel.ops.policy_loss.rollout_correction import RolloutCorrection
from rlkernel.ops.preference_loss import preference_loss, preference_loss_preset
from rlkernel.ops.prefix_shared_attention import prefix_shared_attention
from rlkernel.ops.rms_norm import rms_norm
from rlkernel.ops.rotary import rotary
from rlkernel.ops.running_normalize import RunningMoments, running_normalize
from rlkernel.ops.sample_linear import sample_linear
from rlkernel.ops.sampling import sample, score_tokens
from rlkernel.ops.sampling.penalties import Penalties
from rlkernel.ops.sampling.repetition import Dry
from rlkernel.ops.sampling.seeds import split_seeds
from rlkernel.ops.sampling.token_bias import TokenBias
from rlkernel.ops.sampling.verify_chain import verify_chain
from rlkernel.ops.swiglu import swiglu
from rlkernel.ops.value_loss import value_loss
from rlkernel.ops.whiten import whiten
from rlkernel.prefix.batch import PrefixBatch
from rlkernel.prefix.layout import PrefixLayout
from rlkernel.runtime import debug, workspace
from rlkernel.runtime import log as _log
from rlkernel.runtime import ranges as _ranges
from rlkernel.runtime.ranges import nvtx_ranges


def _names_refused() -> bool:
    """Whether this process is ``python -m rlkernel.info`` or ``rlkernel.doctor``, which name every variable
    that is refused.

    While Python imports the package of the module that it is to run, ``sys.argv`` begins with "-m", and the
    name of the module stands in ``sys.orig_argv`` alone.
    """
    if sys.argv[:1] != ["-m"]:
        return False
    return sys.orig_argv[-len(sys.argv)].removeprefix("-m") in ("rlkernel.info", "rlkernel.doctor")


for _set_up in (_log.set_up, debug.set_up, _ranges.set_up):
    try:
        _set_up()
    except (ValueError, RuntimeError):
        if not _names_refused():
            raise

if TYPE_CHECKING:  # see __getattr__
    from rlkernel import consistency as consistency
    from rlkernel.consistency.mode import batch_invariant as batch_invariant

__all__ = [
    "DivergenceOutput",
    "Dry",
    "GaeOutput",
    "LinearLogprobStatistics",
    "LinearPolicyLossOutput",
    "LogprobOutput",
    "POLICY_METRICS",
    "PREFERENCE_METRICS",
    "PagedPlan",
    "Penalties",
    "PolicyLossOutput",
    "PreferenceLossOutput",
    "PrefixBatch",
    "PrefixLayout",
    "RmsNormOutput",
    "RolloutCorrection",
    "RotaryOutput",
    "RunningMoments",
    "RunningOutput",
    "SampleOutput",
    "TokenBias",
    "VALUE_METRICS",
    "ValueLossOutput",
    "VerifyOutput",
    "__version__",
    "attention",
    "debug",
    "divergence",
    "entropy_from_logits",
    "explain",
    "gae",
    "group_advantages",
    "kl_shaped_rewards",
    "last_backend",
    "layer_norm",
    "linear_divergence",
    "linear_logprob",
    "linear_logprob_statistics",
    "linear_policy_loss",
    "logprob",
    "logprobs_from_logits",
    "matmul",
    "nvtx_ranges",
    "packed_logprobs",
    "paged_prefix_attention",
    "paged_prefix_plan",
    "patch_areal",
    "patch_axolotl",
    "patch_deepspeed",
    "patch_llamafactory",
    "patch_megatron",
    "patch_openrlhf",
    "patch_sglang",
    "patch_skyrl",
    "patch_swift",
    "patch_trl",
    "patch_verl",
    "patch_vllm",
    "policy_loss",
    "policy_loss_preset",
    "preference_loss",
    "preference_loss_preset",
    "prefix_shared_attention",
    "register_hf",
    "rms_norm",
    "rotary",
    "routing_replay",
    "running_normalize",
    "sample",
    "sample_linear",
    "score_tokens",
    "selective_log_softmax",
    "split_seeds",
    "swiglu",
    "unpatch_all",
    "use_backend",
    "value_loss",
    "verify_chain",
    "warm_up",
    "whiten",
    "workspace",
]


def __getattr__(name: str) -> Any:
    """``rlkernel.consistency`` and what is in it, which are loaded when they are asked for."""
    if name == "consistency":
        return importlib.import_module("rlkernel.consistency")
    if name == "batch_invariant":
        return importlib.import_module("rlkernel.consistency.mode").batch_invariant
    raise AttributeError(f"module 'rlkernel' has no attribute {name!r}")
