"""The support of a filtered rollout, as ``logprob`` takes it: checked and normalised."""

import torch
from torch import Tensor

from rlkernel.drivers.linear_logprob_support import row_of
from rlkernel.ops import _validate
from rlkernel.runtime import debug


def checked(
    support_ids: Tensor | None, support_offsets: Tensor | None, rows: int, vocab: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    """``support_ids`` as int32 and ``support_offsets`` as int64, neither read; None where there are none.

    Offsets come out within the ids, and ids of 64 bits next to the vocabulary where they were outside it, so
    that nothing a caller can hand over makes a kernel read elsewhere.
    """
    if support_ids is None and support_offsets is None:
        return None
    both = {"support_ids": support_ids, "support_offsets": support_offsets}
    for (name, given), other in zip(both.items(), reversed(both), strict=True):
        if given is None:
            raise ValueError(f"{name} must be given together with {other}, got None")
        _validate.is_tensor(name, given)
        if given.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {_validate.name(given.dtype)}")
        _validate.same_device(name, given, "target_ids", device)
    assert support_ids is not None and support_offsets is not None
    if support_ids.dim() != 1:
        raise ValueError(f"support_ids must be one-dimensional, got shape {tuple(support_ids.shape)}")
    if support_offsets.shape != (rows + 1,):
        want = f"({rows + 1},), one more than there are rows"
        raise ValueError(f"support_offsets must have shape {want}, got {tuple(support_offsets.shape)}")
    _values(support_ids, support_offsets, vocab)
    if support_ids.dtype == torch.int64:
        support_ids = support_ids.clamp(-1, vocab).to(torch.int32)
    offsets = support_offsets.to(torch.int64).clamp(0, support_ids.shape[0])
    return support_ids.contiguous(), offsets.contiguous()


def _values(ids: Tensor, offsets: Tensor, vocab: int) -> None:
    """Looks at the values themselves: on a CPU, and on a GPU in debug mode; at duplicates in debug mode."""
    if not debug.may_read(ids):
        return
    first, last = int(offsets[0]), int(offsets[-1])
    if first < 0 or last > len(ids):
        want = f"lie in [0, {len(ids)}], the length of support_ids"
        raise ValueError(f"support_offsets must {want}, got {first} to {last}")
    _validate.rising("support_offsets", offsets)
    used = ids[first:last]
    if not len(used):
        return
    low, high = used.aminmax()
    if low < 0 or high >= vocab:
        i = int(((used < 0) | (used >= vocab)).nonzero()[0])
        raise ValueError(f"support_ids[{first + i}] = {used[i].item()} is outside [0, {vocab})")
    if debug.enabled():
        rows = row_of(offsets, len(ids))[first:last]
        keys, order = (rows * vocab + used).sort(stable=True)
        twice = (keys[1:] == keys[:-1]).nonzero()
        if len(twice):
            i = int(order[int(twice[0]) + 1])
            raise ValueError(
                f"support_ids[{first + i}] = {used[i].item()} must be in its row's support once, got it twice"
            )
