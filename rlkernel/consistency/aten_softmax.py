"""Softmax over the last dimension, and its logarithm: on a CPU a kernel of ours, whose bits no processor
changes; elsewhere torch's, which is checked.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel import native
from rlkernel.consistency.aten_call import Refused, Short, is_exact, need_floats, used
from rlkernel.consistency.aten_checked import checked

HIDDEN = -3e4  # what masks add to a score; fp16 holds -65504


def _softmax(name: str) -> Callable[..., Tensor]:
    def run(
        original: Callable[..., Tensor], x: Tensor, dim: int, half_to_float: bool, **kwargs: Any
    ) -> Tensor:
        if is_exact(x) or not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
            return original(x, dim, half_to_float, **kwargs)  # an error
        need_floats(x)
        if x.dim() and dim % x.dim() != x.dim() - 1:
            raise Refused(f"it must be over the last dimension, got dim {dim} of {x.dim()}")
        if _is_attention(x, name):
            raise Refused(
                "attention that hides keys by large negative scores sums over them too, in an order that "
                "padding moves: use scaled_dot_product_attention, or rlkernel's attention by register_hf()"
            )
        kernels = native.kernels_for(x.device)
        if x.numel() and not kwargs and not isinstance(kernels, str) and kernels.part == "cpu":
            used.backend = "native"
            dense = x.contiguous()
            out = torch.empty_like(dense, dtype=torch.float32 if half_to_float else x.dtype)
            rows = (dense.view(1), out.view(1)) if x.dim() == 0 else (dense, out)
            kernels.softmax(x=rows[0], logarithm=name == "_log_softmax", out=rows[1])
            return out
        of_rows = functools.partial(_of_rows, original, half_to_float)
        checked(name, of_rows, x, x.shape[-1] if x.dim() else 1)
        return original(x, dim, half_to_float, **kwargs)

    return run


def _is_attention(x: Tensor, name: str) -> bool:
    """[B, H, T, Tk] with hidden keys, or [B * H, T, Tk] whose rows show keys that follow each other: filtered
    logits [B, T, V] show scattered ones, and losses are of their logarithm.
    """
    if x.dim() < 3 or (x.dim() == 3 and name != "_softmax"):
        return False
    hidden = x <= HIDDEN
    if x.dim() > 3 or not bool(hidden.any()):
        return bool(hidden.any())
    edges = hidden[..., 1:] != hidden[..., :-1]
    return bool((edges.sum(2) <= 1 + hidden[..., 0].int()).all())


def _of_rows(original: Callable[..., Tensor], half_to_float: bool, x: Tensor) -> Tensor:
    return original(x, 1, half_to_float)


SERVED: dict[str, Callable[..., Any]] = {
    "_softmax": Short("softmax_of_rows", _softmax("_softmax")),
    "_log_softmax": Short("log_softmax_of_rows", _softmax("_log_softmax")),
}
