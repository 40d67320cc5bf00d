"""What the names of losses and corrections stand for: the numbers of the papers and of the frameworks."""

import math

import pytest
import torch
from policy_cases import NEEDS, run
from policy_peers import config_defaults

import rlkernel
from rlkernel.calls.policy_loss import KL_ESTIMATORS, POLICY_METRICS
from rlkernel.ops.policy_loss import DEFAULTS
from rlkernel.ops.policy_loss import rule as names
from rlkernel.ops.policy_loss.rollout_correction import CORRECTIONS
from rlkernel.reference.policy_loss import make_inputs

TOKENS, MEANS = "token-mean", "seq-mean-token-mean"
# as the papers print them, or the framework that has the name
PRESETS = {
    "ppo": ("ppo", "token", TOKENS, None, None),
    "grpo": ("grpo", "token", MEANS, None, None),
    "dapo": ("dapo", "token", TOKENS, None, 0.28),
    "dr_grpo": ("dr_grpo", "token", "seq-mean-token-sum-norm", None, None),
    "bnpo": ("bnpo", "token", TOKENS, None, None),
    "gspo": (None, "sequence", MEANS, 3e-4, 4e-4),
    "gspo_token": (None, "sequence_token", MEANS, 3e-4, 4e-4),
    "luspo": (None, "sequence", "seq-mean-token-sum", None, None),
    "cispo": ("cispo", "token", TOKENS, None, None),
    "reinforce": ("reinforce", "token", "seq-mean-token-sum", None, None),
    "gpg": ("gpg", "token", TOKENS, None, None),
    "sapo": ("sapo", "token", MEANS, None, None),
    "gmpo": ("gmpo", "sequence", MEANS, 0.4, None),
    "dppo_tv": ("dppo_tv", "token", TOKENS, None, None),
    "dppo_kl": ("dppo_kl", "token", TOKENS, None, None),
    "vespo": ("vespo", "token", TOKENS, None, None),
    "clip_cov": ("clip_cov", "token", TOKENS, None, None),
    "kl_cov": ("kl_cov", "token", TOKENS, None, None),
}


def test_the_numbers_of_every_preset():
    named = ("loss_type", "importance_sampling_level", "loss_agg_mode", "epsilon", "epsilon_high")
    assert set(names.PRESETS) == set(PRESETS)
    for name, values in PRESETS.items():
        want = {k: v for k, v in zip(named, values, strict=True) if v is not None}
        assert {"importance_sampling_level": "token"} | rlkernel.policy_loss_preset(name) == want, name


VERL_POLICY = {
    "cov_ratio": ("clip_cov_ratio", "kl_cov_ratio"),
    "clip_cov_lb": ("clip_cov_lb",),
    "clip_cov_ub": ("clip_cov_ub",),
    "dro_beta": ("dro_beta",),
}
VERL_ACTOR = {
    "epsilon": ("clip_ratio", "clip_ratio_low", "clip_ratio_high"),
    "tau_pos": ("tau_pos",),
    "tau_neg": ("tau_neg",),
}
TRL = {
    "epsilon": ("epsilon",),
    "epsilon_high": ("epsilon_high",),
    "delta": ("delta",),
    "beta": ("beta",),
    "tau_pos": ("sapo_temperature_pos",),
    "tau_neg": ("sapo_temperature_neg",),
    **{name: (name,) for name in ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")},
}


@pytest.mark.parametrize(
    ("package", "path", "config", "names"),
    [
        ("verl", "workers/config/actor.py", "PolicyLossConfig", VERL_POLICY),
        ("verl", "workers/config/actor.py", "ActorConfig", VERL_ACTOR),
        ("trl", "trainer/grpo_config.py", "GRPOConfig", TRL),
    ],
    ids=["verl, policy", "verl, actor", "trl"],
)
def test_what_is_not_given_is_what_the_frameworks_take(package, path, config, names):
    theirs = config_defaults(package, path, config)
    for ours, their_names in names.items():
        assert {DEFAULTS[ours]} == {theirs[name] for name in their_names}, ours


# the ratios of a token, its sequence and its geometric mean that have weight 1 or r, and what happens beyond:
# "cap" keeps the token with the weight of the bound, "drop" does not, "shrink" takes it out of the mean too
BOUNDS = {
    "token_tis": ("token", 0.0, 2.0, "cap"),
    "icepop": ("token", 0.5, 5.0, "drop"),
    "seq_tis": ("sequence", 0.0, 2.0, "cap"),
    "geometric_rejection": ("geometric", 0.999, 1.001, "drop"),
    "verl:decoupled_token_is": ("token", 0.0, 2.0, "cap"),
    "verl:decoupled_seq_is": ("sequence", 0.0, 2.0, "cap"),
    "verl:decoupled_token_icepop": ("token", 0.5, 5.0, "drop"),
    "verl:decoupled_seq_is_rs": ("sequence", 0.5, 2.0, "shrink"),
    "verl:decoupled_geo_rs": ("geometric", 1 / 1.001, 1 / 0.999, "shrink"),
    "verl:decoupled_geo_rs_seq_tis": ("geometric", 1 / 1.001, 1 / 0.999, "shrink"),
    "verl:decoupled_geo_rs_token_tis": ("geometric", 1 / 1.001, 1 / 0.999, "shrink"),
    "verl:decoupled_k3_rs": ("k3", 0.0, 0.01, "shrink"),
    "verl:decoupled_k3_rs_seq_tis": ("k3", 0.0, 0.01, "shrink"),
    "verl:decoupled_k3_rs_token_tis": ("k3", 0.0, 0.01, "shrink"),
    "trl:sequence_mask": ("sequence", 0.0, 3.0, "drop"),
    "trl:sequence_truncate": ("sequence", 0.0, 3.0, "cap"),
    "trl:token_mask": ("token", 0.0, 3.0, "drop"),
    "trl:token_truncate": ("token", 0.0, 3.0, "cap"),
    "skyrl:token_tis": ("token", 0.0, 2.0, "cap"),
    "skyrl:sequence_tis": ("sequence", 0.0, 5.0, "cap"),
    "skyrl:geometric": ("geometric", 0.99, 1.01, "drop"),
    "skyrl:product": ("sequence", 0.5, 2.0, "drop"),
    "skyrl:outlier": ("token", 1e-4, 100.0, "drop"),
    "nemo_rl:tis": ("token", 0.0, 2.0, "cap"),
    "nemo_rl:icepop": ("token", 0.5, 5.0, "drop"),
    "nemo_rl:seq_mask_tis": ("geometric", 0.999, 1.002, "drop"),
    "slime:tis": ("token", 0.0, 2.0, "cap"),
    "slime:icepop": ("token", 0.0, 2.0, "drop"),
    "prime_rl:dppo": ("tv", -0.2, 0.2, "drop"),
    "prime_rl:ipo": ("both", -0.1, 0.1, "drop"),
}


@pytest.mark.parametrize("name", [x for x in CORRECTIONS if x != "areal:m2po"])  # of the batch
def test_the_bounds_of_every_correction(name):
    """A sequence of two tokens of one ratio, a hair inside of each bound and a hair outside."""
    kind, low, high, beyond = BOUNDS[name]
    kept, weight, counted = (
        POLICY_METRICS.index(x) for x in ("correction_kept", "correction_weight_mean", "tokens")
    )

    def difference(bound, out):  # log(old / rollout) of each token, a hair to one side of the bound
        if kind == "k3":  # exp(d) - 1 - d is the bound
            d = math.sqrt(2 * bound)
            for _ in range(20):
                d -= (math.expm1(d) - d - bound) / math.expm1(d)
            return d + out * 1e-6
        return math.log(bound) / (2 if kind == "sequence" else 1) + out * 1e-6

    for side, bound in ((-1, low), (1, high)):
        if bound <= 0 and kind not in ("tv", "both"):
            continue
        for out in (-side, side):
            inside = out != side
            rollout = torch.full((1, 2), math.log(0.4), dtype=torch.float64)
            if kind in ("tv", "both"):  # of the policy's own probability, in the advantage's direction
                new = (rollout.exp() + bound + out * 1e-6).log()
                old, advantages = rollout, torch.full_like(rollout, float(side if kind == "tv" else -side))
            else:
                old = new = rollout + difference(bound, out)
                advantages = torch.ones_like(rollout)
            result = rlkernel.policy_loss(
                new, old, advantages, torch.ones(1, 2), rollout_logprobs=rollout, correction=name
            ).metrics
            assert result[kept] == (inside or beyond == "cap"), (bound, out)
            assert result[counted] == (2 if inside or beyond != "shrink" else 0)
            if beyond == "cap":
                ratio = bound if not inside else math.exp((old - rollout)[0, 0] * (1 + (kind == "sequence")))
                assert result[weight].item() == pytest.approx(ratio, rel=1e-9)


@pytest.mark.parametrize("name", names.PRESETS)
def test_presets_run(name):
    options = NEEDS.get(name, {}) | rlkernel.policy_loss_preset(name)
    loss, *_ = run("reference", make_inputs(3, 9), **options)
    assert bool(loss.isfinite())
    assert set(KL_ESTIMATORS[1:]) == {k.removesuffix("+") for k in names.KL}
