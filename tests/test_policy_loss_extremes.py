"""policy_loss at the ends of the range: tokens outside their support, ratios that overflow."""

import itertools
import math

import pytest
import torch
from backends import is_slow, of
from bitwise import assert_equal
from policy_cases import NEEDS, check_against_fp64, run

from rlkernel import RolloutCorrection
from rlkernel.calls.policy_loss import (
    LEVELS,
    POLICY_METRICS,
)
from rlkernel.ops.policy_loss import rule as names
from rlkernel.reference.policy_loss import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("policy_loss"))
pytestmark = pytest.mark.usefixtures("poison")

EXTRAS = {"beta": 0.1, "entropy_coef": 0.01, "correction": "icepop"}
CUT = ((0, 1, "both"), (0, 7, "new"), (1, 4, "old"), (2, 30, "both"), (2, 31, "new"), (2, 32, "old"))


def metric(metrics, name):
    return metrics[POLICY_METRICS.index(name)].item()


def cut_off(inputs, places=CUT):
    """Some tokens leave the support of the policy, of the old one, or of both; and which they are."""
    inputs = {k: v.clone() for k, v in inputs.items()}
    outside = torch.zeros_like(inputs["mask"])
    for row, token, which in places:
        inputs["mask"][row, token] = outside[row, token] = True
        for name in ("logprobs", "old_logprobs"):
            if which == "both" or name == {"new": "logprobs", "old": "old_logprobs"}[which]:
                inputs[name][row, token] = -torch.inf
    return inputs, outside


@pytest.mark.parametrize("loss_type", names.LOSS_TYPES)
@ON_EVERY_BACKEND
def test_a_token_outside_its_support_adds_nothing(backend, device, loss_type):
    """But stays in the number of tokens, which a loss in tiles divides by before it knows any logprob."""
    for extras in (False, True):
        options = NEEDS.get(loss_type, {}) | (EXTRAS if extras else {}) | {"loss_type": loss_type}
        inputs, outside = cut_off(make_inputs(4, 40, device=device, extras=extras))
        masked = inputs | {"mask": inputs["mask"] & ~outside}
        if loss_type in ("clip_cov", "kl_cov"):
            options["cov_ratio"] = 1.0  # else they share how many are picked
        for level in LEVELS[:1] if loss_type == "vespo" else (LEVELS[0], LEVELS[2]):
            more = {"loss_agg_mode": "token-sum", "importance_sampling_level": level}
            if level != "token" and not is_slow(backend, device):
                check_against_fp64(backend, inputs, **options, **more)
            loss, metrics, *grads = run(backend, inputs, **options, **more)
            assert loss.isfinite() and metrics.isfinite().all()
            assert metric(metrics, "outside_support") == outside.sum() == len(CUT)
            assert metric(metrics, "tokens") == inputs["mask"].sum()
            for grad in grads:
                assert grad.isfinite().all() and not grad[outside].any() and grad.any()
            if level == "token" and not (extras and loss_type == "vespo"):  # whose weights multiply
                want = run(backend, masked, **options, **more)
                torch.testing.assert_close(loss, want[0])
                for got, other in zip(grads, want[2:], strict=True):
                    torch.testing.assert_close(got, other)
                assert metric(want[1], "outside_support") == 0


@pytest.mark.parametrize("level", LEVELS)
@ON_EVERY_BACKEND
def test_outside_of_the_support_every_aggregation_is_finite(backend, device, level):
    inputs, _ = cut_off(make_inputs(4, 40, device=device, extras=True, per_token=False))
    modes = ["seq-mean-token-mean"] if is_slow(backend, device) else names.AGGREGATIONS
    for mode, correction in itertools.product(modes, ("icepop", "verl:decoupled_k3_rs_seq_tis", None)):
        given = {k: v for k, v in inputs.items() if correction or k != "rollout_logprobs"}
        options = EXTRAS | {"loss_agg_mode": mode, "correction": correction}
        truth = check_against_fp64(backend, given, importance_sampling_level=level, **options)
        assert all(x.isfinite().all() for x in truth)


@ON_EVERY_BACKEND
def test_on_policy_with_tokens_outside_the_support(backend, device):
    inputs, outside = cut_off(make_inputs(4, 40, device=device), [(0, 3, "both"), (3, 1, "both")])
    loss, metrics, grad = run(backend, inputs | {"old_logprobs": None})
    assert loss.isfinite() and grad.isfinite().all() and not grad[outside].any()
    assert metric(metrics, "outside_support") == 2 and metric(metrics, "not_finite") == 0


@ON_EVERY_BACKEND
def test_a_reference_or_an_engine_without_support(backend, device):
    """Without a KL where the reference has none; the weight of a token that the engine did not score is 1."""
    inputs = make_inputs(3, 30, device=device, extras=True)
    inputs["mask"][0, :5] = True
    del inputs["entropy"]
    options = {"beta": 0.3, "correction": RolloutCorrection(high=1.1, reject=(("seq_mean_k3", 0.5),))}
    for kl in names.KL:
        given = {k: v.clone() for k, v in inputs.items()}
        given["ref_logprobs"][0, 1] = -torch.inf
        given["rollout_logprobs"][0, 2] = -torch.inf
        got = run(backend, given, kl_estimator=kl, **options)
        assert all(x.isfinite().all() for x in got)
        assert metric(got[1], "outside_support") == 1
        same = {k: v.clone() for k, v in inputs.items()}
        same["ref_logprobs"][0, 1] = same["logprobs"][0, 1]
        same["rollout_logprobs"][0, 2] = torch.nan
        want = run(backend, same, kl_estimator=kl, **options)
        if kl == "k1":  # its slope is 1 where the difference is 0
            assert_equal("loss", got[0], want[0])
        else:
            for name, x, y in zip(("loss", "metrics", "grad"), got, want, strict=True):
                assert_equal(name, x[:-1] if name == "metrics" else x, y[:-1] if name == "metrics" else y)
        off = RolloutCorrection("none", off_policy_threshold=0.1, dppo=("kl", 0.1, 0.1))
        outside, _ = cut_off(given, CUT[:3])
        assert run(backend, outside, correction=off, beta=0.3)[0].isfinite()


# whose loss is bounded where A > 0, and so flat where the ratio is beyond any number
BOUNDED = ("grpo", "cispo", "cispo_cap", "sapo", "gmpo", "dppo_tv", "clip_cov")


@pytest.mark.parametrize("old", [-100.0, -torch.finfo(torch.float32).max])
@pytest.mark.parametrize("loss_type", BOUNDED)
@ON_EVERY_BACKEND
def test_a_ratio_that_overflows_has_a_gradient(backend, device, loss_type, old):
    inputs = make_inputs(2, 20, device=device)
    inputs["mask"][:, :3] = True
    inputs["old_logprobs"][:, 1] = old
    inputs["advantages"] = inputs["advantages"].abs() + 0.1
    flat = loss_type not in ("cispo", "cispo_cap")
    for level in LEVELS:
        options = {"loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": 0.3}
        loss, metrics, grad = run(backend, inputs, **options, **NEEDS.get(loss_type, {}))
        assert loss.isfinite() and grad.isfinite().all()
        assert metric(metrics, "not_finite") == metric(metrics, "outside_support") == 0
        if flat and level == "token":
            assert not grad[:, 1].any()


@ON_EVERY_BACKEND
def test_a_rejected_weight_that_overflows_has_a_gradient(backend, device):
    inputs = make_inputs(2, 20, device=device, extras=True)
    inputs["mask"][:, :3] = True
    inputs["rollout_logprobs"][:, 1] = -200
    correction = RolloutCorrection(high=math.inf, reject=(("token_k1", 0.1, 9.0),))
    loss, metrics, grad, _ = run(backend, inputs, correction=correction)
    assert loss.isfinite() and grad.isfinite().all() and not grad[:, 1].any()
    assert metrics.isfinite().all()


@pytest.mark.parametrize("length", [1, 5, 16, 37])
@ON_EVERY_BACKEND
def test_only_tokens_that_count_are_not_finite(backend, device, length):
    """The ratio of a sequence meets the zeros of masked tokens, and of the lanes behind its end."""
    inputs = make_inputs(3, length, device=device)
    inputs["mask"][:] = False
    inputs["mask"][:, 0] = True
    inputs["old_logprobs"] = inputs["logprobs"] - 200
    inputs["advantages"] = torch.tensor([1.0, -1.0, 0.5], device=device)
    for level in LEVELS[1:]:
        loss, metrics, grad = run(backend, inputs, importance_sampling_level=level)
        assert metric(metrics, "not_finite") == 1 and loss == torch.inf  # an unbounded ratio, A < 0
        assert not grad[~inputs["mask"]].any()


@pytest.mark.parametrize("kl_estimator", ["k3", "k3+"])
@ON_EVERY_BACKEND
def test_a_metric_that_is_infinite_is_no_part_of_the_loss(backend, device, kl_estimator):
    """Without beta or entropy_coef estimate and entropy are metrics: 0 * inf would be NaN."""
    inputs = make_inputs(3, 20, device=device, extras=True)
    inputs.pop("rollout_logprobs")
    inputs["mask"][1, 3] = True
    plain = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "entropy")}
    inputs["ref_logprobs"][1, 3] = inputs["logprobs"][1, 3] + 99
    inputs["entropy"][1, 3] = torch.inf
    for weight in (False, True, "score"):
        options = {"kl_estimator": kl_estimator, "use_bias_correction_kl": weight}
        got, want = run(backend, inputs, **options), run(backend, plain)
        assert metric(got[1], "kl_to_reference") == metric(got[1], "entropy") == math.inf
        assert metric(got[1], "not_finite") == 0
        torch.testing.assert_close(got[0], want[0])
        torch.testing.assert_close(got[2], want[2])


@pytest.mark.parametrize("weight", [False, True, "token", "score"])
@pytest.mark.parametrize("kl_estimator", ["k3", "k3+"])
@ON_EVERY_BACKEND
def test_a_bounded_kl_that_overflows(backend, device, kl_estimator, weight):
    """kl_output_clamp bounds value and gradient of what is infinite or has no digit left beside its bound."""
    logprobs = torch.full((1, 3), -1.0, device=device)
    ref_logprobs = torch.tensor([[98.0, 19.0, -1.0]], device=device)  # k3 is infinite; 4.9e8, in steps of 32
    tokens = {"logprobs": logprobs, "old_logprobs": logprobs, "ref_logprobs": ref_logprobs}
    tokens |= {"advantages": torch.ones(1, device=device), "mask": torch.ones(1, 3, device=device)}
    options = {"beta": 1.0, "kl_estimator": kl_estimator, "kl_output_clamp": 10.0}
    more = {"use_bias_correction_kl": weight, "loss_agg_mode": "token-sum"}
    loss, metrics, grad = run(backend, tokens, **options, **more)
    assert loss == 2 * 10.0 - 3 and metric(metrics, "not_finite") == 0
    assert grad.tolist() == ([[-100.0, -21.0, -1.0]] if kl_estimator == "k3+" else [[-1.0] * 3])


def dropped(inputs, loss_type):
    """What a correction rejects, or dppo itself, and the options that make it do so."""
    if loss_type.startswith("dppo"):
        change = inputs["logprobs"].exp() - inputs["old_logprobs"].exp()
        return (inputs["advantages"] * change > 0) & (change.abs() > 0.2), {"epsilon": 0.01}
    ratio = (inputs["old_logprobs"] - inputs["rollout_logprobs"]).exp()
    correction = RolloutCorrection("none", reject=(("token_k1", 0.8, 1.25),))
    return (ratio < 0.8) | (ratio > 1.25), {"correction": correction}


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "loss_type", [x for x in names.LOSS_TYPES if "_cov" not in x]
)  # whose means are infinite
@ON_EVERY_BACKEND
def test_an_infinite_advantage_of_a_token_that_is_dropped_adds_nothing(backend, device, loss_type, level):
    """0 times infinity is NaN: what is dropped is not multiplied by 0."""
    inputs = make_inputs(4, 40, device=device, extras=loss_type[:4] != "dppo", drift=0.5)
    where, options = dropped(inputs, loss_type)
    options |= NEEDS.get(loss_type, {}) | {"importance_sampling_level": level, "loss_type": loss_type}
    assert 10 < (where & inputs["mask"]).sum() < inputs["mask"].sum() - 10
    infinite = inputs | {
        "advantages": torch.where(where, inputs["advantages"] * math.inf, inputs["advantages"])
    }
    want, got = (run(backend, x, **options) for x in (inputs, infinite))
    for name, a, b in zip(("loss", "metrics", "grad", "grad_entropy"), got, want, strict=False):
        if b is not None:
            assert_equal(name, a, b)
    assert metric(got[1], "not_finite") == 0
