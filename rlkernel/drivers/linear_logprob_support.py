"""Products of hidden states with the rows of the lm_head that supports name, and their gradients.

Row r of N multiplies the rows ``ids[offsets[r] : offsets[r + 1]]`` of the weight and no others: ``2 nnz H``
operations where the whole head would take ``2 N V H``.  The rows are gathered in chunks whose memory the
workspace's limit bounds.  Sums of gradients run in the order of the entries: no float atomics.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlkernel import workspace
from rlkernel.drivers import linear_logprob as tiles
from rlkernel.types import Head

CPU_CHUNK = 2 * 2**20  # gathered rows then stay in the caches: five times as fast as at 256 MiB


def row_of(offsets: Tensor, entries: int) -> Tensor:
    """The row of each entry; -1 and the number of rows for those outside all of them.

    Equal to ``repeat_interleave`` of the rows by the lengths between ``offsets``, without a synchronisation.
    """
    places = torch.arange(entries, device=offsets.device)
    return torch.searchsorted(offsets, places, right=True) - 1


def products(hidden: Tensor, weight: Tensor, head: Head, ids: Tensor, offsets: Tensor) -> Tensor:
    """The logits [nnz] at the supports, before the softcap; NaN where an id is outside the vocabulary."""
    vocab, size = weight.shape
    wide = torch.promote_types(head.compute_dtype, torch.float32)
    u = torch.zeros(ids.shape, dtype=wide, device=hidden.device)
    if not hidden.shape[0]:
        return u
    row, inside = row_of(offsets, ids.numel()).clamp(0, hidden.shape[0] - 1), ids.clamp(0, vocab - 1)
    for a, b in _chunks(ids[: _used(offsets, ids)], size, wide):
        w = _gather(weight, inside[a:b], head.compute_dtype, wide)
        u[a:b] = w.mul_(_gather(hidden, row[a:b], head.compute_dtype, wide)).sum(-1)
    if wide == torch.float32:
        u = u.to(head.logits_dtype).to(wide)
    if head.bias is not None:
        u = u + head.bias.to(wide)[inside]
    return torch.where(ids == inside, u * head.logit_scale, torch.nan)


def capped(u: Tensor, head: Head) -> Tensor:
    return u if head.softcap is None else head.softcap * torch.tanh(u / head.softcap)


def gradients(
    grad: Tensor,
    u: Tensor,
    hidden: Tensor,
    weight: Tensor,
    head: Head,
    ids: Tensor,
    offsets: Tensor,
    dhidden: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
) -> None:
    """Add to the gradients of hidden, weight and bias what ``grad`` [nnz], of the capped logits, gives."""
    if not hidden.shape[0] or not ids.numel():
        return
    used = _used(offsets, ids)
    grad, u, ids = grad[:used], u[:used], ids[:used]
    if head.softcap is not None:
        grad = torch.where(grad == 0, 0, grad * torch.cosh(u / head.softcap) ** -2)
    grad = grad * head.logit_scale
    row, ids = row_of(offsets, ids.numel()).clamp(0, hidden.shape[0] - 1), ids.clamp(0, weight.shape[0] - 1)
    if dhidden is not None:
        add_products(dhidden, row, grad, weight, ids, head.compute_dtype)
    if dweight is None and dbias is None:
        return
    ids, order = ids.sort(stable=True)
    grad, row = grad[order], row[order]
    if dweight is not None:
        add_products(dweight, ids, grad, hidden, row, head.compute_dtype)
    if dbias is not None:
        ones = grad.new_ones(1, 1)
        add_products(dbias[:, None], ids, grad, ones, torch.zeros_like(ids), grad.dtype)


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

    Their number is data: reading it synchronises a GPU, as the choice of rows does in ``tiles``.  Under
    capture the room behind them is multiplied too.
    """
    return ids.numel() if tiles.capturing(ids.device) else int(offsets[-1])


def _chunks(entries: Tensor, size: int, wide: torch.dtype) -> Iterator[tuple[int, int]]:
    """As many entries as the workspace's limit has room for: two gathered rows and a conversion each."""
    room = workspace.limit() if entries.device.type != "cpu" else min(workspace.limit(), CPU_CHUNK)
    step = max(1, room // (3 * wide.itemsize * size + 64))
    for a in range(0, entries.numel(), step):
        yield a, min(a + step, entries.numel())


def _gather(source: Tensor, index: Tensor, dtype: torch.dtype, wide: torch.dtype) -> Tensor:
    """A copy of these rows, rounded to ``dtype``, in ``wide``."""
    return source.index_select(0, index).to(dtype).to(wide)
