"""What stands in the place of verl's losses, beside verl's own: values, gradients, metrics."""

import itertools
import math
import types

import pytest
import torch
from accuracy import check
from doors import random
from verl_cases import (
    actor_config,
    batch,
    check_left_to_verl,
    core,
    nothing_left_behind,
    upstream,
    weights_of,
)

import rlkernel

torch_functional = pytest.importorskip("verl.utils.torch_functional")

assert nothing_left_behind and upstream  # fixtures of every test here


BOUNDS = {"clip_ratio": 0.3, "clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
SETTINGS = {
    "vanilla": BOUNDS | {"clip_ratio_c": 1.5},
    "gspo": BOUNDS,
    "sapo": {"tau_pos": 1.3, "tau_neg": 1.7},
    "gpg": {},
    "cispo": BOUNDS,
    "geo_mean": BOUNDS,
    "dppo_tv": {"clip_ratio": 0.3, "clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.05},
    "dppo_kl": {"clip_ratio": 0.3, "clip_ratio_low": 0.02, "clip_ratio_high": 0.05, "clip_ratio_c": 1.05},
    "dro": {"policy_loss": {"dro_beta": 0.7}},
    "reinforce": {},
}
MODES = (
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-sum-norm", "seq-mean-token-mean",
)  # fmt: skip
PLAIN = types.SimpleNamespace(clip_ratio=0.2, clip_ratio_low=0.2, clip_ratio_high=0.2, global_batch_info={})
WHOLE = {"dp_size": 4, "batch_num_tokens": 123, "global_batch_size": 17, "loss_scale_factor": 9}


def loss_of(mode, given, agg, config, weights=None):
    if mode == "reinforce":
        given = {"rollout_log_prob" if k == "old_log_prob" else k: v for k, v in given.items()}
        return core.compute_policy_loss_reinforce(
            **given, loss_agg_mode=agg, config=config, rollout_is_weights=weights
        )
    return core.get_policy_loss_fn(mode)(
        **given, loss_agg_mode=agg, config=config, rollout_is_weights=weights
    )


def check_loss(mode, *cases):
    """Of each case: the batch, the aggregation, weights, and what is known of the global batch."""
    stock = [(run_loss(mode, torch.float64, *case), run_loss(mode, torch.float32, *case)) for case in cases]
    with rlkernel.patch_verl() as patch:
        found = [run_loss(mode, torch.float32, *case) for case in cases]
        assert patch.calls == {f"compute_policy_loss_{mode}": len(cases)} and not patch.fallbacks
    for case, got, (truth, theirs) in zip(cases, found, stock, strict=True):
        mask, where = case[0]["response_mask"] != 0, f"{mode} {case[1:]}"
        check(f"{where}: loss", got[0], theirs[0], truth[0], magnitude=truth[1].abs().sum().item())
        check(f"{where}: gradient", got[1], theirs[1], truth[1])
        assert not got[1][~mask].any()
        assert got[2].keys() == theirs[2].keys()
        for key, value in got[2].items():
            assert isinstance(value, float) and value == pytest.approx(truth[2][key], abs=2e-6), (where, key)
    return found[-1][2]


def run_loss(mode, dtype, given, agg, weights=None, whole=None):
    config = actor_config(**SETTINGS[mode], global_batch_info=whole or {})
    made = {k: v if k == "response_mask" else v.to(dtype) for k, v in given.items()}
    leaf = made["log_prob"].clone().requires_grad_()
    weights = None if weights is None else weights.to(dtype)
    loss, metrics = loss_of(mode, made | {"log_prob": leaf}, agg, config, weights)
    (grad,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), grad, metrics


@pytest.mark.parametrize("mode", SETTINGS)
def test_policy_losses_are_verls(mode):
    """Of every aggregation, with weights and without, of a micro-batch and as a part of a larger batch."""
    given = batch(3, rows=7, tokens=19, drift=0.7)
    weights = [None] if mode == "dro" else [None, weights_of(4, given["log_prob"].shape)]
    metrics = check_loss(mode, *((given, *case) for case in itertools.product(MODES, weights, (None, WHOLE))))
    if mode == "vanilla":
        assert metrics["actor/pg_clipfrac"] > 0 and metrics["actor/pg_clipfrac_lower"] > 0
    if mode.startswith("dppo"):
        assert 0 < metrics["actor/pg_clipfrac"] < 1 and metrics["actor/pg_clipfrac_lower"] > 0


@pytest.mark.parametrize("mode", SETTINGS)
def test_losses_of_one_token_and_masks_of_numbers(mode):
    small = batch(6, rows=2, tokens=5)
    check_loss(
        mode,
        (batch(5, rows=1, tokens=1), "token-mean"),
        (small | {"response_mask": small["response_mask"].long()}, "token-mean"),
        (small | {"response_mask": small["response_mask"].float()}, "seq-mean-token-mean"),
    )


@pytest.mark.parametrize("mode", SETTINGS)
def test_bf16_logprobs(mode):
    given = {k: v if v.dtype == torch.bool else v.bfloat16() for k, v in batch(7).items()}
    config = actor_config(**SETTINGS[mode])
    exact = {k: v if v.dtype == torch.bool else v.double() for k, v in given.items()}
    want, _ = loss_of(mode, exact, "token-mean", config)
    stock, _ = loss_of(mode, given, "token-mean", config)
    with rlkernel.patch_verl():
        leaf = given["log_prob"].clone().requires_grad_()
        got, _ = loss_of(mode, given | {"log_prob": leaf}, "token-mean", config)
        got.backward()
    assert got.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    assert (got - want).abs() <= (stock - want).abs() + 1e-5


@pytest.mark.parametrize("mode", ["vanilla", "gspo", "cispo", "sapo", "dppo_tv", "geo_mean"])
def test_bounds_of_the_ratio(mode):
    """Beyond verl's bound of the logarithm nothing comes back."""
    given = batch(8, rows=3, tokens=6)
    given["old_log_prob"][:, 0] = given["log_prob"][:, 0] - 30.0
    if mode == "gspo":
        given["old_log_prob"] = given["log_prob"] - 12.0
    if mode != "geo_mean":  # which has no bound
        config = actor_config(**SETTINGS[mode])

        def run():
            leaf = given["log_prob"].clone().requires_grad_()
            loss, _ = loss_of(mode, given | {"log_prob": leaf}, "token-mean", config)
            return loss.detach(), torch.autograd.grad(loss, leaf)[0]

        want = run()
        with rlkernel.patch_verl():
            got = run()
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_a_loss_may_be_written_to():
    """verl subtracts the entropy from the very tensor."""
    given, config = batch(9), actor_config()
    with rlkernel.patch_verl():
        leaf = given["log_prob"].clone().requires_grad_()
        loss, _ = loss_of("vanilla", given | {"log_prob": leaf}, "token-mean", config)
        loss -= 0.5 * leaf.sum()
        loss += 1.0
        loss.backward()
        with torch.no_grad():
            loss_of("vanilla", given, "token-mean", config)
    assert (leaf.grad[~given["response_mask"]] == -0.5).all()


def test_a_batch_without_a_token_is_0():
    given, config = batch(9), actor_config()
    given["response_mask"][:] = False
    assert loss_of("vanilla", given, "token-mean", config)[0].isnan()
    with rlkernel.patch_verl():
        loss, metrics = loss_of("vanilla", given, "token-mean", config)
    assert loss == 0 and set(metrics.values()) == {0.0}


def test_weights_of_0_leave_the_gradient_at_0():
    """verl's IcePop; the shares of clipped tokens do not count these tokens here."""
    given, config = batch(3, drift=0.7), actor_config(**SETTINGS["vanilla"])
    weights = weights_of(4, given["log_prob"].shape)
    weights[:, ::2] = 0

    def run():
        leaf = given["log_prob"].clone().requires_grad_()
        loss, _ = loss_of("vanilla", given | {"log_prob": leaf}, "token-mean", config, weights)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    want = run()
    with rlkernel.patch_verl():
        got = run()
    torch.testing.assert_close(got, want)
    assert not got[1][:, ::2].any()


def test_bypass_mode_runs_on_the_losses_here():
    """verl's own function, which calls two of the others by name."""
    given = batch(3)
    correction = {"loss_type": "reinforce", "rollout_is": "token", "rollout_rs": "token_k1"}
    correction |= {"rollout_is_threshold": 2.0, "rollout_rs_threshold": "0.5_2.0"}
    for kind, function in (("reinforce", "reinforce"), ("ppo_clip", "vanilla")):
        config = actor_config(policy_loss={"rollout_correction": correction | {"loss_type": kind}})
        want = loss_of("bypass_mode", given, "token-mean", config)
        with rlkernel.patch_verl() as patch:
            got = loss_of("bypass_mode", given, "token-mean", config)
            assert patch.calls == {f"compute_policy_loss_{function}": 1}
        torch.testing.assert_close(got[0], want[0])
        assert got[1] == pytest.approx(want[1], abs=1e-6)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
@pytest.mark.parametrize(
    ("mode", "change", "settings", "reason"),
    [
        (
            "dro",
            {"rollout_is_weights": torch.ones(6, 11)},
            {"policy_loss": {"dro_beta": 0.7}},
            "there are rollout",
        ),
        ("vanilla", {"advantages": torch.ones(6, 1)}, {}, "advantages has not log_prob's shape"),
        ("vanilla", {"log_prob": torch.zeros(6, 11, 1)[..., 0].to_sparse()}, {}, "nested or sparse"),
        (
            "vanilla",
            {"advantages": torch.ones(6, 11, requires_grad=True)},
            {},
            "advantages requires a gradient",
        ),
        ("vanilla", {}, {"clip_ratio_c": 1.0}, "clip_ratio_c is not above 1"),
        ("vanilla", {"config": None}, {}, "there is no config"),
        ("vanilla", {"config": types.SimpleNamespace()}, {}, "the config is none of an actor"),
        ("vanilla", {"loss_agg_mode": "mean"}, {}, "loss_agg_mode is unknown"),
        ("vanilla", {}, {"global_batch_info": {"dp_size": 2}}, "dp_size is above 1 without batch_num_tokens"),
        ("vanilla", {}, {"global_batch_info": {"batch_num_tokens": 0}}, "batch_num_tokens is not above 0"),
        ("vanilla", {}, {"global_batch_info": {"group": 1}}, "global_batch_info has further entries"),
        ("dro", {}, {"policy_loss": {"dro_beta": 0.0}}, "dro_beta is not above 0"),
        ("sapo", {}, {"tau_neg": -1.0}, "tau_neg is not above 0"),
        ("cispo", {}, {"clip_ratio_high": math.inf}, "epsilon_high is no finite number"),
        ("vanilla", {}, {"clip_ratio_c": math.inf}, "clip_ratio_c is no finite number"),
        ("vanilla", {}, {"clip_ratio_low": torch.tensor(0.2)}, "epsilon is no finite number"),
        ("vanilla", {}, {"clip_ratio": "0.2", "clip_ratio_low": None}, "epsilon is no finite number"),
        ("gspo", {"config": PLAIN}, {}, "the config is none of an actor"),
        ("vanilla", {}, {"global_batch_info": {"dp_size": torch.tensor(2)}}, "dp_size is no number of ranks"),
        (
            "vanilla",
            {},
            {"global_batch_info": {"batch_num_tokens": torch.tensor(0)}},
            "batch_num_tokens is not above 0",
        ),
        (
            "vanilla",
            {"loss_agg_mode": "seq-mean-token-sum-norm"},
            {"global_batch_info": {"loss_scale_factor": torch.tensor(9)}},
            "loss_scale_factor is not above 0",
        ),
    ],
)
def test_losses_that_are_left_to_verl(mode, change, settings, reason):
    given = batch(3) | {"loss_agg_mode": "token-mean", "config": actor_config(**settings)} | change

    def run():
        loss, metrics = core.get_policy_loss_fn(mode)(**given)
        return loss.detach(), metrics

    check_left_to_verl(run, reason)


def test_the_value_loss_is_verls():
    mask = batch(3, rows=7, tokens=19)["response_mask"]
    values, returns, old = random(0, 7, 19), random(1, 7, 19), random(2, 7, 19)
    cases = list(itertools.product(MODES, ({}, WHOLE)))

    def run(dtype, agg, whole):
        leaf = values.to(dtype).requires_grad_()
        others = {"returns": returns.to(dtype), "values": old.to(dtype), "response_mask": mask}
        loss, fraction = core.compute_value_loss(
            vpreds=leaf, **others, cliprange_value=0.5, loss_agg_mode=agg, **whole
        )
        return loss.detach(), torch.autograd.grad(loss, leaf)[0], fraction

    stock = [(run(torch.float32, *case), run(torch.float64, *case)) for case in cases]
    with rlkernel.patch_verl() as patch:
        found = [run(torch.float32, *case) for case in cases]
        assert patch.calls == {"compute_value_loss": len(cases)}
    for case, got, (theirs, truth) in zip(cases, found, stock, strict=True):
        for name, *of in zip(("loss", "gradient", "fraction"), got, theirs, truth, strict=True):
            check(f"{case}: {name}", *of)
        assert 0 < got[2] < 1 and got[2].dim() == 0


@pytest.mark.filterwarnings("ignore:rlkernel.patch_verl")
def test_value_losses_that_are_left_to_verl():
    x, mask = random(0, 2, 3), torch.ones(2, 3)
    with rlkernel.patch_verl() as patch:
        core.compute_value_loss(x, x, x, mask, torch.tensor(0.5))
        core.compute_value_loss(x, x[:1], x, mask, 0.5)
        with pytest.raises(ValueError, match="batch_num_tokens is required"):
            core.compute_value_loss(x, x, x, mask, 0.5, dp_size=2)
        assert patch.fallbacks.total() == 3 and not patch.calls
