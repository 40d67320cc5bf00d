"""A backward pass in which torch's sums follow its threads, as sums that do not.

Of a softmax torch adds a row among those of several threads otherwise than alone, where it does not fill its
vectors.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.consistency.aten_call import need_floats
from rlkernel.consistency.aten_rows import summed


def softmax_backward(
    original: Callable[..., Tensor], grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype
) -> Tensor:
    if not out.numel():
        return original(grad, out, dim, input_dtype)
    need_floats(grad, out)
    g, y = grad.float(), out.float()
    total = summed(g * y, [dim] if y.dim() else None, True, False, torch.float32)
    return g.sub(total.view_as(y) if not y.dim() else total).mul_(y).to(input_dtype)


SERVED: dict[str, Callable[..., Any]] = {"_softmax_backward_data": softmax_backward}
