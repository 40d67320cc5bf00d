"""``Report.to_metrics``: the names of other frameworks, and their figures by their own code."""

import functools
import math

import consistency_peers
import policy_peers
import policy_sources as sources
import pytest
import torch

from rlkernel.consistency import compare, statistics
from rlkernel.consistency.styles import STYLES

BOUNDS = {"truncated": (None, 1.5), "both sides": (0.7, 1.5)}


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch):
    monkeypatch.setattr(statistics, "CHUNK", 100)


def draw(drift=0.3, rows=12, length=30):
    g = torch.Generator().manual_seed(3)
    rollout = -3 * torch.rand(rows, length, generator=g, dtype=torch.float64)
    train = rollout + drift * torch.randn(rows, length, generator=g, dtype=torch.float64)
    mask = torch.rand(rows, length, generator=g) < 0.8
    mask[4] = False  # a row that counts as one all the same, in verl, TRL and slime
    return train, rollout, mask


def same(got, want, rel=1e-11):
    assert set(got) == set(want)
    for name, value in want.items():
        assert got[name] == pytest.approx(float(value), rel=rel, abs=1e-13), name


@pytest.mark.parametrize("drift", [1e-3, 0.3, 9.0])
def test_is_verls_off_policy_metrics(drift):
    """Also where it clamps a log ratio to 20."""
    train, rollout, mask = draw(drift)
    same(
        compare(train, rollout, mask).to_metrics("verl"), consistency_peers.verl_metrics(train, rollout, mask)
    )


@pytest.mark.parametrize("drift", [1e-3, 0.3])
def test_kl_estimates_are_those_of_verls_penalties(drift):
    """Its policy is the one that drew, and its reference the other side; k3 it clamps to 10."""
    train, rollout, mask = draw(drift)
    report = compare(train, rollout, mask)
    penalty = functools.partial(policy_peers.verl_core().kl_penalty, rollout, train)
    for name, verls in {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}.items():
        want = penalty(verls)[mask].mean()
        assert getattr(report.kl, name) == pytest.approx(float(want), rel=1e-6, abs=1e-12), name
    far = penalty("abs")[mask]
    assert report.mean_abs_difference == pytest.approx(float(far.mean()), rel=1e-11)
    assert report.max_abs_difference == float(far.max())


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_is_verls_weights(level, bounds):
    train, rollout, mask = draw()
    low, high = bounds
    threshold = high if low is None else f"{low}_{high}"
    want = consistency_peers.verl_metrics(
        train, rollout, mask, rollout_is=level, rollout_is_threshold=threshold
    )
    same(compare(train, rollout, mask, bounds=bounds).to_metrics("verl", rollout_is=level), want, 1e-6)
    assert 0 < want["rollout_corr/rollout_is_ratio_fraction_high"] < 1


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("mode", ["sequence_mask", "sequence_truncate", "token_mask", "token_truncate"])
@pytest.mark.parametrize("scored", [True, False], ids=["scored", "some not scored"])
def test_is_trls(mode, bounds, scored):
    train, rollout, mask = draw()
    if not scored:
        rollout[mask & (torch.arange(30) % 7 == 2)] = math.nan  # which vLLM could not score
    rollout[~mask] = math.nan
    want = consistency_peers.trl_metrics(train, rollout, mask, mode, *bounds)
    same(compare(train, rollout, mask, bounds=bounds).to_metrics("trl", mode=mode), want)


def test_is_trls_by_default_and_of_nothing():
    train, rollout, mask = draw()
    want = consistency_peers.trl_metrics(train, rollout, mask, "sequence_mask", None, 3.0)
    same(compare(train, rollout, mask).to_metrics("trl"), want)
    want = consistency_peers.trl_metrics(train, rollout, mask & False, "token_mask", None, 3.0)
    same(compare(train, rollout, mask & False, bounds=(None, 3.0)).to_metrics("trl", mode="token_mask"), want)


def test_is_skyrls():
    """Its correction is taken from its wheel; the four lines of its trainer, which need Ray, are those of
    _compute_and_log of skyrl/train/trainer.py."""
    train, rollout, mask = draw()
    got = compare(train, rollout, mask, bounds=(None, 1.5)).to_metrics("skyrl")
    tokens = consistency_peers.skyrl_metrics(
        train, rollout, mask, tis_ratio_type="token", token_tis_ratio_clip_high=1.5
    )
    sequences = consistency_peers.skyrl_metrics(
        train, rollout, mask, tis_ratio_type="sequence", sequence_tis_ratio_clip_high=1.5
    )
    far = (rollout[mask] - train[mask]).abs()
    name = "policy/rollout_train_logprobs_abs_diff"
    rest = {"max": far.max(), "min": far.min(), "mean": far.mean(), "std": far.std()}
    same(got, tokens | sequences | {f"{name}_{k}": v for k, v in rest.items()}, 1e-6)  # its exp is of fp32
    assert len(compare(train, rollout, mask).to_metrics("skyrl")) == 4
    assert compare(train, rollout, mask & False, bounds=(None, 2.0)).to_metrics("skyrl") == {}


@pytest.mark.parametrize("kl_type", ["k1", "k2", "k3"])
def test_is_nemo_rls(kl_type):
    """By the formulas of ClippedPGLossFn.__call__ in nemo_rl/algorithms/loss/loss_functions.py."""
    train, rollout, mask = draw()
    p, q = train[mask], rollout[mask]
    middle = (p.exp() / 2 + q.exp() / 2).log()

    def kl(logr):
        return {"k1": -logr, "k2": logr**2 / 2, "k3": logr.exp() - 1 - logr}[kl_type].mean()

    ratio = (p - q).exp()
    want = {
        "token_mult_prob_error": (p - q).abs().exp().mean(),
        "gen_kl_error": kl(p - q),
        "policy_kl_error": kl(q - p),
        "js_divergence_error": sum((x - middle).exp() - 1 - (x - middle) for x in (p, q)).mean() / 2,
        "sampling_importance_ratio": torch.where((ratio < 0.7) | (ratio > 1.5), 0, ratio).mean(),
        "is_oob_ratio": ((ratio < 0.7) | (ratio > 1.5)).double().mean(),
    }
    got = compare(train, rollout, mask, bounds=(0.7, 1.5))
    same(got.to_metrics("nemo", kl_type=kl_type, truncation="icepop"), want, 1e-9)
    want["sampling_importance_ratio"] = ratio.clamp(0.7, 1.5).mean()
    same(got.to_metrics("nemo", kl_type=kl_type), want, 1e-9)
    want["sampling_importance_ratio"] = ratio.mean()
    del want["is_oob_ratio"]
    same(compare(train, rollout, mask).to_metrics("nemo", kl_type=kl_type), want, 1e-9)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("truncation", ["tis", "icepop", "seq-mask-tis"])
def test_is_what_nemo_rl_reports(truncation, bounds):
    train, rollout, mask = draw()
    bounds = (0.95 if truncation == "seq-mask-tis" else bounds[0] or 0.0, bounds[1])
    inputs = {"logprobs": train, "old_logprobs": train, "rollout_logprobs": rollout, "ref_logprobs": rollout}
    inputs |= {"mask": mask, "advantages": torch.ones_like(train)}
    low, high = bounds
    reported = sources.nemo_results(
        inputs, use_importance_sampling_correction=True,
        truncated_importance_sampling_type=truncation,
        truncated_importance_sampling_ratio=high, truncated_importance_sampling_ratio_min=low,
    )[1]  # fmt: skip
    got = compare(train, rollout, mask, bounds=bounds).to_metrics("nemo", truncation=truncation)
    same(got, {name: reported[name] for name in got}, 1e-9)
    assert 0 < got["is_oob_ratio"] < 1


def prime_formulas(k3, p, q, advantages, masks):
    """default_loss_fn of src/prime_rl/trainer/rl/loss.py, of each sequence."""
    fell, rose = p - q < -0.2, p - q > 0.2
    dropped = torch.where(advantages > 0, rose, fell)

    def mean(values, of):
        return (values * of).double().sum(-1) / of.sum(-1).clamp(min=1)

    return {
        "masked_mismatch_kl": mean(k3, masks & dropped),
        "unmasked_mismatch_kl": mean(k3, masks & ~dropped),
        "is_masked": mean(dropped, masks),
        "is_masked_low": mean((advantages < 0) & fell, masks),
        "is_masked_high": mean((advantages > 0) & rose, masks),
    }


def test_is_prime_rls():
    train, rollout, mask = draw()
    g = torch.Generator().manual_seed(4)
    advantages = torch.randn(12, 30, generator=g).sign() * (torch.rand(12, 30, generator=g) < 0.9)
    k3 = (train - rollout).expm1() - (train - rollout)
    want = {"mean": k3[mask].mean(), "std": k3[mask].std(), "max": k3[mask].max()}
    want = {f"mismatch_kl/all/{name}": value for name, value in want.items()}
    same(compare(train, rollout, mask).to_metrics("prime"), want)
    of_each = prime_formulas(k3, train.exp(), rollout.exp(), advantages, mask)
    assert all(of_each[f"is_masked_{side}"].any() for side in ("low", "high"))
    for name, values in of_each.items():
        want |= {f"{name}/mean": values.mean(), f"{name}/max": values.max()}
    same(compare(train, rollout, mask, advantages=advantages).to_metrics("prime"), want)


def test_is_what_prime_rl_reports():
    train, rollout, mask = draw()
    advantages = torch.randn(12, 1, generator=torch.Generator().manual_seed(4)).expand(12, 30)
    inputs = {"logprobs": train, "rollout_logprobs": rollout, "mask": mask, "advantages": advantages}
    reported = [x.metrics for x in sources.prime_rl_results(inputs)]
    got = compare(train, rollout, mask, advantages=advantages).to_metrics("prime")
    names = {name.rpartition("/")[0] for name in got} - {"mismatch_kl/all"}
    assert names
    for name in names:
        values = torch.stack([x[name] for x in reported]).double()
        assert got[f"{name}/mean"] == pytest.approx(float(values.mean())), name
        assert got[f"{name}/max"] == pytest.approx(float(values.max())), name


@pytest.mark.parametrize("per_token", [False, True])
def test_is_slimes(per_token):
    """policy_loss_function and vanilla_tis_function of slime/backends/megatron_utils/loss.py."""
    train, rollout, mask = draw()

    def mean(x):
        if per_token:
            return x[mask].mean()
        return ((x * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()

    ratio = (train - rollout).exp()
    want = {
        "train/train_rollout_logprob_abs_diff": mean((train - rollout).abs()),
        "train/tis": mean(ratio),
        "train/tis_clipfrac": mean(((ratio < 0.7) | (ratio > 1.5)).double()),
        "train/tis_abs": mean((ratio - 1).abs()),
    }
    report = compare(train, rollout, mask, bounds=(0.7, 1.5))
    same(report.to_metrics("slime", per_token=per_token), want)
    assert len(compare(train, rollout, mask).to_metrics("slime")) == 1


@pytest.mark.parametrize("per_token", [False, True])
def test_is_what_slime_reports(per_token):
    train, rollout, mask = draw()
    inputs = {"logprobs": train, "old_logprobs": train, "rollout_logprobs": rollout, "ref_logprobs": rollout}
    inputs |= {"mask": mask, "advantages": torch.ones_like(train)}
    reported = sources.slime_results(
        inputs, use_tis=True, tis_clip=1.5, tis_clip_low=0.7, calculate_per_token_loss=per_token
    )[1]  # sums, which its step divides by the rollouts or the tokens
    got = compare(train, rollout, mask, bounds=(0.7, 1.5)).to_metrics("slime", per_token=per_token)
    count = mask.sum() if per_token else len(mask)
    same(got, {name: reported[name.removeprefix("train/")] / count for name in got})


def test_every_style_takes_what_counts_nowhere():
    """Nothing to compare, one token, and tokens that are left out."""
    x = torch.zeros(2, 3)
    advantages = torch.ones(2, 3)
    for mask, other in ((x > 0, x), (torch.eye(2, 3) > 0, x - 1), (x == 0, x - math.inf)):
        report = compare(x, other, mask, advantages=advantages, bounds=(0.5, 2.0))
        for style in STYLES:
            assert all(isinstance(v, float) for v in report.to_metrics(style).values())
        for level in ("token", "sequence"):
            report.to_metrics("verl", rollout_is=level)
        assert report.to_metrics("trl", mode="token_mask")


ERRORS = {
    "style must be one of 'verl', 'trl', .*, got 'openrlhf'": lambda r: r.to_metrics("openrlhf"),
    "options of style 'trl' must be among mode, got level": lambda r: r.to_metrics("trl", level=1),
    "options of style 'skyrl' must be among none, got mode": lambda r: r.to_metrics("skyrl", mode=1),
    "mode must be one of 'sequence_mask', .*, got 'token'": lambda r: r.to_metrics("trl", mode="token"),
    "bounds must be given to compare for mode 'token_mask'": lambda r: r.to_metrics("trl", mode="token_mask"),
    "bounds must be given to compare for rollout_is": lambda r: r.to_metrics("verl", rollout_is="token"),
    "kl_type must be one of 'k1', 'k2', 'k3', got 'abs'": lambda r: r.to_metrics("nemo", kl_type="abs"),
}


@pytest.mark.parametrize("text", ERRORS)
def test_errors_name_the_argument(text):
    with pytest.raises(ValueError, match=text):
        ERRORS[text](compare(torch.zeros(1, 1), torch.zeros(1, 1)))
