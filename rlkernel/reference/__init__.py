"""What each op means, in plain PyTorch."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    """Of every op but those that have one of their own: the reference takes all tensors."""
    return []


@contextlib.contextmanager
def differentiating(call: Any) -> Iterator[Any]:
    """Autograd, also in inference mode and in a node of a compiled graph, where torch leaves it out; and the
    record ``call`` with tensors that it may save, which those of inference mode are not."""
    with torch.inference_mode(False):  # which turns gradients on
        saved = {
            name: x.clone()
            for name, x in zip(call._fields, call, strict=True)
            if isinstance(x, Tensor) and x.is_inference()
        }
        yield call._replace(**saved) if saved else call
