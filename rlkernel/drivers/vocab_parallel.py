"""``logprob`` and ``linear_logprob`` of a vocabulary that the ranks of a process group share out.

Each rank computes its own entries with whatever backend runs the whole op.  What a row's softmax needs of a
rank are four numbers, its maximum, the logarithm of its sum, its entropy and the target's value: one gather
brings them to all ranks, and every rank combines them in the order of the ranks, in fp64.  Sums that a
library reduces have no order that one could rely on; so the gradient of the hidden states, which is a sum
over ranks, is exchanged in parts and added up here.

Bytes sent by a rank: forward 16 N; backward ``8 N H (R - 1) / R`` where the hidden states need a gradient,
what an all-reduce in fp32 sends.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.drivers import elementary, rank_tree
from rlkernel.drivers.linear_logprob_fp8 import scale_of_rows
from rlkernel.drivers.rank_tree import gathered as gathered
from rlkernel.runtime import invariance

Call = TypeVar("Call", LogprobCall, LinearLogprobCall)
Results = TypeVar("Results", LogprobResults, LinearLogprobResults)

IGNORED = -1  # the ignored rows of a rank's own call: the caller's index may be an entry of the rank


def group_of(name: Any) -> Any:
    return dist.distributed_c10d._resolve_process_group(name)


def facts(call: LogprobCall | LinearLogprobCall, vocab: int, *more: int) -> list[list[int]]:
    """(vocab_start, entries, rows) and ``more`` of each rank, in their order."""
    assert call.group is not None
    ids = call.target_ids
    own = ids.new_tensor([call.vocab_start, vocab, ids.numel(), *more])
    return gathered(own, group_of(call.group)).tolist()


def forward(impl: Any, call: Call, vocab: int) -> Any:
    """The results of the whole vocabulary, of which ``vocab`` entries are here; the same on every rank."""
    numbers = [_numbers(impl, part, size) for part, size in parts_of(call, vocab)]
    own, columns = numbers[0][0], torch.stack([columns for _, columns in numbers])
    if call.group is not None:
        columns = gathered(columns, group_of(call.group)).flatten(0, 1)
    combined = _combined(columns.double(), call.temperature)
    kept = call.target_ids != call.ignore_index
    for x, value in zip(
        (own.logprobs, own.lse, own.row_max, own.log_sum, own.entropy), combined, strict=False
    ):
        if x is not None:  # in place: the workspace may keep logits for the backward pass of this very tensor
            x.copy_(torch.where(kept, value, 0))
    return own


def parts_of(call: Call, vocab: int) -> Iterator[tuple[Call, int]]:
    """The calls of equal parts of the entries that are here, and their size."""
    if call.parts == 1:
        yield call, vocab
        return
    size = vocab // call.parts
    for first in range(0, vocab, size):
        here = slice(first, first + size)
        part: dict[str, Any]
        if isinstance(call, LogprobCall):
            part = {"logits": call.logits[..., here]}
        else:
            bias = None if call.bias is None else call.bias[here]
            part = {"weight": call.weight[here], "bias": bias, "keep": False}
            if call.weight_scale is not None:
                scale, block = scale_of_rows(call.weight_scale, call.weight_block, first, first + size)
                part |= {"weight_scale": scale, "weight_block": block}
        yield call._replace(**part, vocab_start=call.vocab_start + first, parts=1), size


def _numbers(impl: Any, call: Call, vocab: int) -> tuple[Any, Tensor]:
    """The results of these entries alone, and what of them the whole vocabulary's are made of."""
    ids, mine = call.target_ids, _mine(call, vocab)
    # where another rank has the target any entry will do: what is said of it is not looked at
    own = impl.forward(_own(call, torch.where(mine, ids - call.vocab_start, 0))) if vocab else _nothing(call)
    target = own.logprobs.double() + own.log_sum
    target = torch.where(own.row_max == -torch.inf, -torch.inf, target)
    # entries of NaN and -inf alone have no maximum either
    row_max = torch.where(own.lse.isnan(), torch.nan, own.row_max)
    columns = [row_max, own.log_sum, torch.where(mine, target, torch.nan).to(own.row_max.dtype)]
    if call.return_entropy:
        columns.append(own.entropy)
    return own, torch.stack(columns)


def backward_logits(impl: Any, call: LogprobCall, results: LogprobResults, grads: RowGrads) -> tuple[Tensor]:
    """The gradient of this rank's logits, for which no rank asks another."""
    if call.logits.numel() == 0:
        return (torch.empty_like(call.logits),)
    return impl.backward(_outside(call, call.logits.shape[-1]), results, grads)


def backward_head(
    impl: Any, call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads
) -> LinearGrads:
    """Gradients of this rank's weight and bias, and the hidden states' as a sum over the ranks."""
    if call.parts > 1:
        return _backward_in_parts(impl, call, results, grads)
    assert call.group is not None
    wide = torch.promote_types(call.hidden.dtype, torch.float32)
    # as fp32 states the backend leaves their gradient unrounded; the product's operands stay what they are
    own = _outside(call, call.weight.shape[0])._replace(hidden=call.hidden.to(wide))
    found = impl.backward(own, results, grads) if len(call.weight) else _no_gradient(own)
    if found.hidden is None:
        return found
    whole = summed_in_rank_order(found.hidden, group_of(call.group))
    return found._replace(hidden=whole.to(call.hidden.dtype))


def _backward_in_parts(
    impl: Any, call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads
) -> LinearGrads:
    """The gradient of the hidden states as a tree over the parts of all ranks."""
    wide = torch.promote_types(call.hidden.dtype, torch.float32)
    weights, biases = [], []

    def nodes() -> Iterator[Tensor | None]:
        for part, size in parts_of(call, len(call.weight)):
            own = _outside(part, size)._replace(hidden=call.hidden.to(wide))
            found = impl.backward(own, results, grads)
            weights.append(found.weight)
            biases.append(found.bias)
            yield found.hidden

    node = rank_tree.folded(nodes())
    if node is not None:
        group = None if call.group is None else group_of(call.group)
        node = rank_tree.summed(node, call.hidden.dtype, group)
    whole = [None if None in x else torch.cat(x) for x in (weights, biases)]
    return LinearGrads(node, *whole)


def summed_in_rank_order(x: Tensor, group: Any) -> Tensor:
    """``x[0] + x[1] + ...`` over the ranks, on each of them, for ``x`` [N, H].

    Each rank adds up one part of the rows, and all gather the parts.
    """
    ranks, rows = dist.get_world_size(group), x.shape[0]
    part = -(-rows // ranks)
    if part * ranks != rows:
        x = torch.nn.functional.pad(x, (0, 0, 0, part * ranks - rows))
    received = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(received, x.contiguous(), group=group)
    total, *others = received.view(ranks, part, x.shape[1])
    for other in others:
        total += other
    return gathered(total, group).view(part * ranks, x.shape[1])[:rows]


def _combined(ranks: Tensor, temperature: float | Tensor) -> list[Tensor]:
    """(logprobs, lse, row_max, log_sum[, entropy]) in fp64 of [R, 3 or 4, ...] numbers of the ranks."""
    # the mode refuses torch's, and theirs follow the rows
    exp, log = (elementary.exp, elementary.log) if invariance.is_on() else (torch.exp, torch.log)
    t = temperature.double() if isinstance(temperature, Tensor) else temperature
    tops, log_sums, targets = ranks[:, 0], ranks[:, 1], ranks[:, 2]
    row_max = tops.amax(0)
    # a rank whose entries are all -inf adds nothing to the row
    above = torch.where(tops == -torch.inf, -torch.inf, (tops - row_max) / t)
    shares = torch.where(tops == -torch.inf, -torch.inf, above + log_sums)
    total, target = torch.zeros_like(row_max), torch.full_like(row_max, torch.nan)
    for share, value, a in zip(shares, targets, above, strict=True):
        total += exp(share)
        target = torch.where(value.isnan(), target, value + a)  # NaN where the rank has not the target
    log_sum = log(total)
    out = [target - log_sum, row_max / t + log_sum, row_max]
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    out.append(torch.where(target.isnan(), torch.nan, log_sum))
    if ranks.shape[1] > 3:
        entropy = torch.zeros_like(row_max)
        for share, inside in zip(shares, ranks[:, 3], strict=True):
            log_p = share - log_sum  # of the rank; no term of the sum is negative
            p = exp(log_p)
            entropy += torch.where(p == 0, 0, p * (inside - log_p))
        out.append(entropy)
    return out


def _nothing(call: Call) -> LogprobResults | LinearLogprobResults:
    """What a rank says that has no entry."""
    narrow = call.logits.dtype if isinstance(call, LogprobCall) else call.compute_dtype
    dtype = torch.promote_types(narrow, torch.float32)
    none, *others = (torch.zeros_like(call.target_ids, dtype=dtype) for _ in range(4))
    entropy = torch.zeros_like(none) if call.return_entropy else None
    row_max, lse, log_sum = others
    results = LogprobResults(none, entropy, lse, row_max.fill_(-torch.inf), log_sum)
    return results if isinstance(call, LogprobCall) else LinearLogprobResults.of(results)


def _no_gradient(call: LinearLogprobCall) -> LinearGrads:
    hidden, weight, bias = call.needs
    return LinearGrads(
        torch.zeros_like(call.hidden) if hidden else None,
        torch.empty_like(call.weight) if weight else None,
        torch.empty_like(call.bias) if bias and call.bias is not None else None,
    )


def _mine(call: LogprobCall | LinearLogprobCall, vocab: int) -> Tensor:
    ids = call.target_ids
    inside = (ids >= call.vocab_start) & (ids < call.vocab_start + vocab)
    return inside & (ids != call.ignore_index)


def _own(call: Call, target_ids: Tensor) -> Call:
    """The call of this rank's entries alone."""
    ids = torch.where(call.target_ids != call.ignore_index, target_ids, IGNORED)
    return call._replace(target_ids=ids, ignore_index=IGNORED, group=None, vocab_start=0)


def _outside(call: Call, vocab: int) -> Call:
    """The same for a backward pass: a target that another rank has is none of the entries."""
    return _own(call, torch.where(_mine(call, vocab), call.target_ids - call.vocab_start, vocab))
