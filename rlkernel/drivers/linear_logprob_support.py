"""Products of hidden states with the rows of the lm_head that supports name, and their gradients.

Row r of N multiplies the rows ``ids[offsets[r] : offsets[r + 1]]`` of the weight and no others: ``2 nnz H``
operations where the whole head would take ``2 N V H``.  The rows are gathered in chunks whose memory the
workspace's limit bounds.  Sums of gradients run in the order of the entries: no float atomics.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import LinearGrads, LinearLogprobCall, LinearLogprobResults
from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.drivers.logprob import unfiltered_ids
from rlkernel.runtime import gpu, invariance, workspace

CPU_CHUNK = 2 * 2**20  # gathered rows then stay in the caches: five times as fast as at 256 MiB


def row_of(offsets: Tensor, entries: int) -> Tensor:
    """The row of each entry; -1 and the number of rows for those outside all of them.

    Equal to ``repeat_interleave`` of the rows by the lengths between ``offsets``, without a synchronisation.
    """
    places = torch.arange(entries, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True) - 1


def forward(impl: Any, rows: Any, call: LinearLogprobCall) -> LinearLogprobResults:
    """``impl`` of ``linear_logprob`` takes the rows without a support, ``rows`` of ``logprob`` the others."""
    of_whole = impl.forward(call._replace(target_ids=unfiltered_ids(_row_call(call, call.hidden))))
    products = _products(call)
    filtered = rows.forward(_row_call(call, _capped(products, call)))
    assert call.support_offsets is not None
    supported = call.support_offsets.diff() > 0
    supported &= call.target_ids != call.ignore_index
    merged = {}
    for name in ("logprobs", "entropy", "lse", "row_max", "log_sum"):
        whole, other = getattr(of_whole, name), getattr(filtered, name)
        # each is 0 in the rows of the other; in place, because log_sum owns what the workspace keeps
        merged[name] = None if whole is None else torch.where(supported, other, whole, out=whole)
    return of_whole._replace(**merged, products=products)


def backward(
    impl: Any, rows: Any, call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads
) -> LinearGrads:
    assert call.support_offsets is not None and results.products is not None
    supported = call.support_offsets.diff() > 0
    others = RowGrads(*(None if g is None else torch.where(supported, 0, g) for g in grads))
    values = _capped(results.products, call)
    row_call = _row_call(call, values)
    found = impl.backward(call._replace(target_ids=unfiltered_ids(row_call)), results, others)
    stats = results.logprobs, results.entropy, results.row_max, results.row_max, results.log_sum, values
    (grad,) = rows.backward(row_call, LogprobResults(*stats), grads)
    _add_gradients(found, grad, results.products, call)
    return found


def _row_call(call: LinearLogprobCall, logits: Tensor) -> LogprobCall:
    """``logprob`` of the logits at the supports."""
    return LogprobCall(
        logits, call.target_ids, call.temperature, call.ignore_index, call.return_entropy,
        support_ids=call.support_ids, support_offsets=call.support_offsets, gathered=True,
    )  # fmt: skip


def _products(call: LinearLogprobCall) -> Tensor:
    """The logits [nnz] at the supports, before the softcap; NaN where an id is outside the vocabulary."""
    hidden, weight, ids, offsets = call.hidden, call.weight, call.support_ids, call.support_offsets
    assert ids is not None and offsets is not None
    vocab, size = weight.shape
    wide = torch.promote_types(call.compute_dtype, torch.float32)
    u = torch.zeros(ids.shape, dtype=wide, device=hidden.device)
    own = call.compute_dtype if call.logits_dtype == call.compute_dtype else wide
    if not hidden.shape[0]:
        return u
    row, inside = row_of(offsets, ids.numel()).clamp(0, hidden.shape[0] - 1), ids.clamp(0, vocab - 1)
    for a, b in _chunks(ids[: _used(offsets, ids)], size, wide):
        w = _gather(weight, inside[a:b], call.compute_dtype, wide)
        h = _gather(hidden, row[a:b], call.compute_dtype, wide)
        if invariance.is_on():  # one row by one column, which has the bits of the whole head
            u[a:b] = torch.bmm(w[:, None].to(own), h[:, :, None].to(own))[:, 0, 0]
        else:
            u[a:b] = w.mul_(h).sum(-1)
    if wide == torch.float32:
        u = u.to(call.logits_dtype).to(wide)
    if call.bias is not None:
        u = u + call.bias.to(wide)[inside]
    return torch.where(ids == inside, u * call.logit_scale, torch.nan)


def _capped(u: Tensor, call: LinearLogprobCall) -> Tensor:
    return u if call.softcap is None else call.softcap * torch.tanh(u / call.softcap)


def _add_gradients(out: LinearGrads, grad: Tensor, u: Tensor, call: LinearLogprobCall) -> None:
    """Add to the gradients of hidden, weight and bias what ``grad`` [nnz], of the capped logits, gives."""
    hidden, weight, ids, offsets = call.hidden, call.weight, call.support_ids, call.support_offsets
    assert ids is not None and offsets is not None
    used = _used(offsets, ids)
    if not hidden.shape[0] or not used:
        return
    grad, u, ids = grad[:used], u[:used], ids[:used]
    if call.softcap is not None:
        grad = torch.where(grad == 0, 0, grad * torch.cosh(u / call.softcap) ** -2)
    grad = grad * call.logit_scale
    row, ids = row_of(offsets, ids.numel()).clamp(0, hidden.shape[0] - 1), ids.clamp(0, weight.shape[0] - 1)
    if out.hidden is not None:
        add_products(out.hidden, row, grad, weight, ids, call.compute_dtype)
    if out.weight is None and out.bias is None:
        return
    ids, order = ids.sort(stable=True)
    grad, row = grad[order], row[order]
    if out.weight is not None:
        add_products(out.weight, ids, grad, hidden, row, call.compute_dtype)
    if out.bias is not None:
        ones = grad.new_ones(1, 1)
        add_products(out.bias[:, None], ids, grad, ones, torch.zeros_like(ids), grad.dtype)


def add_products(
    out: Tensor,
    keys: Tensor,
    grad: Tensor,
    source: Tensor,
    index: Tensor,
    dtype: torch.dtype,
    ordered: bool | None = None,
) -> None:
    """``out[keys[k]] += grad[k] * source[index[k]]`` over all k; ``keys`` ascend.

    The terms of one key are summed in their order in the dtype of ``grad``, and their sum is rounded to
    ``out``'s once: what a chunk leaves of its last key goes over to the next.  ``ordered``: sums by
    ``segment_reduce``, as a GPU needs them, whose ``index_add_`` has atomics; None: by the device.
    """
    ordered = keys.device.type != "cpu" if ordered is None else ordered
    carry, carry_key = grad.new_zeros(1, out.shape[1]), keys[:1]
    for a, b in _chunks(keys, out.shape[1], grad.dtype):
        g, key = grad[a:b, None], keys[a:b]
        terms = _gather(source, index[a:b], dtype, grad.dtype).mul_(g).masked_fill_(g == 0, 0)  # no 0 * NaN
        begins = torch.cat([key.new_zeros(1), (key[1:] != key[:-1]).to(key.dtype)])
        place = begins.cumsum(0)
        last = place[-1:]
        if ordered:  # as many sums as terms: how many keys there are is not known here
            bounds = torch.searchsorted(place, torch.arange(b - a + 1, device=place.device))
            sums = torch.segment_reduce(terms, "sum", offsets=bounds, axis=0, unsafe=True)
        else:
            sums = terms.new_zeros(int(last) + 1, terms.shape[1]).index_add_(0, place, terms)
        key_of = key.new_zeros(b - a).scatter_(0, place, key)[: len(sums)]
        same = carry_key == key[:1]
        sums[:1] += torch.where(same, carry, 0)
        out.index_add_(0, carry_key, torch.where(same, 0, carry).to(out.dtype))
        carry, carry_key = sums.index_select(0, last), key[-1:]
        # each key is here once, and beside them zeros for key 0: no order of these additions changes a bit
        out.index_add_(0, key_of, sums.index_fill_(0, last, 0).to(out.dtype))
    out.index_add_(0, carry_key, carry.to(out.dtype))


def _used(offsets: Tensor, ids: Tensor) -> int:
    """How many ids there are: ``sample`` returns them in a buffer with room for the largest supports.

    Their number is data: reading it synchronises a GPU.  Where the host may not wait the room behind them is
    multiplied too.
    """
    return int(offsets[-1]) if gpu.may_wait(ids.device) else ids.numel()


def _chunks(entries: Tensor, size: int, wide: torch.dtype) -> Iterator[tuple[int, int]]:
    """As many entries as the workspace's limit has room for: two gathered rows and a conversion each."""
    room = workspace.limit(entries.device)
    room = room if entries.device.type != "cpu" else min(room, CPU_CHUNK)
    step = max(1, room // (3 * wide.itemsize * size + 64))
    for a in range(0, entries.numel(), step):
        yield a, min(a + step, entries.numel())


def _gather(source: Tensor, index: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """A copy of these rows, rounded to ``dtype``, in ``wide``."""
    return source.index_select(0, index).to(dtype).to(wide)
