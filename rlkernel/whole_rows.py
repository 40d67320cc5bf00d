"""The rows of ``logprob`` that have no support, with the bits of the sampling op.

A rollout takes an unfiltered row's log-probability from the statistics of its own pass: parts of 4096 tokens,
combined in fp64.  The trainer's twin of such a rollout asks the same backend's kernels for the same numbers.
"""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlkernel import debug
from rlkernel.types import SampleStats, Sampling

Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]
Sample = Callable[[Tensor, Tensor | None, Sampling], SampleStats]


def filled(
    sample: Sample,
    stats: Stats,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    support_offsets: Tensor,
) -> Stats:
    """``stats``, of the rows that have a support, with those of the whole rows from ``sample``."""
    empty = (support_offsets[1:] == support_offsets[:-1]).view(target_ids.shape)
    whole = empty & (target_ids != ignore_index)
    if not whole.numel() or (debug.may_read(whole) and not whole.any()):
        return stats  # a GPU would have to be asked; its kernels leave at once
    entropy = stats[1] is not None
    per_row = temperature if isinstance(temperature, Tensor) else None
    parts: list[Stats] = []
    for index in _loops(logits):
        t = temperature if per_row is None else per_row[index].reshape(-1)
        parts.append(_statistics(sample, logits[index], target_ids[index], t, whole[index], entropy))
    merged = (
        None if old is None else torch.where(whole, torch.cat(new).view(whole.shape), old)
        for old, *new in zip(stats, *parts, strict=True)
    )
    return tuple(merged)  # type: ignore[return-value]


def _statistics(
    sample: Sample, logits: Tensor, target_ids: Tensor, t: float | Tensor, whole: Tensor, entropy: bool
) -> Stats:
    vocab = logits.shape[-1]
    target_ids = target_ids.reshape(-1).contiguous()
    sampling = Sampling(
        temperature=t, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=math.inf, seeds=None, positions=None,
        token_ids=target_ids, token_bitmask=None, skip=~whole.reshape(-1), order="sequential",
        gumbel=False, raw=False, entropy=entropy, rank=False, support=0,
    )  # fmt: skip
    rows = logits.view(-1, vocab) if logits.dim() != 1 else logits[None]
    got = sample(rows, None, sampling)
    inverse = 1 / t.double() if isinstance(t, Tensor) else 1 / t
    lse = (got.row_max.double() * inverse + got.log_sum.double()).to(got.row_max.dtype)
    inside = (target_ids >= 0) & (target_ids < vocab)
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    log_sum = torch.where(inside, got.log_sum, torch.nan)
    return got.tempered_logprobs, got.entropy, lse, got.row_max, log_sum


def _loops(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Indices of leading dimensions below which ``x`` [..., V] is rows at one distance from each other."""
    try:
        x.view(-1, x.shape[-1]) if x.dim() != 1 else None
        yield ()
    except RuntimeError:
        for i in range(x.shape[0]):
            yield from ((i, *rest) for rest in _loops(x[i]))
