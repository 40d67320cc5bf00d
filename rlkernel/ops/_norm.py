"""Checks that the norms share."""

import torch
from torch import Tensor

from rlkernel.ops import _validate


def check_rows(x: Tensor) -> None:
    if x.dtype not in _validate.FLOATS:
        _validate.floating("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x must be [..., H] with H >= 1, got {tuple(x.shape)}")


def parameter(argument: str, tensor: Tensor | None, x: Tensor) -> Tensor | None:
    """A weight or a bias [H], dense, no wider than what ``x`` is computed in; None stays None."""
    if tensor is None:
        return None
    if tensor.dtype is x.dtype and tensor.shape == x.shape[-1:] and tensor.device == x.device:
        # as it mostly is: the checks below take longer than a small kernel
        return tensor if tensor.is_contiguous() else tensor.contiguous()
    _validate.floating(argument, tensor)
    if tensor.shape != x.shape[-1:]:
        want = tuple(x.shape[-1:])
        raise ValueError(
            f"{argument} must have the shape {want} of x's last dimension, got {tuple(tensor.shape)}"
        )
    _validate.same_device(argument, tensor, "x", x.device)
    if tensor.dtype == torch.float64 != x.dtype:
        tensor = tensor.float()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def epsilon(eps: float) -> float:
    """Checked; most are small floats, and cost nothing."""
    if type(eps) is float and 0 <= eps < 1:
        return eps
    return _validate.number("eps", eps, 0.0)


def differentiated(*tensors: Tensor | None) -> bool:
    """Whether backward may follow: what only backward reads is else neither made nor written."""
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return False


def like_statistics(x: Tensor) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.empty(x.shape[:-1], dtype=dtype, device=x.device)
