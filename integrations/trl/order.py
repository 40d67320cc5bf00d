"""The order of the samples of a generation: groups stay together."""

from __future__ import annotations

import torch
from torch import Tensor


class Order:
    """An order that is known before TRL draws it: old logprobs are scored in the micro-batches to come."""

    def __init__(self) -> None:
        self._planned: Tensor | None = None

    def plan(self, prompts: Tensor) -> Tensor:
        """What the next shuffle of these samples will do. Draws no random number that TRL would miss."""
        device = torch.get_default_device()
        if device.type == "cpu":
            state = torch.get_rng_state()
        else:
            state = torch.get_device_module(device).get_rng_state(device)
        draw = torch.Generator(device)
        draw.set_state(state)
        self._planned = by_groups(drawn(len(prompts), draw), prompts)
        return self._planned

    def forget(self) -> None:
        """A step that broke off between its plan and its shuffle leaves a plan, of samples that are gone."""
        self._planned = None

    def take(self, samples: int) -> Tensor | None:
        """The plan, once, if it is one of so many samples."""
        planned, self._planned = self._planned, None
        return planned if planned is not None and len(planned) == samples else None


def drawn(samples: int, generator: torch.Generator | None = None) -> Tensor:
    """As TRL's shuffle draws it: on torch's default device, from the random numbers of that one."""
    device = torch.get_default_device()
    return torch.randperm(samples, generator=generator, device=device).cpu()


def by_groups(permutation: Tensor, prompts: Tensor) -> Tensor:
    """``permutation`` with the rows of each group, neighbours with one prompt, put where its first one is."""
    new = torch.ones(len(prompts), dtype=torch.bool, device="cpu")
    new[1:] = (prompts[1:] != prompts[:-1]).any(1).cpu()
    group = (new.cumsum(0) - 1)[permutation]
    first = torch.full((int(new.sum()),), len(prompts), device="cpu").scatter_reduce(
        0, group, torch.arange(len(prompts), device="cpu"), "amin"
    )
    return permutation[first[group].argsort(stable=True)]
