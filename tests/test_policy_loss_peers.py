"""policy_loss against the loss code of TRL, verl and Liger as it stands, in value and gradient."""

import inspect
import itertools

import pytest
import torch
from accuracy import error
from policy_cases import NEEDS, run
from policy_peers import (
    check_same,
    liger_loss,
    trl_loss,
    trl_off_policy_mask,
    verl_core,
    verl_loss,
    verl_rollout_corr,
)

import rlkernel
from rlkernel import RolloutCorrection
from rlkernel.ops.policy_loss import rule as names
from rlkernel.ops.policy_loss.rollout_correction import CORRECTIONS, REJECTIONS
from rlkernel.reference.policy_loss import make_inputs

PER_TOKEN = pytest.mark.parametrize("per_token", [False, True], ids=["per sequence", "per token"])
WEIGHTED = pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])


TRL = {
    "grpo": ("grpo", "seq-mean-token-mean"),
    "bnpo": ("bnpo", "token-mean"),
    "dr_grpo": ("dr_grpo", "seq-mean-token-sum-norm"),
    "dapo": ("dapo", "token-mean"),
    "luspo": ("grpo", "seq-mean-token-sum"),
    "cispo": ("cispo_cap", "token-mean"),
    "sapo": ("sapo", "seq-mean-token-mean"),
    "vespo": ("vespo", "token-mean"),
}


@WEIGHTED
@PER_TOKEN
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("trl", TRL)
def test_is_trls(trl, level, per_token, weighted):
    inputs = make_inputs(5, 30, dtype=torch.float64, per_token=per_token, extras=True, drift=0.4)
    rollout = inputs.pop("rollout_logprobs")
    del inputs["entropy"]
    ours = inputs | ({"rollout_logprobs": rollout} if weighted else {})
    theirs = dict(inputs)
    if weighted:
        # TRL's ratio is of a difference that the mask has multiplied
        theirs["weights"] = ((inputs["old_logprobs"] - rollout) * inputs["mask"]).exp().clamp(max=1.3)
    high = 1.1 if trl == "cispo" else 0.28
    loss_type, mode = TRL[trl]
    for extra in ({}, {"beta": 0.2}, {"beta": 0.2, "use_bias_correction_kl": True}, {"delta": 1.5}):
        options = extra | {"epsilon_high": high}

        def peer(x, options=options):
            return trl_loss(x, loss_type=trl, importance_sampling_level=level, epsilon_low=0.2, **options)

        correction = RolloutCorrection(high=1.3) if weighted else None
        items = {} if mode in ("token-mean",) else {"num_items_in_batch": 5}
        # which TRL rounds to fp32, whatever the dtype of the rest
        temperature = {"tau_neg": torch.tensor(1.05).item()} if trl == "sapo" else {}
        check_same(
            ours, peer, theirs, loss_type=loss_type, loss_agg_mode=mode, correction=correction,
            importance_sampling_level=level, **items, **options, **temperature,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("trl", "mode"),
    [("dapo", f"{level}_{kind}") for level in ("token", "sequence") for kind in ("mask", "truncate")]
    + [("vespo", "token_mask"), ("vespo", "token_truncate")],  # it refuses the others
)
def test_is_trls_importance_sampling(mode, trl):
    """The ratio by TRL's expressions (they stand inside of a method that generates)."""
    inputs = make_inputs(8, 30, dtype=torch.float64, extras=True, drift=0.4)
    rollout, mask = inputs.pop("rollout_logprobs"), inputs["mask"]
    inputs = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "entropy")}
    difference = (inputs["old_logprobs"] - rollout) * mask
    level, kind = mode.split("_")
    if level == "sequence":
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    ratio = ratio.clamp(max=3.0) if kind == "truncate" else ratio.masked_fill(ratio > 3.0, 0.0)
    got = check_same(
        inputs | {"rollout_logprobs": rollout}, lambda x: trl_loss(x, loss_type=trl),
        inputs | {"weights": ratio}, loss_type=trl, correction=f"trl:{mode}",
    )  # fmt: skip
    assert got.count_nonzero() > 0


def test_is_trls_entropy_bonus():
    """TRL's bonus is a mean over tokens whatever the loss type; ours aggregates as the loss does."""
    inputs = make_inputs(5, 30, dtype=torch.float64, extras=True)
    del inputs["rollout_logprobs"]
    theirs = trl_loss(inputs, loss_type="dapo", entropy_coef=0.3)
    ours = run("reference", inputs, entropy_coef=0.3)[0]
    assert error(ours, theirs) < 1e-12


@PER_TOKEN
def test_is_trls_off_policy_sequence_mask(per_token):
    inputs = make_inputs(12, 30, dtype=torch.float64, per_token=per_token, extras=True, drift=0.3)
    inputs = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "entropy")}
    inputs["rollout_logprobs"] -= 0.1
    scores = inputs["rollout_logprobs"].clone()
    scores[0, 0] = torch.nan  # a token that the engine could not score
    inputs["rollout_logprobs"] = scores
    inputs["mask"][0, 0] = True
    keep = trl_off_policy_mask(inputs, 0.0)
    assert 0 < keep.sum() < keep.numel()
    correction = RolloutCorrection("none", off_policy_threshold=0.0)
    theirs = {k: v for k, v in inputs.items() if k != "rollout_logprobs"} | {"sampling": scores}
    check_same(
        inputs, lambda x: trl_loss(x, loss_type="dapo", off_policy_mask_threshold=0.0), theirs,
        loss_type="dapo", correction=correction,
    )  # fmt: skip


VERL = {
    "vanilla": {"loss_type": "ppo", "clip_ratio_c": 3.0},
    "gspo": {"importance_sampling_level": "sequence_token"},
    "sapo": {"loss_type": "sapo"},
    "gpg": {"loss_type": "gpg"},
    "reinforce": {"loss_type": "reinforce"},
    "cispo": {"loss_type": "cispo"},
    "dppo_tv": {"loss_type": "dppo_tv"},
    "dppo_kl": {"loss_type": "dppo_kl"},
    "kl_cov": {"loss_type": "kl_cov", "cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    # every candidate is picked: with fewer, verl's choice is random and ours a hash
    "clip_cov": {"loss_type": "clip_cov", "cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "dro": {"loss_type": "dro", "dro_beta": 0.7},
}
CONFIG = {
    "dppo_kl": {"clip_ratio": 0.02, "clip_ratio_high": 0.05},
    "dppo_tv": {"clip_ratio": 0.02, "clip_ratio_high": 0.05},
    "kl_cov": {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.7},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 2.0},
    "dro": {"dro_beta": 0.7},
}


@WEIGHTED
@PER_TOKEN
@pytest.mark.parametrize(
    ("verl", "mode"),
    # verl's sapo has one aggregation
    [(v, m) for v in VERL for m in names.AGGREGATIONS if v != "sapo" or m == "seq-mean-token-mean"],
)
def test_is_verls(verl, mode, per_token, weighted):
    inputs = make_inputs(5, 30, dtype=torch.float64, per_token=per_token, extras=True, drift=0.6)
    rollout = inputs.pop("rollout_logprobs")
    inputs = {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "entropy")}
    # verl's dppo_kl takes the logarithm of 1 - p
    inputs["logprobs"] = -inputs["logprobs"].abs() if verl == "dppo_kl" else inputs["logprobs"]
    weights = (inputs["old_logprobs"] - rollout).exp().clamp(max=2.0) if weighted else None
    ours = inputs | ({"rollout_logprobs": rollout} if weighted else {})
    config = {"clip_ratio_high": 0.28} | CONFIG.get(verl, {})
    bounds = {"epsilon": config.get("clip_ratio", 0.2), "epsilon_high": config["clip_ratio_high"]}
    # verl adds 1e-8 to the tokens of a sequence
    tolerance = 1e-7 if mode == "seq-mean-token-mean" else 1e-12
    check_same(
        ours, lambda x: verl_loss(verl, x, mode, weights, **config), inputs, tolerance, loss_agg_mode=mode,
        **bounds, **VERL[verl], correction="token_tis" if weighted else None,
    )  # fmt: skip


def test_every_loss_of_verl_is_here():
    ours = set(VERL) | {"geo_mean", "bypass_mode"}  # its own test; a choice of old_logprobs and of the loss
    assert set(verl_core().POLICY_LOSS_REGISTRY) <= ours


def test_clip_cov_picks_as_many_as_verl_and_always_the_same():
    inputs = make_inputs(40, 300, dtype=torch.float64, drift=0.05)
    options = {"loss_type": "clip_cov", "cov_ratio": 0.01, "clip_cov_lb": 0.1, "clip_cov_ub": 9.0}
    far = rlkernel.POLICY_METRICS.index("clip_fraction_far")
    wanted = int(0.01 * inputs["mask"].sum())
    for seed in range(5):
        metrics = run("reference", inputs, seed=seed, **options)[1]
        assert round((metrics[far] * inputs["mask"].sum()).item()) == wanted
    grad = run("reference", inputs, seed=3, loss_agg_mode="token-sum", **options)[2]
    order = torch.randperm(40)
    permuted = run(
        "reference", {k: v[order] for k, v in inputs.items()}, seed=3, loss_agg_mode="token-sum", **options
    )[2]
    assert torch.equal((permuted == 0), (grad == 0)[order])


def test_kl_cov_picks_as_many_as_verl_where_all_covariances_are_equal():
    """One sequence with one advantage: every covariance is 0, and verl's topk takes some of them."""
    inputs = make_inputs(1, 5000, dtype=torch.float64, per_token=False, drift=0.05)
    options = {"loss_type": "kl_cov", "cov_ratio": 2e-3, "ppo_kl_coef": 1.0}
    far = rlkernel.POLICY_METRICS.index("clip_fraction_far")
    tokens = inputs["mask"].sum().item()
    loss, metrics, *_ = run("reference", inputs, **options)
    assert round(metrics[far].item() * tokens) == int(2e-3 * tokens) > 1
    theirs = verl_loss("kl_cov", inputs, "token-mean", kl_cov_ratio=2e-3, ppo_kl_coef=1.0)
    d = (inputs["logprobs"] - inputs["old_logprobs"])[inputs["mask"]].abs()
    assert abs(loss - theirs) < 2 * 2e-3 * d.max()  # whichever they are: were all picked, d.mean()
    assert d.mean() > 4 * 2e-3 * d.max()


def test_is_verls_geometric_mean():
    inputs = make_inputs(5, 30, dtype=torch.float64, per_token=False, drift=0.6)
    preset = rlkernel.policy_loss_preset("gmpo") | {"epsilon": 0.2, "epsilon_high": 0.28}
    check_same(inputs, lambda x: verl_loss("geo_mean", x, "", clip_ratio_high=0.28), inputs, 1e-7, **preset)


@pytest.mark.parametrize("estimator", names.KL)
def test_kl_is_verls(estimator):
    inputs = make_inputs(3, 20, dtype=torch.float64, extras=True)
    x = inputs["logprobs"].clone().requires_grad_()
    (grad,) = torch.autograd.grad(
        (verl_core().kl_penalty(x, inputs["ref_logprobs"], estimator) * inputs["mask"]).sum(), x
    )
    inputs = {k: v for k, v in inputs.items() if k not in ("rollout_logprobs", "entropy")}
    inputs["advantages"] = torch.zeros_like(x)
    got = run("reference", inputs, beta=1.0, kl_estimator=estimator, loss_agg_mode="token-sum")[2]
    assert error(got, grad) < 1e-12


@pytest.mark.parametrize("plus", ["", "+"])
def test_bounded_kl_is_verls(plus):
    """verl's low_var_kl: the difference within 20, the estimate within 10; with "+" the gradient of k2."""
    inputs = make_inputs(3, 20, dtype=torch.float64, extras=True)
    inputs = {k: v for k, v in inputs.items() if k not in ("rollout_logprobs", "entropy")}
    inputs["ref_logprobs"][:, ::3] += 4.0
    inputs["ref_logprobs"][:, 1::3] += 30.0
    inputs["advantages"] = torch.zeros_like(inputs["logprobs"])

    def peer(x):
        kl = verl_core().kl_penalty(x["logprobs"], inputs["ref_logprobs"], f"low_var_kl{plus}")
        return (kl * inputs["mask"]).sum()

    check_same(
        inputs, peer, inputs, beta=1.0, kl_estimator=f"k3{plus}", kl_input_clamp=20.0, kl_output_clamp=10.0,
        loss_agg_mode="token-sum",
    )  # fmt: skip


def drifting(seed=3, drift=0.02):
    """Tokens and sequences near enough to their rollout that some are rejected and some are not."""
    inputs = make_inputs(24, 30, dtype=torch.float64, extras=True, drift=drift, seed=seed)
    inputs["mask"][5] = False
    return {k: v for k, v in inputs.items() if k not in ("ref_logprobs", "entropy")}


def of_verl(inputs, **options):
    """The loss with verl's own weights and mask."""
    helper = verl_rollout_corr()
    log_ratio, mask = inputs["old_logprobs"] - inputs["rollout_logprobs"], inputs["mask"].double()
    weights, kept = None, mask
    if options.get("rollout_is"):
        chosen = {k: v for k, v in options.items() if k.startswith("rollout_is")}
        weights = helper.compute_rollout_correction_weights(log_ratio, mask, **chosen)[0]
    if options.get("rollout_rs"):
        chosen = {k: v for k, v in options.items() if k.startswith("rollout_rs")}
        kept = helper.compute_rollout_rejection_mask(log_ratio, mask, **chosen)[0]
    inputs = inputs | {"mask": kept > 0}
    return lambda x: verl_loss("vanilla", inputs | {"logprobs": x["logprobs"]}, "token-mean", weights), kept


VERLS_PRESETS = {name.removeprefix("verl:"): c for name, c in CORRECTIONS.items() if name.startswith("verl:")}


@pytest.mark.parametrize("name", VERLS_PRESETS)
def test_is_verls_preset(name):
    """The arguments are read out of verl's class methods: RolloutCorrectionConfig.<name>()."""
    from policy_peers import verl_presets

    options = verl_presets()[name]
    inputs = drifting(drift=0.02 if "geo" in name else 0.2)
    if "geo" in name:
        inputs["rollout_logprobs"] = (
            inputs["old_logprobs"] + (inputs["rollout_logprobs"] - inputs["old_logprobs"]) / 9
        )
    peer, kept = of_verl(inputs, **options)
    if options.get("rollout_rs"):
        assert 0 < kept.sum() < inputs["mask"].sum()
    check_same(inputs, peer, inputs, correction=f"verl:{name}", loss_type="ppo")


def test_every_preset_of_verl_is_here():
    from policy_peers import verl_presets

    assert {k for k in verl_presets() if k.startswith("decoupled")} == set(VERLS_PRESETS)


@pytest.mark.parametrize("name", [r for r in REJECTIONS if r != "seq_max_k1"])  # verl has all but that one
def test_is_verls_rejection(name):
    inputs = drifting(drift=0.2)
    k, place = name[-2:], name[:-3]
    bound = {"k1": (0.75, 1.6), "k2": 0.03, "k3": 0.03}[k]
    if place == "seq_sum":
        bound = {"k1": (0.4, 3.0), "k2": 0.4, "k3": 0.4}[k]
    if place == "seq_mean" and k == "k1":
        bound = (0.95, 1.04)
    if place == "seq_max":
        bound = 0.08
    text = f"{bound[0]}_{bound[1]}" if k == "k1" else str(bound)
    peer, kept = of_verl(inputs, rollout_rs=name, rollout_rs_threshold=text)
    assert 0 < kept.sum() < inputs["mask"].sum()
    # verl's k1 compares -log r with the logarithms of its bounds, which so hold for 1 / r
    entry = (name, 1 / bound[1], 1 / bound[0]) if k == "k1" else (name, bound)
    check_same(
        inputs, peer, inputs, correction=RolloutCorrection("none", reject=(entry,), denominator="shrink")
    )
    if k == "k1":  # read as its documentation has it, the bounds keep other tokens
        literal = RolloutCorrection("none", reject=((name, *bound),), denominator="shrink")
        kept_by_us = run("reference", inputs, correction=literal)[1][rlkernel.POLICY_METRICS.index("tokens")]
        assert kept_by_us != kept.sum()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_is_verls_batch_normalisation(level):
    inputs = drifting(drift=0.1)
    peer, _ = of_verl(inputs, rollout_is=level, rollout_is_threshold=1.5, rollout_is_batch_normalize=True)
    # verl adds 1e-8 to the number of tokens
    check_same(inputs, peer, inputs, 1e-9, correction=RolloutCorrection(level, high=1.5, normalize=True))


def test_both_of_verls_at_once():
    inputs = drifting(drift=0.1)
    options = {"rollout_is": "token", "rollout_is_threshold": 1.5, "rollout_is_batch_normalize": True}
    peer, _ = of_verl(inputs, **options, rollout_rs="seq_mean_k3,token_k2", rollout_rs_threshold="0.02,0.05")
    correction = RolloutCorrection(
        high=1.5, normalize=True, reject=(("seq_mean_k3", 0.02), ("token_k2", 0.05)), denominator="shrink"
    )
    check_same(inputs, peer, inputs, 1e-9, correction=correction)


def test_gspo_of_trl_and_of_verl_differ_only_in_the_gradient():
    inputs = make_inputs(3, 20, dtype=torch.float64, per_token=True)
    options = {"epsilon": 0.9, "loss_agg_mode": "seq-mean-token-mean"}
    a = run("reference", inputs, importance_sampling_level="sequence", **options)
    b = run("reference", inputs, importance_sampling_level="sequence_token", **options)
    assert error(a[0], b[0]) < 1e-15 and error(a[2], b[2]) > 1e-4


LIGER = TRL  # its loss types are TRL's


@WEIGHTED
@pytest.mark.parametrize(
    ("liger", "level"),
    [(x, "token") for x in LIGER] + [(x, "sequence") for x in LIGER if x not in ("cispo", "sapo", "vespo")],
)
def test_is_ligers(liger, level, weighted):
    """In fp32, from hidden states: Liger computes the log-probabilities itself."""
    loss_type, mode = LIGER[liger]
    g = torch.Generator().manual_seed(1)
    batch, length, size, vocab = 4, 9, 8, 17
    hidden, weight = (torch.randn(*s, generator=g) for s in ((batch, length, size), (vocab, size)))
    ids = torch.randint(vocab, (batch, length), generator=g)
    mask = torch.rand(batch, length, generator=g) < 0.8
    mask[:, 0] = True
    hidden.requires_grad_()
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(-1, ids[..., None])[..., 0]
    old, ref, rollout = (logprobs.detach() + 0.3 * torch.randn(batch, length, generator=g) for _ in range(3))
    advantages = torch.randn(batch, generator=g)
    ratio = ((old - rollout) * mask).exp().clamp(max=1.3) if weighted else None
    high = 1.1 if liger == "cispo" else 0.28
    for extra, beta in itertools.product(({}, {"delta": 1.5}), (0.0, 0.2)):
        theirs = liger_loss(
            hidden, weight, ids, mask, advantages, old, ref, ratio, loss_type=liger, beta=beta,
            epsilon_high=high, importance_sampling_level=level, max_completion_length=length, **extra,
        )  # fmt: skip
        ours = rlkernel.policy_loss(
            logprobs, old, advantages, mask, loss_type=loss_type, loss_agg_mode=mode, epsilon_high=high,
            importance_sampling_level=level, beta=beta, ref_logprobs=ref if beta else None,
            rollout_logprobs=rollout if weighted else None,
            correction=RolloutCorrection(high=1.3) if weighted else None,
            num_items_in_batch=None if mode == "token-mean" else batch, **extra,
        ).loss  # fmt: skip
        want, got = (torch.autograd.grad(x, hidden, retain_graph=True)[0] for x in (theirs, ours))
        if liger == "luspo" and (level == "token" or beta or weighted):
            # Liger multiplies each token's loss by the sequence's length and takes the mean over [B, L]
            assert not torch.allclose(theirs, ours, rtol=1e-3)
            continue
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got, want, rtol=2e-5, atol=1e-6)


def test_the_names_of_the_presets_are_documented():
    documented = inspect.getdoc(RolloutCorrection)
    for name in CORRECTIONS:
        short = name.rpartition(":")[2]
        assert short in documented or name.startswith("verl:"), name


def test_needs_covers_what_a_default_cannot():
    assert set(NEEDS) <= set(names.LOSS_TYPES)
