"""Calls of ``whiten``, and of it with the states of ``running_normalize``."""

import torch

from rlkernel.calls.whiten import WhitenCall
from rlkernel.triton_ops import whiten


def cases():
    x, mask = torch.zeros(100), torch.ones(100, dtype=torch.bool)
    states = torch.zeros(2, 3, dtype=torch.float64)
    plain = WhitenCall(x, None, None, True, True, 1e-8, "variance")
    return {
        "plain": lambda: whiten.forward(plain),
        "mask weights std": lambda: whiten.forward(WhitenCall(x, mask, x, False, False, 1e-4, "std")),
        "of fp64": lambda: whiten.forward(plain._replace(x=x.double(), mask=mask, weights=x)),
        "running": lambda: whiten.scaled(plain._replace(mask=mask), states, states[0], clip=5.0),
    }
