"""Which tokens would repeat something, by the tokens so far: a list of ids for each row.

All of it is tensors of the history's length and of no values that a GPU would have to be asked for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.ops.sampling.token_bias import TokenBias

LONGEST = 50  # tokens of a repetition that DRY looks at: more do not make a token less likely than never


class Dry(NamedTuple):
    """DRY ("don't repeat yourself"): a token that would continue a repetition becomes less likely.

    Equal to, for a token that stood behind an earlier copy of the last n tokens (the longest such n, at most
    50), ``z = z - multiplier * base ** (n - allowed_length)`` where ``n >= allowed_length``.  No copy reaches
    over a token of ``breakers``, and these are never made less likely.  ``last_n``: so many tokens count, 0
    for all.  ``multiplier`` >= 0 (0: off), ``base`` >= 1 and ``allowed_length`` >= 1 are numbers or [B].

    Follows the processor of text-generation-webui, where it is from; llama.cpp has the same with breakers
    that are strings.

    Examples:
        >>> penalties = rlkernel.Penalties(torch.tensor([[1, 2, 0, 1, 2]]), dry=rlkernel.Dry(multiplier=4.0))
        >>> rlkernel.sample(torch.tensor([[3.0, 2.0, 0.0]]), temperature=0.0, penalties=penalties).token_ids
        tensor([1])
    """

    multiplier: float | Tensor
    base: float | Tensor = 1.75
    allowed_length: int | Tensor = 2
    breakers: Sequence[int] | Tensor = ()
    last_n: int = 0


def history(prompt: Tensor | None, output: Tensor, vocab: int) -> Tensor:
    """[B, L]: the tokens of prompt and output one after another at the right end, -1 in front of them."""
    ids = output.long() if prompt is None else torch.cat([prompt.long(), output.long()], -1)
    inside = (ids >= 0) & (ids < vocab)
    order = inside.to(torch.int32).argsort(dim=-1, stable=True)
    return torch.where(inside, ids, -1).gather(1, order)


def copied(ids: Tensor, longest: int, breakers: Tensor | None = None) -> Tensor:
    """For each place of the history [B, L], how many tokens before it are the last ones of the row, at most
    ``longest``."""
    size = ids.shape[1]
    usable = ids >= 0
    if breakers is not None:
        usable = usable & ~torch.isin(ids, breakers)
    lengths, alive = torch.zeros_like(ids), torch.ones_like(usable)
    for i in range(min(longest, size - 1)):
        last = size - 1 - i
        same = (ids[:, :last] == ids[:, last:][:, :1]) & usable[:, last:][:, :1]
        alive = alive & torch.nn.functional.pad(same, (i + 1, 0))
        lengths = lengths + alive
    return lengths


def ends_of_ngrams(ids: Tensor, n: int) -> Tensor:
    """[B, L]: the tokens that would complete n tokens which the history [B, L] holds; -1 for the others."""
    return torch.where(copied(ids, n - 1) == n - 1, ids, -1)


def ends_of_words(ids: Tensor, words: Tensor) -> Tensor:
    """[B, W]: the last tokens of those ``words`` ([W, n] or [B, W, n], -1 in front) that the history has come
    up to; -1 for the others."""
    rows, size = ids.shape
    words = words.expand(rows, -1, -1)
    met = words[..., -1] >= 0
    for i in range(words.shape[-1] - 1):
        part = words[..., -2 - i]
        here = ids[:, size - 1 - i, None] if i < size else torch.full_like(part, -1)
        met = met & ((part < 0) | (part == here))
    return torch.where(met, words[..., -1], -1)


def dry_bias(ids: Tensor, dry: Dry) -> TokenBias:
    if dry.last_n:
        ids = ids[:, -dry.last_n :]
    breakers = torch.as_tensor(dry.breakers, dtype=torch.int64, device=ids.device)
    lengths = copied(ids, LONGEST, breakers)

    def column(x: float | Tensor) -> Tensor:
        dtype = x.dtype if isinstance(x, Tensor) else torch.float32
        return torch.as_tensor(x, dtype=dtype, device=ids.device).double().reshape(-1, 1)

    multiplier, beyond = column(dry.multiplier), lengths - column(dry.allowed_length)
    hit = (lengths > 0) & (beyond >= 0) & (multiplier > 0) & (ids >= 0) & ~torch.isin(ids, breakers)
    penalty = multiplier * column(dry.base) ** beyond
    return TokenBias(torch.where(hit, ids, -1), torch.where(hit, -penalty, 0.0))
