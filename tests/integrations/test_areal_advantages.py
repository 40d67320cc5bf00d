"""The advantages of AReaL's PPO, of which rlkernel walks over the tokens, beside AReaL's own."""

import copy
import random as python_random
import types

import host_work
import pytest
import torch
from areal_cases import actor, check_left_to_areal, load, nothing_left_behind, upstream
from doors import alike

import rlkernel
from rlkernel.integrations.areal import advantages

assert nothing_left_behind and upstream  # fixtures of every test here
cli_args, data_module = load("areal.api.cli_args"), load("areal.utils.data")

NAME = "PPOActor._compute_advantages"


def ppo(**options):
    """AReaL's actor, which asks its engine for nothing here."""
    config = cli_args.PPOActorConfig(experiment_name="e", trial_name="t", **options)
    return actor.PPOActor(config, types.SimpleNamespace())


def batch(seed=0, rows=5, tokens=11, values=True, reference=True, holes=True):
    """Samples of several lengths, one as long as the batch and one of one token, with holes where a tool
    spoke."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    lengths[0], lengths[-1] = tokens, 1 if rows > 1 else tokens
    there = torch.arange(tokens) < lengths[:, None]
    prompts = torch.randint(0, tokens // 2 + 1, (rows, 1), generator=g)
    kept = there & (torch.arange(tokens) >= prompts)
    if holes:
        kept &= torch.rand(rows, tokens, generator=g) > 0.25
    data = {
        "input_ids": torch.randint(3, 90, (rows, tokens), generator=g),
        "attention_mask": there,
        "loss_mask": kept,
        "logprobs": -torch.rand(rows, tokens, generator=g),
        "prox_logp": -torch.rand(rows, tokens, generator=g),
        "rewards": torch.randn(rows, generator=g),
    }
    if values:
        data["values"] = torch.randn(rows, tokens, generator=g)
    if reference:
        data["ref_logp"] = -torch.rand(rows, tokens, generator=g)
    return data


def compare(given, **options):
    """All that the method leaves in the batch; the walk in fp64 is the truth."""
    stock = ppo(**options)._compute_advantages(copy.deepcopy(given))
    with rlkernel.patch_areal(["advantages"]) as patch:
        asked = copy.deepcopy(given)
        got = ppo(**options)._compute_advantages(asked)
        assert patch.calls == {NAME: 1} and not patch.fallbacks, patch.fallbacks
    assert got is asked and list(got) == list(stock)
    for name, value in stock.items():
        if name in ("advantages", "returns"):
            assert got[name].dtype == value.dtype and got[name].shape == value.shape
            scale = max(1.0, value.abs().max().item())
            torch.testing.assert_close(got[name] / scale, value / scale, rtol=2e-6, atol=2e-6)
        else:
            assert alike(got[name], value), name
    return got, stock


NORM = {"mean_level": "batch", "std_level": "batch"}
OPTIONS = {
    "plain": {},
    "gamma": {"discount": 0.9, "gae_lambda": 0.8, "kl_ctl": 0.3},
    "no lambda": {"discount": 0.7, "gae_lambda": 0.0},
    "no gamma": {"discount": 0.0, "gae_lambda": 0.5},
    "unended": {"mask_no_eos_with_zero": True, "discount": 0.95},
    "recomputed": {"use_decoupled_loss": False, "recompute_logprob": True, "kl_ctl": 0.2},
    "of the rollout": {"use_decoupled_loss": False, "recompute_logprob": False},
    "k3": {"kl_estimator": "k3", "kl_ctl": 0.5},
    "overlong": {
        "overlong_reward_penalty": True, "overlong_tokens": 3, "overlong_penalty_factor": 1.5,
        "max_new_tokens": 8,
    },
}  # fmt: skip


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_advantages_are_areals(name, normed):
    norm = {"adv_norm": cli_args.NormConfig(**NORM)} if normed else {}
    got, _ = compare(batch(), **OPTIONS[name], **norm)
    assert got["advantages"].any()


def test_any_options_together():
    """Drawn at random."""
    draw = python_random.Random(3)
    for seed in range(60):
        norms = [
            None,
            cli_args.NormConfig(**NORM),
            cli_args.NormConfig(mean_level="group", std_level="group", group_size=2),
        ]
        options = {
            "discount": draw.choice([0.0, 0.5, 0.99, 1.0]), "gae_lambda": draw.choice([0.0, 0.95, 1.0]),
            "kl_ctl": draw.choice([0.0, 0.1]), "mask_no_eos_with_zero": draw.random() < 0.5,
            "reward_scaling": draw.choice([1.0, 3.0]), "reward_bias": draw.choice([0.0, -0.5]),
            "reward_clip": draw.choice([0.5, 20.0]), "kl_estimator": draw.choice(["k1", "k2", "k3"]),
            "use_decoupled_loss": draw.random() < 0.5, "recompute_logprob": draw.random() < 0.5,
            "adv_norm": draw.choice(norms), "reward_norm": draw.choice(norms),
        }  # fmt: skip
        given = batch(
            seed, draw.choice([2, 4, 6]), draw.choice([2, 3, 17, 60]), values=draw.random() < 0.7,
            reference=draw.random() < 0.5, holes=draw.random() < 0.6,
        )  # fmt: skip
        given["loss_mask"] = given["loss_mask"].to(draw.choice([torch.bool, torch.int64, torch.float32]))
        compare(given, **options)


def exact(given, gamma, lam):
    """Of the rewards and the mask that AReaL's method makes."""
    rewards, mask, values = (given[name].double() for name in ("tot_rewards", "loss_mask", "values"))
    out = torch.zeros_like(rewards)
    for i, ended in enumerate(given["attention_mask"].sum(-1) < rewards.shape[1]):
        following, carried = 0.0 if ended else values[i, -1].item(), 0.0
        for t in reversed(range(rewards.shape[1] - 1)):
            if mask[i, t]:
                carried = rewards[i, t] + gamma * following - values[i, t] + gamma * lam * carried
                following = values[i, t]
            out[i, t] = carried
    return out


def test_a_long_walk_is_as_exact_as_doubles():
    given = batch(2, 3, 4000)
    got, stock = compare(given, discount=1.0, gae_lambda=0.99)
    truth = exact(got, 1.0, 0.99)
    ours, theirs = ((x["advantages"].double() - truth).abs().max() for x in (got, stock))
    assert ours <= 2e-6 * truth.abs().max() and ours <= 2 * theirs, (ours, theirs)


def test_nothing_counts():
    given = batch()
    given["loss_mask"] = torch.zeros_like(given["loss_mask"])
    got, _ = compare(given, adv_norm=cli_args.NormConfig(**NORM))
    assert not got["advantages"].any()


def test_what_the_mask_leaves_out_is_not_read():
    """AReaL multiplies it with 0, and of NaN that is NaN everywhere before."""
    given = batch(holes=False, reference=False)
    given["values"][:, 0] = float("nan")
    prompt = torch.zeros(11, dtype=torch.bool)
    prompt[:3] = True
    given["loss_mask"] &= ~prompt
    given["values"][0, 1] = float("nan")
    stock = ppo()._compute_advantages(copy.deepcopy(given))
    with rlkernel.patch_areal(["advantages"]):
        got = ppo()._compute_advantages(copy.deepcopy(given))
    kept = got["loss_mask"] != 0
    assert got["advantages"][kept].isfinite().all() and kept.any()
    assert stock["advantages"].isnan().any() and got["advantages"].isfinite().all()


def test_the_walk_over_the_tokens_is_no_python():
    """AReaL's own method is called, but must have no token to walk over."""
    actor = ppo()

    def more(longer=60):
        """What runs for longer sequences that does not for shorter ones."""
        work = [batch(tokens=tokens) for tokens in (12, 12, 12 + longer)]
        _, short, long = (host_work.events(lambda x=x: actor._compute_advantages(x)) for x in work)
        return long - short

    stock = more()
    with rlkernel.patch_areal(["advantages"]):
        assert more() < 60 < stock


def test_an_error_leaves_the_batch_as_it_was():
    given = batch()
    ids = given["input_ids"]
    options = {"use_decoupled_loss": False, "recompute_logprob": True}
    given["prox_logp"] = None
    with rlkernel.patch_areal(["advantages"]), pytest.raises(ValueError, match="prox_logp is None"):
        ppo(**options)._compute_advantages(given)
    assert given["input_ids"] is ids


def without(name):
    return {key: value for key, value in batch().items() if key != name}


LEFT = {
    "the batch lacks what advantages are made of": lambda: without("loss_mask"),
    "input_ids are not [B, L] with L >= 2": lambda: batch(rows=2, tokens=1),
    "logprobs is torch.float64": lambda: batch() | {"logprobs": batch()["logprobs"].double()},
    "values is torch.bfloat16": lambda: batch() | {"values": batch()["values"].bfloat16()},
    "values has not input_ids' shape and device": lambda: batch() | {"values": torch.zeros(5, 12)},
    "values requires a gradient": lambda: batch() | {"values": torch.zeros(5, 11, requires_grad=True)},
    "loss_mask holds other numbers than 0 and 1": lambda: (
        batch() | {"loss_mask": 0.5 * batch()["loss_mask"]}
    ),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:rlkernel.patch_areal")
@pytest.mark.parametrize("reason", LEFT)
def test_what_is_left_to_areal(reason):
    check_left_to_areal(lambda: ppo()._compute_advantages(LEFT[reason]()), reason)


@pytest.mark.filterwarnings("ignore:rlkernel.patch_areal")
@pytest.mark.parametrize("options", [{"discount": 1.5}, {"gae_lambda": -0.5}], ids=str)
def test_numbers_that_are_left_to_areal(options):
    check_left_to_areal(
        lambda: ppo(**options)._compute_advantages(batch()), "discount and gae_lambda are no numbers"
    )


def test_a_method_with_another_text(monkeypatch):
    from rlkernel.integrations._patch import PatchError
    from rlkernel.integrations.areal import contract

    monkeypatch.setitem(contract.TEXTS, "_compute_advantages", "0" * 64)
    with pytest.raises(PatchError, match="advantages cannot be replaced: .* must have the text of AReaL"):
        rlkernel.patch_areal()
    with rlkernel.patch_areal(strict=False) as patch:
        assert list(patch.refused) == ["advantages"]


MUTANTS = {
    "no bootstrap": ("gae", lambda *x, last_values, **o: rlkernel.gae(*x, **o)),
    "another lambda": ("gae", lambda *x, lam, **o: rlkernel.gae(*x, lam=lam * 0.99, **o)),
    "all tokens": ("gae", lambda r, v, m, **o: rlkernel.gae(r, v, None, **o)),
    "not carried": ("_carried", lambda found, mask: found),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_wrong_one_is_seen(monkeypatch, mutant):
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(advantages, name, wrong)
    with pytest.raises(AssertionError):
        compare(batch(), discount=0.9, gae_lambda=0.8)
