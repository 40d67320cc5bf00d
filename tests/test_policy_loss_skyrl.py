"""policy_loss against SkyRL: its own functions, in value and gradient."""

from types import SimpleNamespace

import pytest
import torch
from peer_sources import load
from policy_cases import run
from policy_peers import check_same
from policy_sources import KEPT, SKYRL, Base, configured, drifting, skyrl, skyrl_correction


def skyrl_functions(*names):
    tools = vars(skyrl("torch_utils", "masked_mean", "safe_exp_delta"))
    return skyrl("ppo_utils", *names, "reduce_loss", **tools, **vars(skyrl_correction()))


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
