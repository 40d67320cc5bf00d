"""What TRL's functions of hidden states and lm_heads have in common: their dtypes, and ZeRO-3."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations.trl.contract import FLOATS


def unsupported(**tensors: Tensor) -> str | None:
    """Why a call with these tensors is left to TRL, or None."""
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            return f"{name} is {tensor.dtype}"
    return None


def in_hidden_dtype(*heads: tuple[Tensor, Tensor]) -> contextlib.AbstractContextManager[Any]:
    """TRL computes in autocast's dtype, else in hidden's; rlkernel in the wider of hidden's and weight's.

    Naming the dtype through autocast spares a converted copy of the head and keeps the head's gradient in its
    dtype.  It is one dtype for all heads of a call (``named_dtypes``).
    """
    dtypes = named_dtypes(*heads)
    if not dtypes:
        return contextlib.nullcontext()
    (dtype,) = dtypes
    return torch.autocast(heads[0][0].device.type, dtype=dtype)


def named_dtypes(*heads: tuple[Tensor, Tensor]) -> set[torch.dtype]:
    """The dtypes that a call must be told of its hidden states and weights: none, where it knows them."""
    if torch.is_autocast_enabled(heads[0][0].device.type):
        return set()
    if all(hidden.dtype.itemsize >= weight.dtype.itemsize for hidden, weight in heads):
        return set()
    return {hidden.dtype for hidden, _ in heads}


@contextlib.contextmanager
def gathered_again(utils: ModuleType, *head: Tensor | None) -> Iterator[None]:
    """Under ZeRO-3, backward finds the head gathered as forward did.

    TRL's fused head gathers the partitioned parameters around forward only, and their memory is gone when
    backward runs. What the op saves of them is replaced by a request to gather them again.
    """
    partitioned = {p.data_ptr(): p for p in head if p is not None and hasattr(p, "ds_status")}
    if not partitioned:
        yield
        return

    def pack(saved: Tensor) -> Tensor | tuple[Tensor]:
        parameter = partitioned.get(saved.data_ptr())
        return saved if parameter is None or parameter.shape != saved.shape else (parameter,)

    def unpack(packed: Tensor | tuple[Tensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with utils.maybe_gather_lm_head_ctx(packed[0]):
            return packed[0].data  # keeps the memory for this backward when the parameter lets go of it

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
