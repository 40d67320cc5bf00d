"""Sums in which several values are added to one place: in the order of their indices.

torch's CPU kernels add numbers of fp32 from all threads at once, each when it comes, as the backward pass of
``bias[expert]`` does.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_flag = threading.Lock()  # torch's is one for the whole process


@contextmanager
def _one_by_one() -> Iterator[None]:
    with _flag:
        if torch.are_deterministic_algorithms_enabled():
            yield
            return
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        # another thread's operation that has no such order goes on as it was
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False, warn_only=warns)


def _index_put(
    original: Callable[..., Tensor],
    x: Tensor,
    indices: list[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Tensor:
    if not accumulate or not x.is_floating_point():
        return original(x, indices, values, accumulate, unsafe)
    with _one_by_one():
        return original(x, indices, values, accumulate, unsafe)


def _put(
    original: Callable[..., Tensor], x: Tensor, index: Tensor, source: Tensor, accumulate: bool = False
) -> Tensor:
    if not accumulate or not x.is_floating_point():
        return original(x, index, source, accumulate)
    with _one_by_one():
        return original(x, index, source, accumulate)


SERVED: dict[str, Callable[..., Any]] = {"_index_put_impl_": _index_put, "put_": _put}
