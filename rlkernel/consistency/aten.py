"""Replaces operations in torch's dispatcher: what each becomes, what is checked first, and what is refused.

A replacement is ``run(original, *args, **kwargs)``, called below autograd with tensors of one device.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from rlkernel.consistency import aten_attention, aten_checked, aten_elementwise, aten_products, aten_rows
from rlkernel.consistency.aten_call import Refused, used
from rlkernel.runtime import invariance

SERVED: dict[str, Callable[..., Any]] = {
    **aten_products.SERVED,
    **aten_rows.SERVED,
    **aten_elementwise.SERVED,
    **aten_attention.SERVED,
    **aten_checked.SERVED,
}
SERVED["pow.Tensor_Scalar"] = SERVED["pow.Tensor_Scalar_out"] = lambda *args, **out: _power(*args, **out)
# whose bits follow the batch, and of which nothing here makes more
POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # of which torch makes products, roots and quotients
REFUSED = {
    "convolution": "libraries choose its algorithm by the batch",
    "native_batch_norm": "it mixes the rows of a batch",
    "_native_batch_norm_legit": "it mixes the rows of a batch",
    "_cdist_forward": "it is a product of a library",
    "_trilinear": "it is a product of a library",
    "logcumsumexp": "its order may follow the batch",
    "mish": "its last elements are rounded otherwise than the others",
    "exp2": "its last elements are rounded otherwise than the others",
    "elu": "its last elements are rounded otherwise than the others",
}


@contextlib.contextmanager
def replaced() -> Iterator[None]:
    """Inside, the operations are replaced, on the CPU and on GPUs where torch has them."""
    keys = ("CPU", "CUDA") if torch.cuda.is_available() else ("CPU",)
    library = torch.library.Library("aten", "IMPL")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
            for key in keys:
                for name, run in SERVED.items():
                    replace(library, name, key, run)
                for name, reason in REFUSED.items():
                    replace(library, name, key, functools.partial(_refuse, reason))
        yield
    finally:
        library._destroy()


def replace(library: Any, name: str, key: str, run: Callable[..., Any]) -> None:
    try:
        kernel = torch.library.get_kernel(f"{library.ns}::{name}", key)
    except RuntimeError:  # this build of torch has none
        return

    def call(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        original = functools.partial(kernel.call_boxed, keyset)
        if invariance.is_aside():
            return original(*args, **kwargs)
        used.backend = "torch"
        try:
            found = run(original, *args, **kwargs)
            invariance.count(name, used.backend)
            return found
        except Refused as refused:
            if invariance.is_strict():
                raise RuntimeError(
                    f"torch's {name} must be invariant inside rlkernel.batch_invariant(strict=True), "
                    f"got a call that is not: {refused}"
                ) from None
            invariance.count(name, "torch, not invariant")
            return original(*args, **kwargs)

    library.impl(name, call, key, with_keyset=True, allow_override=True)


def _power(original: Callable[..., Tensor], x: Tensor, exponent: Any, **out: Any) -> Tensor:
    if x.is_floating_point() and exponent not in POWERS:
        raise Refused(f"its exponent must be one of {', '.join(map(str, POWERS))}, got {exponent}")
    return original(x, exponent, **out)


def _refuse(reason: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    raise Refused(reason)
