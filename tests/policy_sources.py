"""What the tests share that compare policy_loss with the sources of frameworks."""

import enum
from types import SimpleNamespace
from typing import Literal

import torch
from peer_sources import load

import rlkernel
from rlkernel.reference.policy_loss import make_inputs

KEPT = rlkernel.POLICY_METRICS.index("correction_kept")


class Base:
    """Where a peer's configuration takes its defaults from pydantic."""

    def __init_subclass__(cls, **_):
        pass


def configured(kind, **changes):
    config = kind()
    for name, value in changes.items():
        assert hasattr(config, name), f"{kind.__name__} has no {name}"
        setattr(config, name, value)
    return config


def drifting(drift=0.3, rollout=0.3, seed=1):
    """Sequences with holes, of which a preset rejects some."""
    inputs = make_inputs(12, 30, dtype=torch.float64, extras=True, drift=drift, seed=seed)
    inputs["rollout_logprobs"] = inputs["old_logprobs"] + rollout / drift * (
        inputs["rollout_logprobs"] - inputs["old_logprobs"]
    )
    return {k: v for k, v in inputs.items() if k != "entropy"}


SKYRL = {
    "token_tis": {"tis_ratio_type": "token"},
    "sequence_tis": {"tis_ratio_type": "sequence"},
    "geometric": {"sequence_mask_metric": "geometric"},
    "product": {"sequence_mask_metric": "product"},
    # the suggestions of its documentation
    "outlier": {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0},
}


NEMO_RL = {  # as its own recipes have them
    "tis": {"truncated_importance_sampling_type": "tis", "truncated_importance_sampling_ratio": 2.0},
    "icepop": {
        "truncated_importance_sampling_type": "icepop", "truncated_importance_sampling_ratio": 5.0,
        "truncated_importance_sampling_ratio_min": 0.5,
    },
    "seq_mask_tis": {
        "truncated_importance_sampling_type": "seq-mask-tis", "truncated_importance_sampling_ratio": 1.002,
        "truncated_importance_sampling_ratio_min": 0.999,
    },
}  # fmt: skip


def skyrl(path, *names, **given):
    return load("skyrl", f"skyrl/backends/skyrl_train/utils/{path}.py", *names, **given)


def skyrl_correction():
    return skyrl(
        "off_policy_correction_utils", "off_policy_correction_enabled", "compute_tis_ratio",
        "compute_outlier_token_mask", "compute_token_mask", "compute_sequence_mask",
        "compute_off_policy_correction", "apply_off_policy_correction",
        **vars(skyrl("torch_utils", "masked_mean", "safe_exp_delta")),
    )  # fmt: skip


def nemo_results(inputs, **changes):
    """Its loss and its metrics."""
    folder = "nemo_rl/algorithms"
    tools = load("nemo-rl", f"{folder}/utils.py", "calculate_kl", "masked_mean")
    kinds = load(
        "nemo-rl", f"{folder}/loss/interfaces.py", "LossType", "MetricNormalizer", "LossInputType", enum=enum
    )
    their = load(
        "nemo-rl", f"{folder}/loss/loss_functions.py", "ClippedPGLossConfig", "ClippedPGLossFn",
        BaseModel=Base, LossFunction=object, **vars(tools), **vars(kinds),
    )  # fmt: skip
    config = configured(their.ClippedPGLossConfig, reference_policy_kl_penalty=0.2, **changes)
    config.ratio_clip_max = 0.28

    def shifted(x):  # its tensors begin with a token that nobody predicts
        return torch.cat([x.new_zeros(len(x), 1), x], 1)

    mask = inputs["mask"].double()
    rows = mask.any(-1).double()
    data = {
        "token_mask": shifted(mask), "sample_mask": rows, "advantages": shifted(inputs["advantages"]),
        "prev_logprobs": shifted(inputs["old_logprobs"]),
        "generation_logprobs": shifted(inputs["rollout_logprobs"]),
        "reference_policy_logprobs": shifted(inputs["ref_logprobs"]),
    }  # fmt: skip
    return their.ClippedPGLossFn(config)(inputs["logprobs"], data, rows.sum(), mask.sum())


def slime_results(inputs, **changes):
    """Loss and report of its policy_loss_function of packed samples, over what its model would give."""
    lengths, mask = [inputs["mask"].shape[1]] * len(inputs["mask"]), inputs["mask"].double()
    given = {k: list(inputs[k]) for k in inputs if k.endswith("logprobs")}
    args = SimpleNamespace(**({
        "use_rollout_logprobs": False, "use_opsm": False, "advantage_estimator": "grpo", "eps_clip": 0.2,
        "eps_clip_high": 0.28, "eps_clip_c": None, "get_mismatch_metrics": False, "use_tis": False,
        "custom_tis_function_path": None, "tis_clip": 2.0, "tis_clip_low": 0, "entropy_coef": 0.0,
        "calculate_per_token_loss": False, "use_kl_loss": True, "use_unbiased_kl": False,
        "kl_loss_type": "k3", "kl_loss_coef": 0.2,
    } | changes))  # fmt: skip
    megatron = SimpleNamespace(get_context_parallel_world_size=lambda: 1)
    tools = load(
        "slime", "slime/utils/ppo_utils.py", "compute_approx_kl", "compute_gspo_kl", "compute_policy_loss",
        "compute_cispo_loss", "compute_opsm_mask",
    )  # fmt: skip
    reduce = load(
        "slime", "slime/backends/megatron_utils/cp_utils.py", "get_sum_of_sample_mean", mpu=megatron
    )
    scores = {"log_probs": given["logprobs"], "entropy": [torch.zeros_like(x) for x in mask]}
    their = load(
        "slime", "slime/backends/megatron_utils/loss.py", "policy_loss_function", "vanilla_tis_function",
        "icepop_function", mpu=megatron, all_gather_with_cp=lambda x, *_: x,
        _maybe_capture_log_probs=lambda *_: None, get_rollout_top_p_logprob_kwargs=lambda *_: {},
        get_log_probs_and_entropy=lambda *_, **__: (None, scores),
        load_function=lambda name: getattr(their, name), **vars(tools), **vars(reduce),
    )  # fmt: skip
    sums = inputs.get("token_counts", mask.sum(-1))
    batch = {
        "advantages": list(inputs["advantages"]), "log_probs": given["old_logprobs"],
        "rollout_log_probs": given["rollout_logprobs"], "ref_log_probs": given["ref_logprobs"],
        "response_lengths": lengths, "total_lengths": lengths, "loss_masks": list(mask),
        "rollout_mask_sums": list(sums), "unconcat_tokens": None,
    }  # fmt: skip
    reducer = reduce.get_sum_of_sample_mean(
        lengths, lengths, batch["loss_masks"], batch["rollout_mask_sums"], args.calculate_per_token_loss
    )
    return their.policy_loss_function(args, batch, torch.zeros(1, dtype=torch.float64), reducer)


def prime_rl_results(inputs, function="default_loss_fn", kind="DefaultLossConfig"):
    """Loss and metrics of every sequence."""
    kinds = load(
        "prime-rl", "packages/prime-rl-configs/src/prime_rl/configs/trainer.py", kind,
        BaseLossConfig=Base, BaseConfig=Base, Field=lambda default, **_: default, Literal=Literal,
    )  # fmt: skip
    their = load(
        "prime-rl", "src/prime_rl/trainer/rl/loss.py", function, "_safe_mean",
        "compute_importance_ratio_and_mismatch_kl", LossOutputs=SimpleNamespace,
    )  # fmt: skip
    results = []
    for i, mask in enumerate(inputs["mask"]):
        sample = SimpleNamespace(
            trainer_logprobs=inputs["logprobs"][i], inference_logprobs=inputs["rollout_logprobs"][i],
            advantages=inputs["advantages"][i], loss_mask=mask, loss_weights=None,
        )  # fmt: skip
        results.append(getattr(their, function)(sample, getattr(kinds, kind)()))
    return results
