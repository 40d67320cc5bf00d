"""policy_loss against SkyRL, NeMo-RL, slime and prime-rl: their own functions, in value and gradient."""

import enum
from types import SimpleNamespace
from typing import Literal

import pytest
import torch
from peer_sources import load
from policy_cases import run
from policy_peers import check_same

import rlkernel
from rlkernel import RolloutCorrection
from rlkernel.ops.policy_loss.rollout_correction import CORRECTIONS
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


# ---- SkyRL


def skyrl(path, *names, **given):
    return load("skyrl", f"skyrl/backends/skyrl_train/utils/{path}.py", *names, **given)


def skyrl_functions(*names):
    tools = vars(skyrl("torch_utils", "masked_mean", "safe_exp_delta"))
    return skyrl("ppo_utils", *names, "reduce_loss", **tools, **vars(skyrl_correction()))


def skyrl_correction():
    return skyrl(
        "off_policy_correction_utils", "off_policy_correction_enabled", "compute_tis_ratio",
        "compute_outlier_token_mask", "compute_token_mask", "compute_sequence_mask",
        "compute_off_policy_correction", "apply_off_policy_correction",
        **vars(skyrl("torch_utils", "masked_mean", "safe_exp_delta")),
    )  # fmt: skip


SKYRL = {
    "token_tis": {"tis_ratio_type": "token"},
    "sequence_tis": {"tis_ratio_type": "sequence"},
    "geometric": {"sequence_mask_metric": "geometric"},
    "product": {"sequence_mask_metric": "product"},
    # the suggestions of its documentation
    "outlier": {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0},
}


def skyrl_loss(
    inputs, correction, *, kind="regular", function="ppo_policy_loss", mode="sequence_mean", **more
):
    """What its worker's step adds up: a policy loss of scaled advantages, and the KL of the whole mask."""
    kl_coef = more.pop("kl_coef", 0.0)
    their = skyrl_functions(function, "apply_loss_reduction_to_advantages_minibatch", "compute_approx_kl")
    kinds = load("skyrl", "skyrl/train/config/config.py", "OffPolicyCorrectionConfig", BaseConfig=Base)
    config = SimpleNamespace(
        policy_loss_type=kind, eps_clip_low=0.2, eps_clip_high=0.28, loss_reduction=mode, clip_ratio_c=3.0,
        off_policy_correction=configured(kinds.OffPolicyCorrectionConfig, **correction), **more,
    )  # fmt: skip
    mask = inputs["mask"].double()
    advantages = their.apply_loss_reduction_to_advantages_minibatch(
        inputs["advantages"], mask, mode, len(mask), mask.shape[1]
    )
    masked = {k: torch.where(inputs["mask"], inputs[k], 0.0) for k in ("logprobs", "old_logprobs")}
    rollout = torch.where(inputs["mask"], inputs["rollout_logprobs"], 0.0)
    loss, _ = getattr(their, function)(
        masked["logprobs"], masked["old_logprobs"], advantages, config, mask, rollout
    )
    kl = their.compute_approx_kl(masked["logprobs"], inputs["ref_logprobs"], mask)
    tokens = mask.sum() if mode == "token_mean" else len(mask) * mask.sum(-1, keepdim=True).clamp(min=1)
    return loss + kl_coef * (kl / tokens).sum()


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean"])
@pytest.mark.parametrize("name", SKYRL)
def test_is_skyrls_preset(name, mode):
    """Rejected tokens stay in the mean and in the KL."""
    inputs = drifting(rollout={"outlier": 3.0, "geometric": 0.05}.get(name, 0.3))
    options = {"beta": 0.2, "epsilon_high": 0.28, "loss_type": "ppo", "correction": f"skyrl:{name}"}
    options["loss_agg_mode"] = "token-mean" if mode == "token_mean" else "seq-mean-token-mean"
    kept = run("reference", inputs, **options)[1][KEPT]
    assert name.endswith("tis") or 0.1 < kept < 0.9
    # SkyRL takes its exponentials in fp32
    check_same(inputs, lambda x: skyrl_loss(x, SKYRL[name], mode=mode, kl_coef=0.2), inputs, 1e-6, **options)


def test_is_skyrls_mean_over_prompts():
    """Its policy loss alone: its KL is always a mean over sequences."""
    inputs = drifting()
    inputs["advantages"] = inputs["advantages"][:, 0]
    boundaries = [(0, 4), (4, 5), (5, 12)]
    their = skyrl_functions("ppo_policy_loss", "apply_loss_reduction_to_advantages_minibatch")
    kinds = load("skyrl", "skyrl/train/config/config.py", "OffPolicyCorrectionConfig", BaseConfig=Base)
    config = SimpleNamespace(
        policy_loss_type="regular", eps_clip_low=0.2, eps_clip_high=0.2,
        off_policy_correction=kinds.OffPolicyCorrectionConfig(),
    )  # fmt: skip
    mask = inputs["mask"].double()
    advantages = inputs["advantages"][:, None].expand(mask.shape)

    def peer(x):
        scaled = their.apply_loss_reduction_to_advantages_minibatch(
            advantages, mask, "prompt_mean", 1, mask.shape[1], boundaries
        )
        return their.ppo_policy_loss(x["logprobs"], x["old_logprobs"], scaled, config, mask)[0]

    counts = torch.cat([mask[a:b].sum().expand(b - a) for a, b in boundaries])
    theirs = {k: inputs[k] for k in ("logprobs", "old_logprobs", "advantages", "mask")}
    check_same(
        theirs | {"token_counts": counts}, peer, theirs, 1e-6, loss_agg_mode="seq-mean-token-mean",
        num_items_in_batch=3,
    )  # fmt: skip


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_is_skyrls_kl(estimator):
    """Its k3 is bounded, before and after."""
    inputs = drifting()
    inputs["ref_logprobs"][:, ::5] += 4.0
    inputs["ref_logprobs"][:, 1::5] += 25.0
    their = skyrl("ppo_utils", "compute_approx_kl").compute_approx_kl

    def peer(x):
        return their(x["logprobs"], inputs["ref_logprobs"], x["mask"].double(), estimator).sum()

    ours = {k: v for k, v in inputs.items() if k != "rollout_logprobs"}
    ours["advantages"] = torch.zeros_like(ours["logprobs"])
    bounds = {"kl_input_clamp": 20.0, "kl_output_clamp": 10.0} if estimator == "k3" else {}
    check_same(
        ours, peer, ours, beta=1.0, kl_estimator=estimator, loss_agg_mode="token-sum", **bounds
    )  # fmt: skip


SKYRL_LOSSES = {  # function, kind, more of its configuration, our options
    "rollout_is": ("rollout_is_policy_loss", {}, {"loss_type": "cispo_mask"}),
    "dual_clip": ("ppo_policy_loss", {}, {"loss_type": "ppo", "clip_ratio_c": 3.0}),
    "sapo": (
        "sapo_policy_loss", {"sapo": SimpleNamespace(tau_pos=1.0, tau_neg=1.05)}, {"loss_type": "sapo"},
    ),
    "gspo": ("gspo_policy_loss", {}, {"importance_sampling_level": "sequence_token"}),
    "cispo": (
        "compute_policy_loss_cispo",
        {"cispo": SimpleNamespace(cispo_anchor="old", cispo_eps_clip_low=0.2, cispo_eps_clip_high=0.28)},
        {"loss_type": "cispo"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SKYRL_LOSSES)
def test_is_skyrls_loss(name):
    """``rollout_is`` takes its ratio to the rollout: pass it as the old policy."""
    function, more, options = SKYRL_LOSSES[name]
    inputs = drifting(drift=0.6)
    inputs["old_logprobs"] = inputs["rollout_logprobs"]
    ours = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "rollout_logprobs")}
    check_same(
        ours, lambda x: skyrl_loss(inputs | x, {}, kind=name, function=function, **more), ours, 1e-6,
        loss_agg_mode="seq-mean-token-mean", epsilon_high=0.28, **options,
    )  # fmt: skip


def test_is_skyrls_importance_sampling():
    inputs = drifting(drift=0.6)
    ours = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "rollout_logprobs")}
    their = skyrl_functions("importance_sampling_loss").importance_sampling_loss

    def peer(x):
        return their(x["logprobs"], x["old_logprobs"], x["advantages"], None, x["mask"].double())[0]

    check_same(ours, peer, ours, loss_type="importance_sampling", loss_agg_mode="token-sum")


# ---- NeMo-RL


def nemo_loss(inputs, **changes):
    return nemo_results(inputs, **changes)[0]


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


@pytest.mark.parametrize("token_level", [True, False])
def test_tokens_outside_a_support_have_nemo_rls_gradient(token_level):
    """There their log-probabilities become 0: the same counts, no gradient, and a constant -A in the loss."""
    tools = load("nemo-rl", "nemo_rl/algorithms/utils.py", "mask_out_neg_inf_logprobs")
    inputs = drifting()
    outside = torch.zeros_like(inputs["mask"])
    outside[0, :3] = outside[4, 1] = outside[7, 2:5] = True
    outside &= inputs["mask"]
    for name in ("logprobs", "old_logprobs"):
        inputs[name] = torch.where(outside, -torch.inf, inputs[name])
    inputs["ref_logprobs"] = torch.where(outside, 0, inputs["ref_logprobs"])
    mode = "token-mean" if token_level else "seq-mean-token-mean"
    options = {"epsilon_high": 0.28, "correction": "nemo_rl:tis", "loss_agg_mode": mode, "beta": 0.2}
    options["use_bias_correction_kl"] = "score"

    def replaced(x):
        return tools.mask_out_neg_inf_logprobs(x, inputs["mask"].double(), "logprobs")

    leaf = inputs["logprobs"].clone().requires_grad_()
    rollout = torch.where(outside, 0, inputs["rollout_logprobs"])  # for a weight of 1, as ours
    theirs = inputs | {"logprobs": replaced(leaf), "old_logprobs": replaced(inputs["old_logprobs"])}
    changes = NEMO_RL["tis"] | {"use_importance_sampling_correction": True, "token_level_loss": token_level}
    loss = nemo_loss(theirs | {"rollout_logprobs": rollout}, **changes)
    (grad,) = torch.autograd.grad(loss, leaf)
    ours, metrics, got, *_ = run("reference", inputs, **options)
    assert metrics[rlkernel.POLICY_METRICS.index("outside_support")] == outside.sum() > 4
    assert (got - grad).abs().max() < 1e-7 and not got[outside].any()
    share, tokens = torch.where(outside, inputs["advantages"], 0).sum(-1), inputs["mask"].sum(-1)
    share = (
        share.sum() / tokens.sum()
        if token_level
        else (share / tokens.clamp(min=1)).sum() / (tokens > 0).sum()
    )
    assert (loss + share - ours).abs() < 1e-7


@pytest.mark.parametrize("token_level", [True, False])
@pytest.mark.parametrize("name", NEMO_RL)
def test_is_nemo_rls_preset(name, token_level):
    inputs = drifting(rollout={"seq_mask_tis": 0.005, "icepop": 0.7}.get(name, 0.4))
    mode = "token-mean" if token_level else "seq-mean-token-mean"
    options = {"epsilon_high": 0.28, "correction": f"nemo_rl:{name}", "loss_agg_mode": mode}
    options |= {"beta": 0.2, "kl_estimator": "k3+"}  # the gradient of its k3 is that of k2
    kept = run("reference", inputs, **options)[1][KEPT]
    assert name == "tis" or 0.1 < kept < 0.97
    # it adds 1e-8 to what it divides by
    changes = {"token_level_loss": token_level, "use_importance_sampling_correction": True, **NEMO_RL[name]}
    check_same(inputs, lambda x: nemo_loss(x, **changes), inputs, 1e-7, **options)


@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("clamps", [(20.0, 10.0), (0.3, 0.05), (None, None)])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_is_nemo_rls_kl(estimator, clamps, on_policy):
    """Multiplied by exp(x - stop(x)), and on request by the ratio to the rollout, within its bounds."""
    inputs = drifting(rollout=0.4)
    first, second = clamps
    ours = {k: v for k, v in inputs.items() if k != "rollout_logprobs" or on_policy}
    options = {"beta": 0.2, "kl_estimator": estimator, "epsilon_high": 0.28}
    options |= {"kl_input_clamp": first, "kl_output_clamp": second}
    changes = {"reference_policy_kl_type": estimator, "use_on_policy_kl_approximation": on_policy}
    changes |= {"kl_input_clamp_value": first, "kl_output_clamp_value": second}
    check_same(
        ours, lambda x: nemo_loss(inputs | x, **changes), ours, 1e-7, **options,
        use_bias_correction_kl="rollout" if on_policy else "score",
    )  # fmt: skip


# ---- slime


def slime_loss(inputs, **changes):
    return slime_results(inputs, **changes)[0]


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


@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize("name", ["tis", "icepop"])
def test_is_slimes_preset(name, per_token):
    inputs = drifting(rollout=0.7)
    mode = "token-sum" if per_token else "seq-mean-token-mean"  # its sums are divided outside
    options = {"epsilon_high": 0.28, "correction": f"slime:{name}", "beta": 0.2, "loss_agg_mode": mode}
    options |= {} if per_token else {"num_items_in_batch": 1}
    kept = run("reference", inputs, **options)[1][KEPT]
    assert name == "tis" or 0.5 < kept < 0.97
    changes = {"use_tis": True, "calculate_per_token_loss": per_token}
    changes["custom_tis_function_path"] = None if name == "tis" else "icepop_function"
    # its KL is in fp32
    check_same(inputs, lambda x: slime_loss(x, **changes), inputs, 1e-6, **options)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("algorithm", ["grpo", "gspo", "cispo"])
def test_is_slimes_loss_of_rollouts(algorithm, unbiased, estimator):
    """Several samples of a rollout share a mean; the KL of GSPO takes the token's own ratio."""
    inputs = drifting()
    inputs["ref_logprobs"][:, ::5] += 4.0  # k3 beyond the bound of low_var_kl, which alone has one
    counts = inputs["mask"].sum(-1).double().view(4, 3).sum(-1).repeat_interleave(3)
    options = {"beta": 0.2, "epsilon_high": 0.28, "loss_agg_mode": "seq-mean-token-mean"}
    options |= {"loss_type": "cispo" if algorithm == "cispo" else "grpo", "num_items_in_batch": 1}
    options["importance_sampling_level"] = "sequence" if algorithm == "gspo" else "token"
    options["use_bias_correction_kl"] = "token" if unbiased else False
    bounded = {"kl_estimator": "k3", "kl_output_clamp": 10.0}
    options |= bounded if estimator == "low_var_kl" else {"kl_estimator": estimator}
    changes = {"advantage_estimator": algorithm, "use_unbiased_kl": unbiased, "kl_loss_type": estimator}
    ours = {k: v for k, v in inputs.items() if k != "rollout_logprobs"} | {"token_counts": counts}
    theirs = {k: v for k, v in inputs.items() if k != "rollout_logprobs"}
    rest = {"rollout_logprobs": inputs["rollout_logprobs"], "token_counts": counts}
    check_same(ours, lambda x: slime_loss(x | rest, **changes), theirs, 1e-6, **options)


# ---- prime-rl


def prime_rl_loss(inputs, function="default_loss_fn", kind="DefaultLossConfig"):
    """Its loss of every sequence, divided by the tokens of the batch as compute_loss does."""
    results = prime_rl_results(inputs, function, kind)
    return sum(x.loss for x in results) / inputs["mask"].sum()


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


@pytest.mark.parametrize("name", ["dppo", "ipo"])
def test_is_prime_rls_preset(name):
    """With its r to the rollout, and its square of log r, which is k2 of the rollout, on every token."""
    inputs = drifting(drift=0.6)
    inputs["rollout_logprobs"] = inputs["old_logprobs"] = -inputs["old_logprobs"].abs() / 3
    inputs["ref_logprobs"] = inputs["rollout_logprobs"]
    options = {"loss_type": "importance_sampling", "correction": f"prime_rl:{name}"}
    options |= {"beta": 2e-3, "kl_estimator": "k2"}
    assert 0.05 < run("reference", inputs, **options)[1][KEPT] < 0.97
    their = {"dppo": ("default_loss_fn", "DefaultLossConfig"), "ipo": ("ipo_loss_fn", "IPOLossConfig")}[name]
    check_same(inputs, lambda x: prime_rl_loss(x, *their), inputs, **options)


# ---- AReaL


@pytest.mark.parametrize("threshold", [0.04, 1e-3, 1e-9])
def test_is_areals_m2po(threshold):
    inputs = {k: v for k, v in drifting(rollout=0.3).items() if k != "ref_logprobs"}
    arguments = inputs["rollout_logprobs"], inputs["old_logprobs"], inputs["mask"], threshold
    names = "_apply_m2po_masking", "_get_m2po_loss_mask"
    kept = load("areal", "areal/trainer/ppo/actor.py", *names)._apply_m2po_masking(*arguments)
    assert 0 < kept.sum() < inputs["mask"].sum()
    correction = "areal:m2po" if threshold == 0.04 else RolloutCorrection("none", m2_threshold=threshold)
    plain = {k: v for k, v in inputs.items() if k != "rollout_logprobs"} | {"mask": kept}
    ours, theirs = run("reference", inputs, correction=correction), run("reference", plain)
    assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[2], theirs[2])


# ---- open-instruct


@pytest.mark.parametrize("upper", [0.0, 0.25])
@pytest.mark.parametrize("loss_fn", ["dapo", "cispo"])
def test_is_open_instructs_rho_correction(loss_fn, upper):
    """Truncated weights; with rho_mask_tv_divergence no token that adds to a far sequence's divergence."""
    inputs = {k: v for k, v in drifting(rollout=0.3).items() if k != "ref_logprobs"}
    kinds = SimpleNamespace(dapo="dapo", cispo="cispo")
    their = load(
        "open-instruct", "open_instruct/grpo_utils.py", "compute_rho_correction", "_rho_drop_masks",
        "_sequence_level_mean", "compute_grpo_loss", "RhoCorrection", GRPOLossType=kinds, dataclass=None,
        field=lambda **_: None,
    )  # fmt: skip
    config = SimpleNamespace(
        use_rho_correction=True, rho_mask_sequence_level=False, rho_mask_tv_divergence=upper > 0,
        rho_mask_lower_bound=0.0, rho_mask_upper_bound=upper, rho_clamp_lower_bound=0.0,
        rho_clamp_upper_bound=1.2, loss_fn=loss_fn, clip_lower=0.2, clip_higher=0.272,
    )  # fmt: skip
    tensors = (inputs[k] for k in ("old_logprobs", "rollout_logprobs", "mask", "advantages"))
    their_kind = vars(their)["RhoCorrection"]
    their_kind.__init__ = lambda self, **values: self.__dict__.update(values)
    weights = their.compute_rho_correction(*tensors, config).weights

    def peer(x):
        ratio = (x["logprobs"] - x["old_logprobs"]).exp()
        loss, _, _ = their.compute_grpo_loss(x["logprobs"], ratio, x["advantages"], None, config, weights)
        return torch.where(x["mask"], loss, 0).sum() / x["mask"].sum()

    correction = RolloutCorrection(high=1.2, tv_threshold=upper or None)
    options = (
        {"loss_type": "cispo_cap", "epsilon_high": 1.272} if loss_fn == "cispo" else {"epsilon_high": 0.272}
    )
    if upper:
        assert 0.3 < run("reference", inputs, correction=correction, **options)[1][KEPT] < 0.95
    check_same(inputs, peer, inputs, correction=correction, **options)


def test_every_preset_that_names_a_framework_is_tested():
    tested = {f"skyrl:{x}" for x in SKYRL} | {f"nemo_rl:{x}" for x in NEMO_RL}
    tested |= {"slime:tis", "slime:icepop", "prime_rl:dppo", "prime_rl:ipo", "areal:m2po"}
    elsewhere = ("verl:", "trl:")  # tests/test_policy_loss_peers.py
    assert {x for x in CORRECTIONS if ":" in x and not x.startswith(elsewhere)} == tested
