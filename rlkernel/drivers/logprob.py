"""The rows of ``logprob`` that have no support, with the bits of the sampling op.

A rollout takes an unfiltered row's log-probability from the statistics of its own pass: parts of 4096 tokens,
combined in fp64.  The trainer's twin of such a rollout asks the same backend's kernels for the same numbers.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults
from rlkernel.calls.sampling import SampleStats, Sampling, SamplingCall
from rlkernel.runtime import debug

Sample = Callable[[SamplingCall], SampleStats]


def unfiltered_ids(call: LogprobCall) -> Tensor:
    """The target ids, with ``ignore_index`` for the rows that have a support."""
    assert call.support_offsets is not None
    supported = (call.support_offsets[1:] > call.support_offsets[:-1]).view(call.target_ids.shape)
    return torch.where(supported, call.ignore_index, call.target_ids)


def with_unfiltered_rows(sample: Sample, results: LogprobResults, call: LogprobCall) -> LogprobResults:
    """``results``, of the rows that have a support, with those of the others from ``sample``."""
    assert call.support_offsets is not None
    empty = (call.support_offsets[1:] == call.support_offsets[:-1]).view(call.target_ids.shape)
    wanted = empty & (call.target_ids != call.ignore_index)
    if not wanted.numel() or (debug.may_read(wanted) and not wanted.any()):
        return results  # a GPU would have to be asked; its kernels leave at once
    parts = [_statistics(sample, call, index, wanted[index]) for index in _loops(call.logits)]
    merged = (
        None if old is None else torch.where(wanted, torch.cat(new).view(wanted.shape), old)
        for old, *new in zip(results[:5], *(part[:5] for part in parts), strict=True)
    )
    return results._replace(**dict(zip(results._fields, merged, strict=False)))  # type: ignore[arg-type]


def _statistics(sample: Sample, call: LogprobCall, index: tuple[int, ...], wanted: Tensor) -> LogprobResults:
    """Of the rows below ``index``, flat."""
    logits, vocab = call.logits[index], call.logits.shape[-1]
    target_ids = call.target_ids[index].reshape(-1).contiguous()
    t = call.temperature[index].reshape(-1) if isinstance(call.temperature, Tensor) else call.temperature
    skip = ~wanted.reshape(-1)
    request = Sampling(t, token_ids=target_ids, skip=skip, entropy=call.return_entropy, softmax=True)
    rows = logits.view(-1, vocab) if logits.dim() != 1 else logits[None]
    got = sample(SamplingCall(rows, None, request))
    assert got.row_max is not None and got.log_sum is not None
    inverse = 1 / t.double() if isinstance(t, Tensor) else 1 / t
    lse = (got.row_max.double() * inverse + got.log_sum.double()).to(got.row_max.dtype)
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    log_sum = torch.where((target_ids >= 0) & (target_ids < vocab), got.log_sum, torch.nan)
    return LogprobResults(got.tempered_logprobs, got.entropy, lse, got.row_max, log_sum)


def _loops(x: Tensor) -> Iterator[tuple[int, ...]]:
    """Indices of leading dimensions below which ``x`` [..., V] is rows at one distance from each other."""
    try:
        x.view(-1, x.shape[-1]) if x.dim() != 1 else None
        yield ()
    except RuntimeError:
        for i in range(x.shape[0]):
            yield from ((i, *rest) for rest in _loops(x[i]))
