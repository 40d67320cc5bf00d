"""What the replacements of torch's operations have in common."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.runtime.invariance import used as used

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
BACKENDS = ("native", "triton")  # whose bits are their own code's


class Refused(Exception):
    """Why the bits of a call may depend on the batch."""

    def __init__(self, reason: str, operands: tuple[Tensor, ...] = ()) -> None:
        super().__init__(reason)
        self.operands = operands  # for torch's own, where it handed on a number that it does not take itself


class Short:
    """A replacement ``run`` of which C++ takes the calls of plain CPU tensors, as ``op`` of
    ``csrc/include/rlkernel/replaced.h``: a step of decoding has hundreds of them, most of them short."""

    def __init__(self, op: str, run: Callable[..., Any]) -> None:
        self.op, self.run = op, run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)


def module_of(op: str, *tensors: Tensor) -> ModuleType:
    """The backend's module of ours that computes ``op``, whichever backend is forced."""
    found = dispatch.able(op, BACKENDS, *tensors)
    if found is None:
        raise Refused(f"no backend of rlkernel.{op} takes {tensors[0].dtype} on {tensors[0].device.type}")
    used.backend, module = found
    return module


def is_exact(x: Tensor) -> bool:
    """Integers: any order of their sum gives the same."""
    return not (x.is_floating_point() or x.is_complex())


def need_floats(*tensors: Tensor) -> None:
    for x in tensors:
        if x.dtype not in FLOATS:
            raise Refused(f"its operands must be float16, bfloat16 or float32, got {x.dtype}")


def put(out: Tensor, value: Tensor) -> Tensor:
    """``value`` in ``out``, as torch's ``out=`` takes it: of any size that it had."""
    if out.shape != value.shape:
        out.resize_(value.shape)
    return out.copy_(value)
