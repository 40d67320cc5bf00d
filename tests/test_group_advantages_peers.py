"""group_advantages against the functions of verl, all of them, of SkyRL and OpenRLHF, and TRL's formulas."""

import collections
import itertools
import logging
import sys
from types import SimpleNamespace

import pytest
import torch
from backends import of, running
from peer_sources import load

import rlkernel
from rlkernel.benchmarks import _peers
from rlkernel.reference.group_advantages import make_inputs

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("group_advantages"))


def run(backend, device, rewards, **options):
    """On the device; the functions that it is compared with run on a CPU."""
    there = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    with running(backend):
        return rlkernel.group_advantages(rewards.to(device), **there).cpu()


@pytest.fixture(scope="module")
def verl():
    try:
        return _peers.verl_core_algos()
    except ImportError as reason:
        pytest.skip(f"verl: {reason}")


def for_verl(n, tokens=6):
    """Scores as verl has them: a reward at the last token of responses of several lengths."""
    g = torch.Generator().manual_seed(n)
    r = torch.randn(n, generator=g) + 1
    lengths = torch.randint(1, tokens + 1, (n,), generator=g)
    mask = (torch.arange(tokens) < lengths[:, None]).float()
    scores = torch.zeros(n, tokens)
    scores[torch.arange(n), lengths - 1] = r
    ids = torch.tensor([0, 2, 2, 1, 0, 2, 1, 1, 3, 2, 0, 1])
    return r, lengths, mask, scores, ids


VERL = {"eps": 1e-6, "singletons": "reward"}


@pytest.mark.parametrize(
    "function, options",
    [
        ("compute_grpo_outcome_advantage", {"estimator": "grpo"}),
        ("compute_grpo_vectorized_outcome_advantage", {"estimator": "grpo"}),
        ("compute_grpo_outcome_advantage", {"estimator": "dr_grpo"}),
        ("compute_rloo_outcome_advantage", {"estimator": "rloo"}),
        ("compute_rloo_vectorized_outcome_advantage", {"estimator": "rloo", "singletons": "zero"}),
        ("compute_opo_outcome_advantage", {"estimator": "opo"}),
        (
            "compute_reinforce_plus_plus_baseline_outcome_advantage",
            {"estimator": "reinforce_plus_plus_baseline"},
        ),
        ("compute_gdpo_outcome_advantage", {"estimator": "gdpo"}),
    ],
)
@ON_EVERY_BACKEND
def test_verl_says_the_same(backend, device, verl, function, options):
    r, lengths, mask, scores, ids = for_verl(12)
    more = {"norm_adv_by_std_in_grpo": False} if options["estimator"] == "dr_grpo" else {}
    expected, _ = getattr(verl, function)(scores, mask, ids.numpy(), **more)
    whitens = options["estimator"] in ("gdpo", "reinforce_plus_plus_baseline")
    extra = {"lengths": lengths} if whitens or options["estimator"] == "opo" else {}
    if options["estimator"] == "gdpo":
        extra["reward_weights"], r = torch.ones(1), r[:, None]
    ours = run(backend, device, r, group_ids=ids, **(VERL | options), **extra)
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=1e-6, atol=1e-6)


@ON_EVERY_BACKEND
def test_verl_says_the_same_of_passk_and_remax(backend, device, verl):
    r, _, mask, scores, ids = for_verl(12)
    ids[8] = 0  # verl refuses groups of one
    for scaled in (True, False):
        config = {"norm_adv_by_std_in_grpo": scaled}
        expected, _ = verl.compute_grpo_passk_outcome_advantage(scores, mask, ids.numpy(), config=config)
        scale = "group" if scaled else "none"
        ours = run(backend, device, r, group_ids=ids, estimator="grpo_passk", scale_rewards=scale, eps=1e-6)
        torch.testing.assert_close(ours[:, None] * mask, expected, rtol=1e-6, atol=1e-6)
    baselines = torch.rand(12)
    expected, _ = verl.compute_remax_outcome_advantage(scores, baselines, mask)
    ours = run(backend, device, r, estimator="remax", baselines=baselines)
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=1e-6, atol=1e-6)


def trl_nanstd(x, **dims):
    count = (~x.isnan()).sum(**dims)
    mean = x.nanmean(**dims, keepdim=True) if dims else x.nanmean()
    return ((x - mean).square().nansum(**dims) / (count - 1)).sqrt()


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@ON_EVERY_BACKEND
def test_trl_says_the_same(backend, device, scale):
    """GRPOTrainer's own sequence, with rewards that no function gave (NaN there, a mask here)."""
    r = make_inputs(5, 4, seed=3)["rewards"]
    r[1, 2], r[3, 0] = torch.nan, torch.nan
    std = trl_nanstd(r, dim=1)[:, None] if scale == "group" else trl_nanstd(r)
    expected = r - r.nanmean(1, keepdim=True)
    expected = (expected if scale == "none" else expected / (std + 1e-4)).nan_to_num(nan=0.0)
    ours = run(backend, device, r, mask=~r.isnan(), scale_rewards=scale)
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    others = (r.nansum(1, keepdim=True) - r) / ((~r.isnan()).sum(1, keepdim=True) - 1)
    rloo = run(backend, device, r, mask=~r.isnan(), estimator="rloo")
    torch.testing.assert_close(rloo, (r - others).nan_to_num(nan=0.0), rtol=1e-4, atol=1e-5)


@ON_EVERY_BACKEND
def test_trls_gdpo_says_the_same(backend, device):
    """multi_objective_aggregation="normalize_then_sum"."""
    r = torch.stack([make_inputs(5, 4, seed=s)["rewards"] for s in (1, 2, 3)], -1)
    r[0, 1], r[2, 2, 0], r[4, 3, 1] = torch.nan, torch.nan, torch.nan
    weights = torch.tensor([1.0, 0.5, 2.0])
    each = (r - r.nanmean(1, keepdim=True)) / (trl_nanstd(r, dim=1)[:, None] + 1e-4)
    total = torch.where(r.isnan().all(-1), torch.nan, (each * weights).nansum(-1))
    expected = ((total - total.nanmean()) / (trl_nanstd(total) + 1e-4)).nan_to_num(nan=0.0)
    ours = run(backend, device, r, mask=~r.isnan(), reward_weights=weights, estimator="gdpo", batch_eps=1e-4,
               batch_eps_in="std")  # fmt: skip
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@ON_EVERY_BACKEND
def test_verls_gpg_is_dr_grpo_times_a_number(backend, device, verl):
    """verl scales by the share of responses with a reward, a number of the batch: the docs' recipe."""
    r, _, mask, scores, ids = for_verl(12)
    r[[2, 5]] = 0
    scores = torch.zeros_like(scores).scatter(1, (mask.sum(1, keepdim=True) - 1).long(), r[:, None])
    expected, _ = verl.compute_gpg_outcome_advantage(scores, mask, ids.numpy())
    ours = run(backend, device, r, group_ids=ids, estimator="dr_grpo", singletons="reward")
    ours = ours * (len(r) / r.count_nonzero().clamp(min=1))
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero_tail", [True, False])
@ON_EVERY_BACKEND
def test_verls_optimal_token_baseline_is_opo_at_every_timestep(backend, device, verl, zero_tail):
    """A group is a prompt at a timestep, and the lengths are the cumulative path variances: the recipe."""
    _, _, mask, scores, ids = for_verl(12)
    g = torch.Generator().manual_seed(8)
    logprobs = -torch.rand(mask.shape, generator=g)
    squared = torch.rand(mask.shape, generator=g)
    expected, returns = verl.compute_optimal_token_baseline_advantage(
        scores, mask, ids.numpy(), logprobs, squared, handle_zero_tail=zero_tail
    )
    weights = ((1 - 2 * logprobs.exp() + squared) * mask).cumsum(1)
    steps = mask.shape[1]
    ours = run(
        backend, device, returns.flatten(), group_ids=(ids[:, None] * steps + torch.arange(steps)).flatten(),
        estimator="opo", lengths=weights.flatten(), mask=mask.flatten(), singletons="reward",
    ).view(mask.shape)  # fmt: skip
    if not zero_tail:  # a group of one at a timestep has no baseline here; verl's is its own return
        counts = torch.stack([mask[ids == i].sum(0) for i in ids]) * mask
        alone = (counts == 1) & (torch.stack([(ids == i).sum() for i in ids]) > 1)[:, None]
        ours, expected = (torch.where(alone, 0, x) for x in (ours, expected))
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=2e-6)


def skyrl(name):
    path = "skyrl/backends/skyrl_train/utils"
    tools = vars(load("skyrl", f"{path}/torch_utils.py", "masked_mean"))
    tools |= {"defaultdict": collections.defaultdict}
    return getattr(load("skyrl", f"{path}/ppo_utils.py", name, "masked_whiten", "masked_var", **tools), name)


@pytest.mark.parametrize(
    ("function", "options"),
    [
        ("compute_grpo_outcome_advantage", {"eps": 1e-6, "singletons": "reward"}),
        ("compute_rloo_outcome_advantage", {"estimator": "rloo"}),
        ("compute_maxrl_advantage", {"estimator": "maxrl", "eps": 1e-6, "singletons": "reward"}),
    ],
)
def test_skyrl_says_the_same(function, options, monkeypatch):
    monkeypatch.setitem(sys.modules, "loguru", SimpleNamespace(logger=logging.getLogger("loguru")))
    r, _, mask, scores, ids = for_verl(12)
    expected, _ = skyrl(function)(scores.clone(), mask, ids.numpy())
    ours = rlkernel.group_advantages(r, group_ids=ids, **options)
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=1e-6, atol=1e-6)
    if "singletons" in options:  # without it a group of one has 0
        plain = rlkernel.group_advantages(r, group_ids=ids, **options | {"singletons": "zero"})
        assert (plain != ours).sum() == 1


def test_skyrls_reinforce_plus_plus_says_the_same():
    """With gamma: its returns are those of gae without values, its advantages whiten them."""
    _, _, mask, scores, _ = for_verl(12)
    advantages, returns = skyrl("compute_reinforce_plus_plus_outcome_advantage")(scores, mask, 0.9)
    ours = rlkernel.gae(scores, torch.zeros_like(scores), mask, gamma=0.9, lam=1.0).returns
    torch.testing.assert_close(ours, returns * mask)
    torch.testing.assert_close(rlkernel.whiten(ours, mask), advantages, rtol=1e-5, atol=1e-6)
    # without a discount it is the estimator, in which each response counts as often as it has tokens
    advantages, _ = skyrl("compute_reinforce_plus_plus_outcome_advantage")(scores, mask, 1.0)
    ours = rlkernel.group_advantages(
        scores.sum(1), estimator="reinforce_plus_plus", lengths=mask.sum(1), unbiased=True
    )
    torch.testing.assert_close(ours[:, None] * mask, advantages, rtol=1e-5, atol=1e-6)


OPENRLHF = {
    "rloo": {"estimator": "rloo"},
    "dr_grpo": {"estimator": "dr_grpo"},
    "group_norm": {"estimator": "grpo", "eps": 1e-9},
    "reinforce_baseline": {"estimator": "reinforce_plus_plus_baseline", "unbiased": False},
    "reinforce": {"estimator": "reinforce_plus_plus", "unbiased": False},
    "flash_reinforce": {"estimator": "dr_grpo", "group_size": 12},  # the batch is one group
}


@pytest.mark.parametrize("estimator", OPENRLHF)
def test_openrlhf_says_the_same(estimator):
    """RemoteExperienceMaker's own method, on a batch of two experiences."""
    r, lengths, mask, _, _ = for_verl(12)
    tools = load("openrlhf", "openrlhf/models/utils.py", "compute_reward", "masked_mean")
    maker = load(
        "openrlhf", "openrlhf/trainer/ppo_utils/experience_maker.py", "RemoteExperienceMaker",
        itertools=itertools, apply_length_penalties=lambda *_: None, **vars(tools),
    ).RemoteExperienceMaker  # fmt: skip
    advantage = SimpleNamespace(estimator=estimator, gamma=1.0, lambd=1.0, no_std_norm=False)
    args = SimpleNamespace(
        rollout=SimpleNamespace(n_samples_per_prompt=4), reward=SimpleNamespace(clip_range=None),
        algo=SimpleNamespace(advantage=advantage),
    )  # fmt: skip
    experiences = [
        SimpleNamespace(
            index=list(range(a, a + 6)), rewards=r[a : a + 6], info={}, kl=torch.zeros(6, mask.shape[1]),
            action_mask=mask[a : a + 6],
        )
        for a in (0, 6)
    ]  # fmt: skip
    self = SimpleNamespace(
        strategy=SimpleNamespace(args=args), kl_ctl=SimpleNamespace(value=0.0), advantage_estimator=estimator
    )
    self.get_cumulative_returns = lambda *x: maker.get_cumulative_returns(None, *x)
    maker.compute_advantages_and_returns(self, experiences)
    expected = torch.cat([e.advantages for e in experiences]) * mask
    options = {"group_size": 4} | OPENRLHF[estimator]
    options |= {"lengths": lengths} if estimator.startswith("reinforce") else {}
    ours = rlkernel.group_advantages(r, **options)
    torch.testing.assert_close(ours[:, None] * mask, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("leave_one_out", [True, False])
@pytest.mark.parametrize("normalize", [True, False])
@ON_EVERY_BACKEND
def test_nemo_rl_says_the_same(backend, device, normalize, leave_one_out):
    """Its recipes' estimator, on groups of 1, 2 and more; three of a group agree, so one has no deviation."""
    path = "nemo_rl/algorithms"
    baseline = load("nemo-rl", f"{path}/utils.py", "calculate_baseline_and_std_per_prompt")
    kind = load("nemo-rl", f"{path}/advantage_estimator.py", "GRPOAdvantageEstimator", **vars(baseline))
    config = SimpleNamespace(use_leave_one_out_baseline=leave_one_out, normalize_rewards=normalize)
    ids = torch.tensor([0, 2, 2, 1, 0, 2, 1, 1, 3, 2, 0, 1, 4, 4])
    r = torch.randn(14, generator=torch.Generator().manual_seed(4))
    r[ids == 0] = torch.tensor([0.25, 0.25, 1.0])
    r[ids == 2] = torch.tensor([1.0, 0.0, 0.0, 0.0])
    theirs = kind.GRPOAdvantageEstimator(config, None)
    expected = theirs.compute_advantage(ids[:, None], r, torch.ones(14, 1))[:, 0]
    names = {
        (True, True): "grpo_loo",
        (False, True): "rloo",
        (True, False): "grpo",
        (False, False): "dr_grpo",
    }
    ours = run(backend, device, r, group_ids=ids, estimator=names[normalize, leave_one_out], eps=1e-6)
    # it takes the mean of squares less the square of the mean
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    if normalize and leave_one_out:
        assert ours[1] == 1 and ours[8] == 0 and ours[12] == -ours[13]
