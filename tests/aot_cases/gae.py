"""Calls of ``gae``, padded and packed."""

import functools

import torch

from rlkernel.calls.gae import GaeCall
from rlkernel.triton_ops import gae


def cases():
    x, mask = torch.zeros(2, 64), torch.ones(2, 64, dtype=torch.bool)
    offsets = torch.tensor([0, 60, 128])
    flat, last = x.view(-1), x[:, 0].contiguous()
    plain = GaeCall(x, x, None, 1.0, 0.95, None, None, "skip")
    masked = plain._replace(mask=mask)
    calls = {
        "padded": plain,
        "padded mask last": masked._replace(last_values=last),
        "packed mask": GaeCall(flat, flat, mask.view(-1), 1.0, 0.95, offsets, None, "skip"),
        "lams holes": masked._replace(lam=last.double(), holes="zero"),
    }
    return {name: functools.partial(gae.forward, call) for name, call in calls.items()}
