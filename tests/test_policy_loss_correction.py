"""The rollout correction of policy_loss on every backend: weights, rejection, staleness, normalisation."""

import math

import pytest
import torch
from backends import is_slow, of
from bitwise import assert_equal
from policy_cases import check_against_fp64, run

import rlkernel
from rlkernel import RolloutCorrection
from rlkernel.calls.policy_loss import (
    POLICY_METRICS,
)
from rlkernel.ops.policy_loss import rollout_correction as rules
from rlkernel.reference.policy_loss import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("policy_loss"))
pytestmark = pytest.mark.usefixtures("poison")


def drifting(rows, length, device="cpu", drift=0.05, **options):
    inputs = make_inputs(rows, length, device=device, extras=True, drift=drift, **options)
    del inputs["ref_logprobs"], inputs["entropy"]
    return inputs


def metric(metrics, name):
    return metrics[POLICY_METRICS.index(name)].item()


@pytest.mark.parametrize("name", {c: name for name, c in rules.CORRECTIONS.items()}.values())
@ON_EVERY_BACKEND
def test_presets_match_fp64(backend, device, name):
    inputs = drifting(6, 40, device)
    cases = [(0.9, "seq-mean-token-mean"), (None, "token-mean"), (0.9, "token-mean")]
    for veto, mode in cases[: 1 if is_slow(backend, device) else None]:
        correction = rules.CORRECTIONS[name]._replace(veto=veto)
        check_against_fp64(backend, inputs, correction=correction, loss_agg_mode=mode)


REJECT = {
    "token_k1": (0.95, 1.04), "token_k2": (0.002,), "token_k3": (0.002,), "seq_max_k1": (0.9, 1.12),
    "seq_max_k2": (0.008,), "seq_max_k3": (0.008,), "seq_sum_k1": (0.8, 1.3), "seq_sum_k2": (0.03,),
    "seq_sum_k3": (0.03,), "seq_mean_k1": (0.99, 1.012), "seq_mean_k2": (0.0015,), "seq_mean_k3": (0.0015,),
}  # fmt: skip


@pytest.mark.parametrize("denominator", ["keep", "shrink"])
@pytest.mark.parametrize("name", rules.REJECTIONS)
@ON_EVERY_BACKEND
def test_rejections_match_fp64(backend, device, name, denominator):
    inputs = drifting(12, 40, device)
    correction = RolloutCorrection(high=1.05, reject=((name, *REJECT[name]),), denominator=denominator)
    metrics = check_against_fp64(backend, inputs, correction=correction)[1]
    if denominator == "keep":
        assert 0.05 < metric(metrics, "correction_kept") < 0.95  # else nothing is tested
        return
    # those that are left make the sequence's ratio
    check_against_fp64(
        backend, inputs, correction=correction, importance_sampling_level="sequence", loss_type="gmpo"
    )


MORE = {
    "tv": RolloutCorrection("none", dppo=("tv", 0.01, 0.02)),
    "kl": RolloutCorrection("none", dppo=("kl", 2e-4, 3e-4), denominator="shrink"),
    "both sides": RolloutCorrection("none", dppo=("tv", 0.01, 0.02), two_sided=True),
    "kl on both sides": RolloutCorrection("none", dppo=("kl", 2e-4, 3e-4), two_sided=True),
    "total variation": RolloutCorrection(high=1.03, tv_threshold=0.04),
    "second moment": RolloutCorrection("none", m2_threshold=1.5e-3),
    "off policy": RolloutCorrection("none", off_policy_threshold=0.0),
    "raw weights of near sequences": RolloutCorrection(high=math.inf, reject=(("seq_mean_k1", 0.99, 1.01),)),
    "normalised": RolloutCorrection(high=1.03, normalize=True),
    "normalised sequences": RolloutCorrection("sequence", high=1.1, normalize=True),
    "normalised icepop": RolloutCorrection(mode="mask", low=0.97, high=1.03, normalize=True),
}


@pytest.mark.parametrize("name", MORE)
@ON_EVERY_BACKEND
def test_the_others_match_fp64(backend, device, name):
    inputs = drifting(9, 50, device)
    inputs["mask"][3] = False
    metrics = check_against_fp64(backend, inputs, correction=MORE[name])[1]
    if "normalised" in name and "sequences" not in name:
        assert abs(metric(metrics, "correction_weight_mean") - 1) < 1e-6
    elif "normalised" not in name:
        out_of_mask = MORE[name].denominator == "shrink" or MORE[name].m2_threshold is not None
        assert metric(metrics, "correction_kept") < 1 or out_of_mask
        assert metric(metrics, "tokens") < inputs["mask"].sum() or not out_of_mask
    if not is_slow(backend, device) or "normalised" in name:
        check_against_fp64(backend, inputs, correction=MORE[name], loss_type="vespo")


def test_the_second_moment_takes_the_first_of_equal_tokens_and_leaves_one():
    rollout = torch.tensor([[0.5, -0.5, 0.5, 0.1, torch.nan, 9.0]])
    zero, mask = torch.zeros(1, 6), torch.tensor([[1, 1, 1, 1, 1, 0]])

    def left(threshold):
        correction = RolloutCorrection("none", m2_threshold=threshold)
        x = zero.clone().requires_grad_()
        rlkernel.policy_loss(
            x, zero, zero + 1, mask, rollout_logprobs=rollout, correction=correction
        ).loss.backward()
        return x.grad.ne(0).int().tolist()[0]

    # squares 0.25, 0.25, 0.25, 0.01, 0: means 0.152, 0.1275, 0.0867, 0.005, 0
    assert left(0.2) == [1, 1, 1, 1, 1, 0]
    assert left(0.152) == [0, 1, 1, 1, 1, 0]
    assert left(0.1) == [0, 0, 1, 1, 1, 0]
    assert left(1e-9) == [0, 0, 0, 0, 1, 0]
    mask[0, 4] = 0
    assert left(1e-9) == [0, 0, 0, 1, 0, 0]


@ON_EVERY_BACKEND
def test_off_policy_rejects_negative_advantages_alone(backend, device):
    """A token of advantage 0 in a sequence that has drifted stays, and so does its part in the mean."""
    inputs = drifting(6, 40, device, drift=0.2)
    inputs["advantages"][:, ::3] = 0.0
    mask, negative = inputs["mask"], inputs["advantages"] < 0
    behind = torch.where(mask, inputs["rollout_logprobs"] - inputs["logprobs"], 0).double().sum(-1)
    drifted = behind / mask.sum(-1).clamp(min=1) > 0.01
    assert 0 < drifted.sum() < 6
    kept = mask & ~(drifted[:, None] & negative)
    for denominator in ("keep", "shrink"):
        correction = RolloutCorrection("none", off_policy_threshold=0.01, denominator=denominator)
        _, metrics, grad = run(backend, inputs, correction=correction)
        if denominator == "keep":
            assert metric(metrics, "correction_kept") == pytest.approx((kept.sum() / mask.sum()).item())
        else:
            assert metric(metrics, "tokens") == kept.sum()
        assert not grad[mask & ~kept].any()


@pytest.mark.parametrize("veto", [0.7, 0.95])
@pytest.mark.parametrize("low", [0.7, 0.95])
@ON_EVERY_BACKEND
def test_a_veto_and_a_bound_of_the_same_both_hold(backend, device, veto, low):
    inputs = drifting(40, 12, device, drift=0.05)
    correction = RolloutCorrection("none", veto=veto, reject=(("seq_max_k1", low, 1.08),))
    _, metrics, _ = run(backend, inputs, correction=correction)
    ratio = (inputs["old_logprobs"] - inputs["rollout_logprobs"]).double().exp()
    mask = inputs["mask"]
    fine = ~mask | ((ratio >= max(veto, low)) & (ratio <= 1.08))
    kept = fine.all(-1, keepdim=True) & mask
    assert metric(metrics, "correction_kept") == pytest.approx((kept.sum() / mask.sum()).item())
    assert 0 < kept.sum() < mask.sum()


STALE = {
    "beyond": RolloutCorrection("none", max_staleness=2),
    "decay": RolloutCorrection(high=1.05, staleness_decay=0.8),
    "stale only": RolloutCorrection(high=1.05, stale_only=True),
    "all": RolloutCorrection(
        high=1.05, max_staleness=3, staleness_decay=0.9, stale_only=True, normalize=True, denominator="shrink"
    ),
}


@pytest.mark.parametrize("per_token", [False, True], ids=["per sequence", "per token"])
@pytest.mark.parametrize("name", STALE)
@ON_EVERY_BACKEND
def test_staleness_matches_fp64(backend, device, name, per_token):
    inputs = drifting(8, 40, device)
    shape = (8, 40) if per_token else (8,)
    stale = torch.randint(0, 5, shape, generator=torch.Generator().manual_seed(0)).to(device)
    metrics = check_against_fp64(backend, inputs | {"staleness": stale}, correction=STALE[name])[1]
    if name == "beyond":
        spread = stale if per_token else stale[:, None].expand(8, 40)
        want = (spread <= 2)[inputs["mask"]].double().mean().item()
        assert metric(metrics, "correction_kept") == pytest.approx(want)


def test_staleness_by_hand():
    """Fresh tokens have the weight 1, stale ones the ratio and the decay of each version."""
    one = torch.zeros(1, 3, dtype=torch.float64)
    rollout = one - math.log(1.2)
    stale = torch.tensor([[0, 1, 3]])
    correction = RolloutCorrection(high=9.0, staleness_decay=0.5, stale_only=True, max_staleness=2)
    out = rlkernel.policy_loss(
        one, one, one + 1, one == 0, rollout_logprobs=rollout, staleness=stale, correction=correction,
        loss_agg_mode="token-sum",
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(-(1 + 1.2 * 0.5 + 0))


@ON_EVERY_BACKEND
def test_a_token_that_the_engine_did_not_score_has_the_weight_one(backend, device):
    inputs = drifting(3, 20, device)
    inputs["mask"][:, 0] = True
    scored = dict(inputs)
    scored["rollout_logprobs"] = scored["rollout_logprobs"].clone()
    scored["rollout_logprobs"][:, 0] = scored["old_logprobs"][:, 0]
    inputs["rollout_logprobs"] = inputs["rollout_logprobs"].clone()
    inputs["rollout_logprobs"][:, 0] = torch.nan
    correction = RolloutCorrection("sequence", high=1.1, reject=(("seq_mean_k3", 0.1),), normalize=True)
    for got, want in zip(
        run(backend, inputs, correction=correction), run(backend, scored, correction=correction), strict=True
    ):
        assert_equal("unscored", got, want)


@pytest.mark.parametrize("name", ["all", "tv"])
@ON_EVERY_BACKEND
def test_bits_depend_on_the_sequence_alone(backend, device, name):
    inputs = drifting(7, 300, device)
    inputs["staleness"] = torch.arange(7, device=device) % 4
    correction = (STALE | MORE)[name]._replace(normalize=False)  # a mean over the batch hangs on the batch
    options = {"correction": correction, "loss_agg_mode": "token-sum"}
    whole = run(backend, inputs, **options)
    order = torch.tensor([4, 0, 6, 2, 1, 5, 3], device=device)
    for rows in (order, order[:3], order[2:3]):
        part = run(backend, {k: v[rows] for k, v in inputs.items()}, **options)
        assert_equal("grad", part[2], whole[2][rows])
    repeats = {"correction": correction._replace(normalize=True)}
    first = run(backend, inputs, **repeats)
    for _ in range(3 if is_slow(backend, device) else 100):
        for got, want in zip(run(backend, inputs, **repeats), first, strict=True):
            assert_equal("again", got, want)


def test_bounds_of_k3_are_its_inverse():
    for high in (0.0, 1e-12, 1e-6, 1e-3, 0.01, 0.5, 3.0, 1e4):
        low, up = rules._k3_interval(high)
        assert low <= 0 <= up
        for d in (low, up):
            assert math.expm1(d) - d == pytest.approx(high, rel=1e-6, abs=1e-15)


BAD = {
    "correction must be one of token_tis": "tis",
    "correction must be a RolloutCorrection or a name": 3,
    "correction.level must be one of none, token": RolloutCorrection("tokens"),
    "correction.mode must be one of truncate, mask, reject": RolloutCorrection(mode="clip"),
    "correction.high must be finite and >= 0.5": RolloutCorrection(low=0.5, high=0.1),
    "correction.denominator must be one of keep, shrink": RolloutCorrection(denominator="drop"),
    r"correction.reject\[...\]\[0\] must be one of token_k1": RolloutCorrection(reject=(("k3", 1.0),)),
    r"correction.reject of token_k3 must be \(name, high\)": RolloutCorrection(
        reject=(("token_k3", 0.0, 1.0),)
    ),
    "correction.reject of token_k1: its bounds must be low <= high": RolloutCorrection(
        reject=(("token_k1", 2.0, 1.0),)
    ),
    "correction.reject of token_k3: its bound must be finite and >= 0, got inf": RolloutCorrection(
        reject=(("token_k3", math.inf),)
    ),
    "correction.dppo must be given with correction.two_sided": RolloutCorrection(two_sided=True),
    r"correction.dppo\[0\] must be one of tv, kl": RolloutCorrection(dppo=("js", 0.1, 0.1)),
    "staleness must be given": RolloutCorrection(max_staleness=2),
    "correction.staleness_decay must be finite and > 0": RolloutCorrection(staleness_decay=0.0),
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_correction_is_named(message):
    with pytest.raises(ValueError, match=message):
        rlkernel.policy_loss(**drifting(2, 5), correction=BAD[message])


@pytest.mark.parametrize("use", [{"staleness_decay": 0.5}, {"stale_only": True}, {"max_staleness": 0}])
def test_whatever_uses_staleness_wants_it(use):
    with pytest.raises(ValueError, match="staleness must be given with correction's max_staleness, stale"):
        rlkernel.policy_loss(**drifting(2, 5), correction=RolloutCorrection(**use))


def test_staleness_of_another_shape_is_refused():
    with pytest.raises(
        ValueError, match=r"staleness must have logprobs' shape \(2, 5\) or one value for each of 2"
    ):
        rlkernel.policy_loss(**drifting(2, 5), correction=STALE["beyond"], staleness=torch.zeros(3))
    stale = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(ValueError, match="staleness must be real numbers, got complex64"):
        rlkernel.policy_loss(**drifting(2, 5), correction=STALE["beyond"], staleness=stale)
