"""FP8 heads as rollout engines hold them: the scales of a weight, and how hidden states are rounded."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import INPUT_SCHEMES, LinearLogprobCall
from rlkernel.ops import _validate
from rlkernel.ops._vocab_parallel import is_dtensor
from rlkernel.runtime import debug

DTYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz)
SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
NAMES = INPUT_SCHEMES[1:]


def is_fp8(weight: Any) -> bool:
    return isinstance(weight, Tensor) and weight.dtype in DTYPES


def asks(weight: Tensor, weight_scale: Tensor | None, input_scale: Tensor | str | None) -> None:
    """Raises where the arguments that tell of FP8 do not go together."""
    if weight_scale is None:
        if is_fp8(weight):
            want = f"given with a {_validate.name(weight.dtype)} weight"
            raise ValueError(f"weight_scale must be {want}, got None")
        raise ValueError(f"input_scale must be None without weight_scale, got {_shown(input_scale)}")
    if not is_fp8(weight):
        got = _validate.name(weight.dtype) if isinstance(weight, Tensor) else type(weight).__name__
        want = " or ".join(map(_validate.name, DTYPES))
        raise ValueError(f"weight must be {want} with weight_scale, got {got}")
    if is_dtensor(weight):
        raise ValueError("weight must be this rank's plain tensor with weight_scale, got a DTensor")
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError("weight must not require a gradient: FP8 is frozen, got requires_grad=True")


def no_support(support_ids: Tensor | None) -> None:
    if support_ids is not None:
        raise ValueError("support_ids must be None with weight_scale, got a tensor")


def fields(
    hidden: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    block_size: tuple[int, int],
    input_scale: Tensor | str | None,
) -> dict[str, Any]:
    """What the record tells of FP8, of a ``hidden`` and a ``weight`` whose shapes are known to fit."""
    scale, block = _scale_of_blocks(weight_scale, weight, *block_size)
    found: dict[str, Any] = {"weight_scale": scale, "weight_block": block}
    if input_scale is None:
        return found
    if isinstance(input_scale, Tensor):
        return found | {"input_scheme": "static", "input_scale": _static(input_scale, hidden)}
    if not isinstance(input_scale, str) or input_scale not in NAMES:
        want = f"a tensor, None or one of {', '.join(map(repr, NAMES))}"
        raise ValueError(f"input_scale must be {want}, got {_shown(input_scale)}")
    group = hidden.shape[-1] if input_scale == "token" else block_size[1]
    return found | {"input_scheme": input_scale, "input_group": group}


def values(call: LinearLogprobCall) -> None:
    """Looks at the scales themselves: on a CPU, and on a GPU in debug mode."""
    for argument in ("weight_scale", "input_scale"):
        scale = getattr(call, argument)
        if scale is None or not scale.numel() or not debug.may_read(scale):
            continue
        low, high = map(float, scale.aminmax())
        if not (low > 0 and high < math.inf):  # NaN is neither
            bad = ~((scale > 0) & scale.isfinite())
            place = bad.nonzero()[0].tolist()
            where = "" if scale.numel() == 1 else place
            raise ValueError(f"{argument}{where} must be > 0 and finite, got {scale[tuple(place)].item()}")


def block_size(size: Any) -> tuple[int, int]:
    try:
        rows, columns = size
        if min(int(rows), int(columns)) < 1 or (int(rows), int(columns)) != (rows, columns):
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"weight_block_size must be two integers >= 1, got {size!r}") from None
    return int(rows), int(columns)


def _scale_of_blocks(
    scale: Tensor, weight: Tensor, rows: int, columns: int
) -> tuple[Tensor, tuple[int, int]]:
    """fp32 scales [ceil(V / R), ceil(H / K)], and (R, K)."""
    _checked("weight_scale", scale, "weight", weight)
    vocab, size = weight.shape
    block = rows, columns
    blocks = -(-vocab // rows), -(-size // columns)
    if _validate.among(scale.shape, (), (1,), (1, 1)):
        grid, block = (1, 1), (max(vocab, 1), size)
    elif _validate.among(scale.shape, (vocab,), (vocab, 1)):
        grid, block = (vocab, 1), (1, size)
    elif tuple(scale.shape) == blocks:
        grid = blocks
    else:
        want = f"one value, [{vocab}], [{vocab}, 1] or {list(blocks)} for blocks of {rows} x {columns}"
        raise ValueError(f"weight_scale must be {want}, got {tuple(scale.shape)}")
    return scale.detach().to(torch.float32).reshape(grid).contiguous(), block


def _static(scale: Tensor, hidden: Tensor) -> Tensor:
    if scale.numel() != 1:
        raise ValueError(f"input_scale must be one value, got shape {tuple(scale.shape)}")
    _checked("input_scale", scale, "hidden", hidden)
    return scale.detach().to(torch.float32).reshape(())


def _checked(argument: str, scale: Tensor, other: str, tensor: Tensor) -> None:
    _validate.is_tensor(argument, scale)
    if scale.dtype not in SCALES:
        want = "float32, bfloat16, float16 or float8_e8m0fnu"
        raise ValueError(f"{argument} must be {want}, got {_validate.name(scale.dtype)}")
    _validate.without_gradient(argument, scale)
    _validate.same_device(argument, scale, other, tensor.device)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else repr(value)
