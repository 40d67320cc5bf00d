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

from rlkernel import native
from rlkernel.consistency import (
    aten_attention,
    aten_backward,
    aten_checked,
    aten_composite,
    aten_elementwise,
    aten_products,
    aten_rows,
    aten_scatter,
    aten_softmax,
)
from rlkernel.consistency.aten_call import Refused, Short, put, used
from rlkernel.runtime import invariance

SERVED: dict[str, Callable[..., Any]] = {
    **aten_products.SERVED,
    **aten_rows.SERVED,
    **aten_elementwise.SERVED,
    **aten_attention.SERVED,
    **aten_checked.SERVED,
    **aten_composite.SERVED,
    **aten_scatter.SERVED,
    **aten_softmax.SERVED,
    **aten_backward.SERVED,
}
SERVED["pow.Tensor_Scalar"] = Short("power", lambda *args: _power(*args))
SERVED["pow.Tensor_Scalar_out"] = lambda *args, **out: _power(*args, **out)
SERVED["pow_.Scalar"] = lambda original, x, exponent: _power_in_place(original, x, exponent)
SERVED["pow.Tensor_Tensor"] = SERVED["pow.Tensor_Tensor_out"] = lambda *args, **out: _powers(*args, **out)
SERVED["sgn"] = SERVED["sgn.out"] = lambda *args, **out: _sign(*args, **out)
POWERS = (-2, -1, -0.5, 0, 0.5, 1, 2, 3)  # of which torch makes products, roots and quotients
_ALONE = "it rounds some elements otherwise than others, by their place"
_ORDER = "its order may follow the batch"
_LIBRARY = "it is a product of a library"
# whose bits follow the batch, and of which nothing here makes more
REFUSED = {
    "convolution": "libraries choose its algorithm by the batch",
    "native_batch_norm": "it mixes the rows of a batch",
    "_native_batch_norm_legit": "it mixes the rows of a batch",
    "_cdist_forward": _LIBRARY,
    "_trilinear": _LIBRARY,
    "logcumsumexp": _ORDER,
    "mish": _ALONE,
    "exp2": _ALONE,
    **{
        f"{name}{way}": _ALONE
        for name in (
            "elu",
            "atanh",
            "cosh",
            "sinh",
            "logit",
            "atan2",
            "logaddexp",
            "logaddexp2",
            "igamma",
            "addr",
        )
        for way in ("", "_", ".out")
    },
    **dict.fromkeys(("mish_", "mish.out", "exp2_", "exp2.out", "pow_.Tensor", "polar.out"), _ALONE),
    **dict.fromkeys(("special_i0e", "special_i0e.out", "igammac", "igammac.out"), _ALONE),
    **dict.fromkeys(("huber_loss_backward.out", "smooth_l1_loss_backward.grad_input"), _ALONE),
    **dict.fromkeys(("_scaled_mm", "_scaled_mm_v2", "_addmm_activation", "mkldnn_rnn_layer"), _LIBRARY),
    **dict.fromkeys(
        ("_weight_int8pack_mm", "_weight_int4pack_mm_for_cpu", "_dyn_quant_matmul_4bit"), _LIBRARY
    ),
    **dict.fromkeys(("_linalg_det", "_linalg_slogdet", "linalg_matrix_exp"), _LIBRARY),
    # of one system: the columns of its right side are a batch
    **dict.fromkeys(("_linalg_solve_ex", "linalg_solve_triangular", "linalg_lu_solve"), _LIBRARY),
    **dict.fromkeys(("_cholesky_solve_helper", "triangular_solve", "linalg_lstsq", "ormqr"), _LIBRARY),
    **dict.fromkeys(("_pdist_forward", "_fft_r2c", "_fft_c2r", "_fft_c2c"), _LIBRARY),
    **dict.fromkeys(("var_mean.correction", "std_mean.correction", "norm.ScalarOpt_dim"), _ORDER),
    **dict.fromkeys(("norm.ScalarOpt_dim_dtype", "linalg__powsum", "native_group_norm"), _ORDER),
    **dict.fromkeys(("_masked_softmax", "_weight_norm_interface", "segment_reduce"), _ORDER),
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only"), _ORDER),
}
SPARSE = ("mm", "addmm", "bmm", "addmv")  # products of a library


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
                    (replace_whole if name in aten_composite.SERVED else replace)(library, name, key, run)
                for name, reason in REFUSED.items():
                    replace(library, name, key, functools.partial(_refuse, reason))
            for key in ("SparseCPU", "SparseCsrCPU"):
                for name in SPARSE:
                    replace(library, name, key, functools.partial(_refuse, _LIBRARY))
        yield
    finally:
        library._destroy()


def replace(library: Any, name: str, key: str, served: Callable[..., Any]) -> None:
    run = served.run if isinstance(served, Short) else served
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
            return original(*(refused.operands or args), **kwargs)

    whole: Callable[..., Any] = call
    if isinstance(served, Short) and key.endswith("CPU"):
        with contextlib.suppress(ImportError):  # without the extension
            whole = native.replaced(served.op, name, call)
    library.impl(name, whole, key, with_keyset=True, allow_override=True)


def replace_whole(library: Any, name: str, device: str, run: Callable[..., Any]) -> None:
    """An operation that torch makes of others, with and without gradients."""
    # autograd's first: where a device has a kernel, torch would make it another
    for key in (f"Autograd{device}", device):
        replace(library, name, key, run)


def _power(original: Callable[..., Tensor], x: Tensor, exponent: Any, **out: Any) -> Tensor:
    if x.is_floating_point() and exponent not in POWERS:
        raise Refused(f"its exponent must be one of {', '.join(map(str, POWERS))}, got {exponent}")
    if x.dtype in (torch.float16, torch.bfloat16) and not out:
        return original(x.float(), exponent).to(x.dtype)  # halves are rounded by their place
    return original(x, exponent, **out)


def _power_in_place(original: Callable[..., Tensor], x: Tensor, exponent: Any) -> Tensor:
    if not x.is_floating_point():
        return original(x, exponent)
    if exponent not in POWERS:
        raise Refused(f"its exponent must be one of {', '.join(map(str, POWERS))}, got {exponent}")
    return x.copy_(torch.pow(x, exponent))


def _powers(original: Callable[..., Tensor], *operands: Any, out: Tensor | None = None) -> Tensor:
    """Of contiguous operands: torch rounds elements of others otherwise."""
    dtype = torch.result_type(*operands)
    device = next(x.device for x in operands if isinstance(x, Tensor))  # torch hands on a number as a float
    tensors = tuple(torch.as_tensor(x, dtype=dtype, device=device) for x in operands)
    if (
        not isinstance(operands[0], Tensor) and operands[1].dim() > 1
    ):  # of one: frequencies, which are no rows
        raise Refused(_ALONE, tensors)
    dense = [x.contiguous() for x in torch.broadcast_tensors(*tensors)]
    return original(*dense) if out is None else put(out, original(*dense, out=dense[0].new_empty(0)))


def _sign(original: Callable[..., Tensor], x: Tensor, **out: Any) -> Tensor:
    if x.is_complex():
        raise Refused(_ALONE)
    return original(x, **out)


def _refuse(reason: str, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
    raise Refused(reason)
