"""Steps of PPO and GRPO by OpenRLHF's own trainers, stock and patched; and steps on ranks of ZeRO."""

import copy
import sys
import types
from types import SimpleNamespace

import pytest
import ranks
import tiny
import torch
import zero_engines
from doors import random
from openrlhf_actors import VOCAB, actor, samples
from openrlhf_cases import MODULES, installed, losses, makers, nothing_left_behind, upstream, utils

import rlkernel

assert nothing_left_behind and upstream  # fixtures of every test here

Experience = MODULES["trainer.ppo_utils.experience"].Experience
ActorTrainer = MODULES["trainer.ray.ppo_actor"].ActorPPOTrainer
CriticTrainer = MODULES["trainer.ray.ppo_critic"].CriticPPOTrainer


@pytest.fixture(autouse=True)
def eager():
    """OpenRLHF compiles its entropy."""
    with torch.compiler.set_stance("force_eager"):
        yield


class Critic(torch.nn.Module):
    """A value for each action, as OpenRLHF's critic returns it."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(VOCAB, 1)

    def forward(self, sequences, action_mask, attention_mask, return_output=False, **_):
        values = self.table(sequences)[..., 0][:, :-1][:, -action_mask.shape[1] :] * action_mask
        return (values, SimpleNamespace()) if return_output else values


def arguments(estimator, kl_loss, entropy):
    return SimpleNamespace(
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                estimator=estimator, gamma=1.0, lambd=0.95, no_std_norm=False, is_correction_level="token"
            ),
            kl=SimpleNamespace(use_loss=kl_loss, init_coef=0.01, estimator="k2", unbiased_gradient=False),
        ),
        actor=SimpleNamespace(entropy_coef=entropy, aux_loss_coef=0.0),
        rollout=SimpleNamespace(n_samples_per_prompt=4, max_new_tokens=9),
        reward=SimpleNamespace(clip_range=None), data=SimpleNamespace(max_len=13),
        train=SimpleNamespace(dynamic_batch_enable=False),
    )  # fmt: skip


class Strategy:
    """What of OpenRLHF's strategy a step asks for."""

    ring_attn_group = None

    def __init__(self, args):
        self.args = args

    def backward(self, loss, model, optimizer):
        optimizer.zero_grad()
        loss.backward()

    def optimizer_step(self, optimizer, model, scheduler, name="model"):
        optimizer.step()

    def get_grad_norm(self, model):
        return torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm().item()


def trained(kind, estimator, packed=False, kl_loss=True, entropy=0.01, steps=2):
    """The metrics of some steps, and the parameters behind them."""
    torch.manual_seed(0)
    strategy = Strategy(arguments(estimator, kl_loss, entropy))
    models = SimpleNamespace(actor=actor(0.9, packed), reference=actor(0.9, packed), critic=Critic())
    with torch.no_grad():
        models.actor.model.lm_head.weight.add_(random(1, VOCAB, 32, scale=0.1))
    made = {}
    for name, trainer in (("actor", ActorTrainer), ("critic", CriticTrainer)):
        model = getattr(models, name)
        made[name] = object.__new__(trainer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = SimpleNamespace(get_last_lr=lambda: [0.5])
        vars(made[name]).update(
            strategy=strategy, args=strategy.args, aux_loss=False, replay_buffer=None, ema_model=None,
            **{name: model, f"{name}_optim": optimizer, f"{name}_scheduler": scheduler},
        )  # fmt: skip
    made["actor"].actor_loss_fn = losses.PolicyLoss(0.2, 0.28, is_correction_level="token", **kind)
    made["critic"].critic_loss_fn = losses.ValueLoss(0.2)
    maker = object.__new__(makers.RemoteExperienceMaker)
    maker.strategy, maker.advantage_estimator = strategy, estimator
    maker.kl_ctl = SimpleNamespace(value=0.01)
    found = []
    for step in range(steps):
        given = samples(step, rows=8)
        with torch.no_grad():
            old, base = models.actor(**given), models.reference(**given)
            values = models.critic(given["sequences"], given["action_mask"], given["attention_mask"])
        mask = given["action_mask"]
        kl = utils.compute_approx_kl(old, base, kl_estimator="k1") if not kl_loss else torch.zeros_like(old)
        experience = Experience(
            **given, index=list(range(8)), rewards=random(40 + step, 8), action_log_probs=old,
            base_action_log_probs=base, values=values, kl=kl,
            rollout_log_probs=old + random(50 + step, *old.shape, scale=0.3) * mask,
        )  # fmt: skip
        (experience,) = maker.compute_advantages_and_returns([experience])
        info = {"dp_size": 1, "batch_num_tokens": mask.sum().float(), "global_batch_size": torch.tensor(7.0)}
        metrics = made["actor"].training_step(experience, 0.01, step, info)["metrics"]
        metrics |= made["critic"].training_step(experience, step, info)
        found.append({name: torch.as_tensor(x).float().detach() for name, x in metrics.items()})
    both = torch.nn.ModuleDict({name: x for name, x in vars(models).items() if name != "reference"})
    return found, {name: p.detach() for name, p in both.named_parameters()}


PATHS = {
    "ppo": ({"dual_clip": 3.0}, "gae", {"kl_loss": False, "entropy": None}),
    "grpo": ({}, "group_norm", {}),
    "gspo": ({"policy_loss_type": "gspo"}, "group_norm", {"entropy": 0.0}),
    "rloo": ({"token_level_loss": False}, "rloo", {"kl_loss": False}),
    "reinforce": ({}, "reinforce_baseline", {"kl_loss": False, "entropy": None}),
}


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("path", PATHS)
def test_steps_are_openrlhfs(path, packed):
    kind, estimator, options = PATHS[path]
    stock, before = trained(kind, estimator, packed, **options)
    with rlkernel.patch_openrlhf() as patch:
        got, after = trained(kind, estimator, packed, **options)
        assert not patch.fallbacks, patch.fallbacks
        assert patch.calls["Actor.forward"] == 6 and patch.calls["PolicyLoss.forward"] == 2
        assert patch.calls["ValueLoss.forward"] == patch.calls["compute_reward"] == 2
        walk = "get_advantages_and_returns" if estimator == "gae" else "get_cumulative_returns"
        assert patch.calls[f"RemoteExperienceMaker.{walk}"] == 2
    assert [x.keys() for x in got] == [x.keys() for x in stock] and ("entropy_loss" in got[0]) == (
        options.get("entropy", 0.01) is not None
    )
    torch.testing.assert_close(got, stock, rtol=2e-4, atol=2e-6)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=2e-6)
    start = actor(0.9, packed).model.model.embed_tokens.weight
    assert (after["actor.model.model.embed_tokens.weight"] - start).abs().max() > 1e-4


# ranks


def job(rank, kind):
    """A step of an actor in an engine of ZeRO, stock and patched: the loss, and the weights behind it."""
    from torch.distributed import group

    packing = MODULES["models.ring_attn_utils"]
    ring = kind.endswith("ring")
    if ring:
        sys.modules["ring_flash_attn"] = types.SimpleNamespace(update_ring_flash_attn_params=lambda *_: None)
        packing.set_ring_attn_group(group.WORLD)
    found = []
    for patched in (False, True):
        made = actor(0.8, packed=ring, model=zero_engines.engine(kind.removesuffix("-ring")))
        given = samples(7 if ring else 7 + rank, rows=4)
        with torch.compiler.set_stance("force_eager"):
            with installed():
                patch = rlkernel.patch_openrlhf(["fused_head", "losses"]) if patched else None
            more = {"ring_attn_group": group.WORLD} if ring else {}
            old = made(**given, **more).detach()
            logprobs, output = made(**given, **more, return_entropy=True, return_output=True)
            places = random(3, *old.shape)
            loss, *_ = losses.PolicyLoss()(logprobs, old, places, given["action_mask"])
            loss = loss - 0.1 * (output.entropy[:, -old.shape[1] :] * given["action_mask"]).mean()
            made.model.backward(loss)
            made.model.step()
            if patch is not None:
                assert patch.calls["Actor.forward"] == 2 and not patch.fallbacks, patch.fallbacks
                assert max(made.model.widths) == 1, "no logits"
                patch.undo()
        found.append((loss.detach(), old, zero_engines.weights(made.model)))
    return found


@pytest.mark.slow
def test_ranks_of_zero_and_of_a_ring(tmp_path):
    kinds = ["zero2", "zero3", "zero3-tied", "zero3-ring"]
    for kind, of_ranks in ranks.run(job, kinds, tmp_path).items():
        for stock, got in of_ranks:
            torch.testing.assert_close(
                got, stock, rtol=1e-4, atol=2e-6, msg=lambda text, kind=kind: f"{kind}: {text}"
            )


def test_a_reference_is_not_trained():
    """And nothing of its graph is kept."""
    made, given = actor(), samples()
    before = copy.deepcopy(made.state_dict())
    with rlkernel.patch_openrlhf(), torch.no_grad():
        assert not made(**given).requires_grad
    torch.testing.assert_close(made.state_dict(), before, rtol=0, atol=0)
    assert "forward" not in vars(made.model.lm_head) and tiny.PAD == 0
