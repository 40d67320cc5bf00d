"""What stands in the place of SkyRL's losses, beside SkyRL's own: values, gradients, metrics."""

import math

import pytest
import torch
from accuracy import check
from doors import random
from skyrl_cases import (
    algorithm,
    batch,
    check_left_to_skyrl,
    load,
    nothing_left_behind,
    ppo_utils,
    upstream,
)

import rlkernel
from rlkernel.integrations.skyrl import policy_losses

assert nothing_left_behind and upstream  # fixtures of every test here
corrections = load("skyrl.backends.skyrl_train.utils.off_policy_correction_utils")

LOSSES = {
    "regular": {},
    "dual_clip": {"policy_loss_type": "dual_clip", "clip_ratio_c": 1.3, "eps_clip_high": 0.28},
    "gspo": {"loss_reduction": "sequence_mean", "eps_clip_low": 0.05, "eps_clip_high": 0.08},
    "cispo": {"cispo__cispo_eps_clip_low": 0.3, "cispo__cispo_eps_clip_high": 0.2},
    "sapo": {"loss_reduction": "sequence_mean", "sapo__tau_pos": 1.3, "sapo__tau_neg": 1.7},
    "rollout_is": {"eps_clip_low": 0.3, "eps_clip_high": 0.4},
    "cross_entropy": {},
    "importance_sampling": {},
}
CORRECTED = [name for name in LOSSES if name not in ("cross_entropy", "importance_sampling")]
CORRECTIONS = {
    "token": {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
    "sequence": {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
    "geometric": {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
    "product": {"sequence_mask_metric": "product", "product_mask_low": 0.5, "product_mask_high": 1.3},
    "outlier": {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 1.8},
    "one side": {"outlier_token_is_threshold_high": 1.4},
    "tokens": {"token_mask_is_threshold_low": 0.8, "token_mask_is_threshold_high": 1.3},
    "all": {
        "tis_ratio_type": "token", "sequence_mask_metric": "geometric",
        "geo_mask_low": 0.8, "geo_mask_high": 1.4, "token_mask_is_threshold_low": 0.7,
        "token_mask_is_threshold_high": 1.5, "outlier_token_is_threshold_low": 0.3,
    },
}  # fmt: skip
FUNCTIONS = {name: loss.function for loss in policy_losses.LOSSES for name in loss.names}


def settings(name, correction=None):
    more = {f"off_policy_correction__{k}": v for k, v in CORRECTIONS.get(correction, {}).items()}
    return algorithm(**LOSSES.get(name, {}), **more)


def loss_of(name, given, config):
    return ppo_utils.PolicyLossRegistry.get(name)(
        given["log_probs"], given["old_log_probs"], given["advantages"], config=config,
        loss_mask=given["loss_mask"], rollout_logprobs=given["rollout_logprobs"],
    )  # fmt: skip


def run_loss(name, given, config, dtype=torch.float32):
    numbers = {k: v for k, v in given.items() if v is not None and v.dtype.is_floating_point}
    made = given | {k: v.to(dtype) for k, v in numbers.items()}
    leaf = made["log_probs"].clone().requires_grad_()
    loss, metrics = loss_of(name, made | {"log_probs": leaf}, config)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], metrics


def in_fp64(monkeypatch):
    """SkyRL takes the exponentials of differences in fp32, whatever they are."""

    def safe_exp_delta(delta, clip=20.0, out_dtype=None):
        return torch.clamp(delta.double(), -clip, clip).exp()

    for module in (ppo_utils, corrections):
        monkeypatch.setattr(module, "safe_exp_delta", safe_exp_delta)


def check_loss(monkeypatch, name, *cases):
    stock = [run_loss(name, *case) for case in cases]
    with monkeypatch.context() as exact:
        in_fp64(exact)
        truth = [run_loss(name, *case, torch.float64) for case in cases]
    with rlkernel.patch_skyrl() as patch:
        found = [run_loss(name, *case) for case in cases]
        assert patch.calls == {FUNCTIONS[name]: len(cases)} and not patch.fallbacks, patch.fallbacks
    for got, theirs, want in zip(found, stock, truth, strict=True):
        check(f"{name}: loss", got[0], theirs[0], want[0], magnitude=want[1].abs().sum().item())
        check(f"{name}: gradient", got[1], theirs[1], want[1])
        assert got[2].keys() == theirs[2].keys() and [*got[2]] == [*theirs[2]]
        for key, value in got[2].items():
            assert isinstance(value, float) and value == pytest.approx(want[2][key], abs=3e-6), key
    return found


@pytest.mark.parametrize("name", LOSSES)
def test_policy_losses_are_skyrls(monkeypatch, name):
    """With rollout logprobs and without, masks of numbers and of truths, of one token and of many."""
    config, given = settings(name), batch(3, rows=7, tokens=19, drift=0.7)
    cases = [given, batch(5, rows=1, tokens=1), given | {"loss_mask": given["loss_mask"].bool()}]
    cases.append(batch(6, rows=2, tokens=5) | {"advantages": random(7, 2, 5, scale=1e-5)})
    if name != "rollout_is":
        cases.append(given | {"rollout_logprobs": None})
    found = check_loss(monkeypatch, name, *((case, config) for case in cases))
    if name in ("regular", "dual_clip", "gspo", "cispo", "rollout_is"):
        assert 0 < found[0][2]["clip_ratio"] < 1
    assert not found[0][1][given["loss_mask"] == 0].any()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", CORRECTED)
def test_under_rollout_weights_and_masks(monkeypatch, name, correction):
    given = batch(3, rows=7, tokens=19, drift=0.5)
    (found,) = check_loss(monkeypatch, name, (given, settings(name, correction)))
    assert "is_ratio_mean" in found[2]


def test_no_weights_without_rollout_logprobs(monkeypatch):
    check_loss(monkeypatch, "regular", (batch(3) | {"rollout_logprobs": None}, settings("regular", "token")))


def test_rollout_is_needs_no_old_logprobs(monkeypatch):
    """SkyRL skips their pass where no loss asks for them."""
    check_loss(monkeypatch, "rollout_is", (batch(3) | {"old_log_probs": None}, settings("rollout_is")))


def test_cross_entropy_has_weights_in_its_mask_and_nothing_else(monkeypatch):
    given = batch(3, rows=4, tokens=9)
    weights = given["loss_mask"] * random(8, 4, 9).abs() / 17
    given = dict.fromkeys(given) | {"log_probs": given["log_probs"], "loss_mask": weights}
    check_loss(monkeypatch, "cross_entropy", (given, settings("cross_entropy")))


@pytest.mark.parametrize("name", LOSSES)
def test_bf16_logprobs(monkeypatch, name):
    config = settings(name)
    given = {k: v if k == "loss_mask" else v.bfloat16() for k, v in batch(7).items()}
    with monkeypatch.context() as exact:
        in_fp64(exact)
        want, _ = loss_of(name, {k: v.double() for k, v in given.items()}, config)
    stock, _ = loss_of(name, given, config)
    with rlkernel.patch_skyrl():
        leaf = given["log_probs"].clone().requires_grad_()
        got, _ = loss_of(name, given | {"log_probs": leaf}, config)
        got.backward()
    assert got.dtype == torch.float32 and leaf.grad.dtype == torch.bfloat16
    assert (got - want).abs() <= 2 * (stock - want).abs() + 1e-5


@pytest.mark.parametrize("name", ["regular", "dual_clip", "cispo", "sapo", "gspo", "rollout_is"])
def test_bounds_of_the_ratio(name):
    """Beyond SkyRL's bound of the logarithm nothing comes back."""
    given, config = batch(8, rows=3, tokens=6), settings(name)
    for old in ("old_log_probs", "rollout_logprobs"):
        given[old] = given[old].clone()
        given[old][:, 0] = given["log_probs"][:, 0] - 30.0
        if name == "gspo":
            given[old] = given["log_probs"] - 12.0
    want = run_loss(name, given, config)
    with rlkernel.patch_skyrl():
        got = run_loss(name, given, config)
    torch.testing.assert_close(got[:2], want[:2], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_no_token(name):
    """Of a micro-batch that is all padding: 0 with a graph, and SkyRL's own metrics."""
    given = batch(9)
    given["loss_mask"] = torch.zeros_like(given["loss_mask"])
    want = run_loss(name, given, settings(name))
    with rlkernel.patch_skyrl() as patch:
        got = run_loss(name, given, settings(name))
        assert patch.calls
    assert got[0] == want[0] == 0 and not got[1].any()
    assert str(got[2]) == str(want[2])


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_under_the_mask_is_not_read(name):
    given = batch(9)
    where = (given["loss_mask"] == 0).nonzero()[0]
    want = run_loss(name, given, settings(name))
    for key in ("log_probs", "old_log_probs", "rollout_logprobs", "advantages"):
        given[key][tuple(where)] = math.nan
    with rlkernel.patch_skyrl():
        got = run_loss(name, given, settings(name))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_not_a_number_shows(name):
    given = batch(9)
    given["log_probs"][tuple((given["loss_mask"] > 0).nonzero()[0])] = math.nan
    with rlkernel.patch_skyrl():
        assert run_loss(name, given, settings(name))[0].isnan()


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize("weight", [1.0, 0.5], ids=["ours", "left to SkyRL"])
@pytest.mark.parametrize("name", ["gspo", "sapo"])
def test_skyrls_advice_is_given_once(name, weight, monkeypatch):
    """By whoever computes the loss, which with weights between 0 and 1 is SkyRL."""
    import loguru

    told = []
    monkeypatch.setattr(loguru.logger, "warning", told.append)
    config = settings(name)
    config.loss_reduction = "token_mean"
    given = batch(1) | {"loss_mask": torch.full((6, 11), weight)}
    if weight == 1:
        run_loss(name, given, config)
        with rlkernel.patch_skyrl():
            run_loss(name, given, config)
    else:
        reason = "loss_mask holds other numbers than 0 and 1"
        check_left_to_skyrl(lambda: loss_of(name, given, config), reason)
    assert len(told) == 2 and told[0] == told[1]


LEFT = {
    "there is no loss_mask": ({"loss_mask": None}, {}),
    "loss_mask holds other numbers than 0 and 1": ({"loss_mask": torch.full((6, 11), 0.5)}, {}),
    "old_log_probs has not log_probs's shape": ({"old_log_probs": torch.zeros(6, 1)}, {}),
    "old_log_probs is no tensor": ({"old_log_probs": None}, {}),
    "advantages requires a gradient": ({"advantages": torch.zeros(6, 11, requires_grad=True)}, {}),
    "log_probs is torch.int64": ({"log_probs": torch.zeros(6, 11, dtype=torch.int64)}, {}),
    "clip_ratio_c is not above 1": ({}, {"policy_loss_type": "dual_clip", "clip_ratio_c": 0.5}),
    "epsilon_high is no finite number": ({}, {"eps_clip_high": math.inf}),
    "policy_loss_type is another loss": ({}, {"policy_loss_type": "gspo"}),
    "a bound of the ratio is below 0": ({}, {"eps_clip_low": -0.1}),
    "rollout_logprobs has not log_probs's shape": (
        {"rollout_logprobs": torch.zeros(6, 1)}, {"off_policy_correction__tis_ratio_type": "token"},
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize("reason", LEFT)
def test_losses_that_are_left_to_skyrl(reason):
    change, more = LEFT[reason]
    check_left_to_skyrl(lambda: loss_of("regular", batch(1) | change, algorithm(**more)), reason)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
def test_a_config_of_something_else():
    check_left_to_skyrl(lambda: loss_of("cispo", batch(1), object()), "the config is none of an algorithm")
    config = settings("sapo")
    config.sapo.tau_neg = 0.0
    check_left_to_skyrl(lambda: loss_of("sapo", batch(1), config), "a temperature of the gate is not above 0")


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
def test_bounds_that_leave_no_ratio():
    given = batch(1)
    given["rollout_logprobs"] = given["log_probs"]
    config = algorithm(eps_clip_low=0.0, eps_clip_high=0.0)
    check_left_to_skyrl(lambda: loss_of("rollout_is", given, config), "no ratio is within the bounds")


# the critic's


def run_critic(given, config, dtype=torch.float32):
    leaf = given["values"].to(dtype, copy=True).requires_grad_()
    old, returns = (None if given[k] is None else given[k].to(dtype) for k in ("old_values", "returns"))
    mask = given["loss_mask"]
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    loss, clipped = ppo_utils.ppo_critic_loss(leaf, old, returns, config=config, loss_mask=mask)
    return loss.detach(), torch.autograd.grad(loss, leaf)[0], clipped


def critic_batch(rows=6, tokens=11):
    mask = batch(2, rows, tokens)["loss_mask"]
    values = {f: random(i, rows, tokens) for i, f in enumerate(("values", "old_values", "returns"))}
    return values | {"loss_mask": mask}


@pytest.mark.parametrize("clip", [None, 0.0, 0.3])
@pytest.mark.parametrize("size", [(6, 11), (1, 1)], ids=str)
def test_the_critics_loss_is_skyrls(size, clip):
    """A mean over sequences, of which one has no token."""
    given, config = critic_batch(*size), algorithm(value_clip=clip)
    cases = [given, given | {"loss_mask": given["loss_mask"].bool()}]
    if clip is None:
        cases.append(given | {"old_values": None})
    for case in cases:
        want, stock = run_critic(case, config, torch.float64), run_critic(case, config)
        with rlkernel.patch_skyrl() as patch:
            got = run_critic(case, config)
            assert patch.calls == {"ppo_critic_loss": 1} and not patch.fallbacks, patch.fallbacks
        check("loss", got[0], stock[0], want[0])
        check("gradient", got[1], stock[1], want[1])
        assert got[2] == (None if clip is None else pytest.approx(want[2], abs=1e-6))


@pytest.mark.filterwarnings("ignore:rlkernel.patch_skyrl")
@pytest.mark.parametrize(
    ("reason", "change", "clip"),
    [
        ("there is no loss_mask", {"loss_mask": None}, 0.2),
        ("loss_mask holds other numbers than 0 and 1", {"loss_mask": torch.full((6, 11), 0.5)}, 0.2),
        ("value_clip is no number >= 0", {}, -0.2),
        ("value_clip is no number >= 0", {}, math.inf),
        ("returns has not values's shape", {"returns": torch.zeros(1, 11)}, 0.2),
        ("old_values is no tensor", {"old_values": None}, 0.2),
    ],
)
def test_the_critics_loss_that_is_left_to_skyrl(reason, change, clip):
    given = critic_batch() | change
    check_left_to_skyrl(lambda: run_critic(given, algorithm(value_clip=clip)), reason)
