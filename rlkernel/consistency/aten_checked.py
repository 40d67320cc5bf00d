"""torch's own kernels that were seen to be invariant, and are looked at again on this machine before use.

For each operation, dtype, length of a row and number of threads, rows that are drawn once run alone, few and
many together; one bit that differs and the call is refused.  A GPU shares out a reduction by how many rows
there are, so that there they run among thousands too.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel.consistency.aten_call import Refused, is_exact, need_floats

ROWS, PARTS = 17, (1, 2, 3, 8)
VALUES = 4  # that rows have at least, in several draws where they are short
DEVICES, THOUSANDS = ("cuda",), 2**24  # numbers of so many rows that a GPU is full
LONGEST = 4096  # elementwise operations are alike behind it


def _probe(dtype: torch.dtype, length: int, device: str, seed: int = 0) -> Tensor:
    """Rows of either sign whose sizes differ as those of activations do."""
    g = torch.Generator().manual_seed(length + seed)
    scales = torch.tensor([2.0**i for i in range(-6, 3)], device="cpu")
    shape = ROWS, length
    x = (
        torch.rand(shape, generator=g, dtype=torch.float32, device="cpu")
        * scales[torch.randint(9, shape, generator=g, device="cpu")]
        * torch.randint(2, shape, generator=g, device="cpu").mul_(2).sub_(1)
    )
    return x.to(dtype).to(device)


def _differs(run: Callable[[Tensor], Tensor], dtype: torch.dtype, length: int, device: str) -> bool:
    draws = max(1, VALUES // max(length, 1))
    return any(_differs_of(run, _probe(dtype, length, device, seed)) for seed in range(draws))


def _differs_of(run: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    whole = run(x)
    copies = THOUSANDS // max(x.numel(), 1) if x.device.type in DEVICES else 0
    if copies > 1:
        among = run(x.repeat(copies, 1)).unflatten(0, (copies, ROWS))
        if not all(_are_equal(among[i], whole) for i in (0, copies // 2, copies - 1)):
            return True
    return any(
        not _are_equal(run(x[i : i + n].clone()), whole[i : i + n])
        for n in PARTS
        for i in range(0, ROWS - n + 1, n)
    )


def _elements_differ(run: Callable[[Tensor], Tensor], dtype: torch.dtype, length: int, device: str) -> bool:
    """As rows, and in memory that has other strides: a column of many rows is dense where there is one."""
    x = _probe(dtype, length, device)
    whole = run(x)
    strided = (run(x.t()).t(), whole), (run(x[:, ::2]), whole[:, ::2])
    return any(not _are_equal(*pair) for pair in strided) or _differs(run, dtype, length, device)


def _are_equal(a: Tensor, b: Tensor) -> bool:
    """Also where both are no number, as the deviation of one element is."""
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


_seen: dict[tuple[Any, ...], bool] = {}


def checked(
    name: str,
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    length: int,
    differs: Callable[[Callable[[Tensor], Tensor], torch.dtype, int, str], bool] = _differs,
) -> None:
    """Raises Refused where ``run`` gives rows other bits in other batches."""
    key = name, x.dtype, length, x.device.type, torch.get_num_threads()
    if key not in _seen:
        _seen[key] = differs(run, x.dtype, length, x.device.type)
    if _seen[key]:
        raise Refused(f"torch's {name} gives rows of {length} other bits in other batches on this machine")


def _elementwise(name: str) -> Callable[..., Tensor]:
    """Also in place and ``out=``: each way is looked at, as it is called."""
    in_place = name.endswith("_")

    def run(original: Callable[..., Tensor], x: Tensor, **out: Tensor) -> Tensor:
        if is_exact(x):
            return original(x, **out)
        need_floats(x, *out.values())

        def alone(rows: Tensor) -> Tensor:
            if in_place:
                return original(torch.empty_like(rows).copy_(rows))
            into = {name: torch.empty_like(rows, dtype=to.dtype) for name, to in out.items()}
            return original(rows, **into)

        length = min(x.shape[-1] if x.dim() else 1, LONGEST)
        checked(name, alone, x, length, _elements_differ)
        return original(x, **out)

    return run


def _along(name: str) -> Callable[..., Tensor]:
    """A reduction or a scan ``(x, dim, ...)``."""

    def run(original: Callable[..., Tensor], x: Tensor, dim: Any = None, *rest: Any, **kwargs: Any) -> Tensor:
        if is_exact(x):
            return original(x, dim, *rest, **kwargs)
        need_floats(x)
        dims = dim if isinstance(dim, (list, tuple)) else [dim]
        last = bool(dims) and all(d is not None and d % max(x.dim(), 1) >= x.dim() - len(dims) for d in dims)
        if dim is None and x.dim():  # all of them are one row
            dims, last = list(range(x.dim())), True
        if not last:
            raise Refused(f"it must be over the last dimension, got dim {dim} of {x.dim()}")
        length = math.prod(x.shape[x.dim() - len(dims) :])
        of_rows = [1] if dim is None or isinstance(dim, (list, tuple)) else 1
        checked(name, lambda rows: original(rows, of_rows, *rest, **kwargs), x, length)
        return original(x, dim, *rest, **kwargs)

    return run


UNARY = ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf")
ALONG = ("cumsum", "cumprod", "prod.dim_int", "var.correction", "std.correction")
SERVED: dict[str, Callable[..., Any]] = {
    **{name + way: _elementwise(name + way) for name in UNARY for way in ("", "_", ".out")},
    **{name: _along(name) for name in ALONG},
}
