"""Calls of ``kl_shaped_rewards`` with a reward per token and per sequence, padded and packed."""

import functools

import torch

from rlkernel.calls.kl_shaped_rewards import KlShapedRewardsCall
from rlkernel.triton_ops import kl_shaped_rewards


def cases():
    x, mask = torch.zeros(2, 64), torch.ones(2, 64, dtype=torch.bool)
    flat, offsets = x.view(-1), torch.tensor([0, 60, 128])
    per_token = KlShapedRewardsCall(x, x, x, None, 0.1, "k1", 20.0, 10.0, False, None)
    packed = KlShapedRewardsCall(flat, flat, flat, mask.view(-1), 0.1, "k2", 20.0, 10.0, False, offsets)
    first = x[:, 0].contiguous()
    calls = {
        "k1 per token": per_token,
        "k3 per sequence": per_token._replace(rewards=first, mask=mask, kl_estimator="k3", per_sequence=True),
        "k2 packed": packed,
        "k3 packed per sequence": packed._replace(rewards=flat[:2], kl_estimator="k3", per_sequence=True),
    }
    return {name: functools.partial(kl_shaped_rewards.forward, call) for name, call in calls.items()}
