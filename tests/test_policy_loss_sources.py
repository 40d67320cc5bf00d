"""policy_loss against prime-rl, AReaL and open-instruct: their own functions, in value and gradient."""

from types import SimpleNamespace

import pytest
import torch
from peer_sources import load
from policy_cases import run
from policy_peers import check_same
from policy_sources import KEPT, NEMO_RL, SKYRL, drifting, prime_rl_results

from rlkernel import RolloutCorrection
from rlkernel.ops.policy_loss.rollout_correction import CORRECTIONS

# ---- prime-rl


def prime_rl_loss(inputs, function="default_loss_fn", kind="DefaultLossConfig"):
    """Its loss of every sequence, divided by the tokens of the batch as compute_loss does."""
    results = prime_rl_results(inputs, function, kind)
    return sum(x.loss for x in results) / inputs["mask"].sum()


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
