"""Tokens of prompts and completions as a forest, each shared token once: what a PrefixBatch is made from."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rlkernel.prefix.layout import path_of, ranges


@dataclass(frozen=True, eq=False)
class Tree:
    """Token nodes, parents first; sample n is what stands from a root down to node ``ends[n]``."""

    tokens: Tensor  # int64 [sum(lengths)] on the CPU, the nodes one after another
    lengths: tuple[int, ...]
    parents: tuple[int, ...]
    completion: tuple[bool, ...]
    ends: tuple[int, ...]
    # Per sample those of its completion nodes whose tokens are predicted for it, and each token has its place
    # in the whole sequence; None: all of them, and each token has its place in the completion.
    labelled: tuple[tuple[int, ...], ...] | None = None

    @cached_property
    def starts(self) -> list[int]:
        """Where each node's tokens begin, and where the last one's end."""
        return [0, *itertools.accumulate(self.lengths)]

    @staticmethod
    def of(
        nodes: Sequence[Tensor],
        parents: Sequence[int],
        completion: Sequence[bool],
        ends: Sequence[int],
        labelled: tuple[tuple[int, ...], ...] | None = None,
    ) -> Tree:
        tokens = torch.cat([torch.zeros(0, dtype=torch.int64, device="cpu"), *nodes])
        return Tree(tokens, tuple(map(len, nodes)), tuple(parents), tuple(completion), tuple(ends), labelled)

    def path(self, sample: int) -> list[int]:
        """The nodes of a sample, from its root down."""
        return path_of(self.parents, self.ends[sample])

    def predicted(self, sample: int) -> list[int]:
        """The nodes of a sample whose tokens are predicted for it."""
        if self.labelled is not None:
            return list(self.labelled[sample])
        return [i for i in self.path(sample) if self.completion[i]]

    def select(self, samples: Sequence[int]) -> Tree:
        wanted = [self.ends[n] for n in samples]
        kept = sorted(self.ancestry(wanted))
        place = {i: k for k, i in enumerate(kept)} | {-1: -1}
        labelled = self.labelled
        if labelled is not None:
            labelled = tuple(tuple(place[i] for i in labelled[n]) for n in samples)
        return Tree(
            self.tokens[ranges([(self.starts[i], self.starts[i + 1]) for i in kept])],
            tuple(self.lengths[i] for i in kept),
            tuple(place[self.parents[i]] for i in kept),
            tuple(self.completion[i] for i in kept),
            tuple(place[i] for i in wanted),
            labelled,
        )

    def ancestry(self, nodes: Sequence[int]) -> set[int]:
        """These nodes, -1 aside, and all above them."""
        found: set[int] = set()
        for i in nodes:
            while i >= 0 and i not in found:
                found.add(i)
                i = self.parents[i]
        return found


def listed(argument: str, values: Any) -> list[Any]:
    try:
        return list(values)
    except TypeError as error:
        raise ValueError(f"{argument} must be a list, got {values!r:.80}") from error


def on_host(argument: str, what: str, values: Any) -> Tensor:
    try:
        return values.detach().cpu() if isinstance(values, Tensor) else torch.tensor(values, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{argument} must be a list of {what}, got {values!r:.80}") from error


def tokens_of(argument: str, ids: Any) -> Tensor:
    tokens = on_host(argument, "token ids", ids)
    if not tokens.numel() and tokens.dim() == 1:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"{argument} must be a list of token ids, got {ids!r:.80}")
    return tokens.to(torch.int64)


def padded(name: str, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    for argument, tensor in ((f"{name}_ids", ids), (f"{name}_mask", mask)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{argument} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 2:
            raise ValueError(f"{argument} must have 2 dimensions (samples, tokens), got {tensor.dim()}")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"{name}_ids must be integers, got {str(ids.dtype).removeprefix('torch.')}")
    if mask.shape != ids.shape:
        raise ValueError(
            f"{name}_mask must have {name}_ids' shape {tuple(ids.shape)}, got {tuple(mask.shape)}"
        )
    ids, mask = ids.detach().cpu().to(torch.int64), mask.detach().cpu() != 0
    edges = (mask[:, 1:] & ~mask[:, :-1]).sum(1) + (mask[:, :1].sum(1) if mask.shape[1] else 0)
    if bool((edges > 1).any()):
        row = int((edges > 1).nonzero()[0])
        raise ValueError(f"{name}_mask[{row}] must have its tokens side by side, got a gap")
    return ids, mask


def same_prompt(ids: Tensor, mask: Tensor) -> list[int]:
    """A number per row, equal where the prompts are."""
    n, width = ids.shape
    if not n or not width:
        return [0] * n
    # left-aligned, so that the side of the padding does not matter
    shift = mask.int().argmax(1)
    columns = torch.arange(width, device="cpu")
    length = mask.sum(1)
    aligned = ids.gather(1, (columns + shift[:, None]).clamp_max(width - 1))
    aligned = aligned.masked_fill(columns >= length[:, None], -1)
    keyed = torch.cat([length[:, None], aligned], 1)
    return torch.unique(keyed, dim=0, return_inverse=True)[1].tolist()
