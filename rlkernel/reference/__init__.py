"""What each op means, in plain PyTorch."""

from typing import Any

from torch import Tensor


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    """Of every op but those that have one of their own: the reference takes all tensors."""
    return []
