"""The real verl, what rlkernel replaces in it, and inputs for both."""

import numpy as np
import pytest
import torch
from doors import Door, policy_batch, random

import rlkernel
from rlkernel.integrations.verl import contract, switch
from rlkernel.integrations.verl.verl_patch import VerlPatch

NEEDED = "needs verl, which is not installed"
verl = pytest.importorskip("verl", reason=NEEDED, exc_type=ImportError)
core = pytest.importorskip("verl.trainer.ppo.core_algos", reason=NEEDED, exc_type=ImportError)


DOOR = Door(
    rlkernel.patch_verl, VerlPatch, "verl", "verl", contract.SUPPORTED, switch,
    (*switch.OWN, switch.MODULES), (core.POLICY_LOSS_REGISTRY, core.ADV_ESTIMATOR_REGISTRY),
)  # fmt: skip
check_against_verl, check_left_to_verl = DOOR.check_against, DOOR.check_left
upstream, nothing_left_behind = DOOR.fixtures()


def actor_config(**fields):
    from verl.workers.config import ActorConfig

    info = fields.pop("global_batch_info", {})
    policy_loss = fields.pop("policy_loss", {})
    config = ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **fields)
    config.global_batch_info.update(info)
    for name, value in policy_loss.items():
        object.__setattr__(config.policy_loss, name, value)
    return config


def batch(*sizes, **more):
    new, old, _, advantages, mask = policy_batch(*sizes, **more)
    return {"old_log_prob": old, "log_prob": new, "advantages": advantages, "response_mask": mask}


def weights_of(seed, shape):
    return random(seed, *shape, scale=0.5).exp()


def rewards(seed=0, rows=12, tokens=7):
    """Of advantage estimators: a reward at each response's last token, and the names of their groups."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=g)
    mask = (torch.arange(tokens) < lengths[:, None]).float()
    mask[1, 0] = 0.0 if lengths[1] > 1 else 1.0
    token_level = torch.zeros(rows, tokens)
    token_level[torch.arange(rows), lengths - 1] = torch.randn(rows, generator=g) + 1
    names = np.array([f"uid-{i}" for i in (0, 2, 2, 1, 0, 2, 1, 1, 3, 2, 0, 1)][:rows], dtype=object)
    return token_level, mask, names
