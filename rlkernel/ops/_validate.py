"""Checks shared by the public functions.  Each error names the argument, what it must be and what it got."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.ops import _scalars
from rlkernel.runtime import debug, tracing

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def among(x: Any, *known: Any) -> bool:
    """``x in known``, also of the symbols that numbers and sizes are to a compiler where all is dynamic:
    dynamo does not look for them in a tuple."""
    return any(x == y for y in known)


def is_tensor(argument: str, x: Any) -> None:
    if not isinstance(x, Tensor):
        raise ValueError(f"{argument} must be a tensor, got {type(x).__name__}")


def apart(argument: str, x: Tensor, option: str) -> None:
    """No element of ``x`` lies where another one does, as what is written over must."""
    reach = 0
    for stride, size in sorted((s, n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1):
        if stride <= reach:
            want = "not be expanded" if stride == 0 else "hold elements that share no memory"
            raise ValueError(f"{argument} must {want} with {option}, got strides {x.stride()}")
        reach += stride * (size - 1)


def without_gradient(argument: str, tensor: Tensor) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{argument} must not require a gradient (detach it), got requires_grad=True")


def readable(argument: str, tensor: Tensor, instead: str) -> None:
    """What a host reads whichever the device is, and of which there is none on ``meta`` or in
    ``FakeTensorMode``."""
    if tensor.is_meta or tracing.is_fake():
        got = "a tensor on meta" if tensor.is_meta else "a FakeTensor"
        raise ValueError(f"{argument} must hold values, which are read, got {got}: {instead}")


def floating(argument: str, tensor: Tensor) -> None:
    is_tensor(argument, tensor)
    if tensor.dtype not in FLOATS:
        want = "float16, bfloat16, float32 or float64"
        raise ValueError(f"{argument} must be {want}, got {name(tensor.dtype)}")


def dense(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype).contiguous()``, which takes two microseconds also where it is ``tensor``."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        return tensor
    return tensor.to(dtype).contiguous()


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows as backends take them: any stride between, 1 within."""
    x = x if x.dtype == dtype else x.to(dtype)
    return x if x.stride(-1) == 1 or x.shape[-1] < 2 else x.contiguous()


def same_device(argument: str, tensor: Tensor, other: str, device: torch.device) -> None:
    if tensor.device != device:
        raise ValueError(f"{argument} must be on {other}'s device {device}, got {tensor.device}")


def same_dtype(argument: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    if tensor.dtype != reference.dtype:
        want, got = name(reference.dtype), name(tensor.dtype)
        raise ValueError(f"{argument} must have {other}'s dtype {want}, got {got}")


def target_ids(
    ids: Tensor, shape: torch.Size, source: str, device: torch.device, argument: str = "target_ids"
) -> Tensor:
    is_tensor(argument, ids)
    if ids.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        raise ValueError(f"{argument} must be integers, got {name(ids.dtype)}")
    if ids.shape != shape:
        raise ValueError(f"{argument} must have the shape {tuple(shape)} of {source}, got {tuple(ids.shape)}")
    if ids.device != device:
        same_device(argument, ids, source.split(" ")[-1].split(".")[0], device)
    return ids if ids.dtype == torch.int64 else ids.to(torch.int64)


def temperature(
    value: float | Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device
) -> float | Tensor:
    """A float, or one contiguous value per row, with the digits that the dtype of the statistics has."""
    if type(value) is float and value == 1.0:  # nothing to look at, in most calls
        return value
    wide = torch.promote_types(dtype, torch.float32)
    if not isinstance(value, Tensor):
        return _temperature("temperature", value, wide)
    if value.dtype.is_complex or value.dtype == torch.bool:
        raise ValueError(f"temperature must hold numbers, got {name(value.dtype)}")
    if value.dim() and value.shape != shape:
        want = f"one value or have shape {tuple(shape)}"
        raise ValueError(f"temperature must be {want}, got {tuple(value.shape)}")
    without_gradient("temperature", value)
    if value.dim():
        same_device("temperature", value, "target_ids", device)
    return value.detach().to(device=device, dtype=wide).expand(shape).contiguous()


def one_temperature(value: float, dtype: torch.dtype) -> float:
    """As ``temperature``, of all rows."""
    return _temperature("temperature", value, torch.promote_types(dtype, torch.float32), "a number")


def _temperature(
    argument: str, value: float, dtype: torch.dtype, known: str = "a number or a tensor"
) -> float:
    """``value`` rounded to ``dtype``, in which 1 / value must be finite too: a normal number."""
    if not _scalars.is_number(value):
        raise ValueError(f"{argument} must be {known}, got {type(value).__name__}")
    rounded = _scalars.rounded(value, dtype)
    low, high = torch.finfo(dtype).tiny, torch.finfo(dtype).max
    if not low <= rounded <= high:
        want = "> 0 and finite"
        if 0 < value < math.inf:  # it is neither, once rounded
            want += f" as {name(dtype)}, from {low:.3g} to {high:.3g}"
        raise ValueError(f"{argument} must be {want}, got {value}")
    return rounded


def values(ids: Tensor, vocab: int, temperature: float | Tensor, ignore_index: int) -> None:
    """Looks at the values themselves: always on a CPU, in debug mode on a GPU, where it synchronises."""
    if debug.may_read(ids) and ids.numel():
        low, high = map(int, ids.aminmax())
        if low < 0 or high >= vocab:  # as ids are of which some are ignored
            low, high = map(int, ids.masked_fill(ids == ignore_index, 0).aminmax())
        if low < 0 or high >= vocab:
            bad = ((ids < 0) | (ids >= vocab)) & (ids != ignore_index)
            where = bad.nonzero()[0].tolist()
            value = ids[tuple(where)].item()
            raise ValueError(f"target_ids{where if where else ''} = {value} is outside [0, {vocab})")
    if isinstance(temperature, Tensor) and debug.may_read(temperature) and temperature.numel():
        least, most = torch.finfo(temperature.dtype).tiny, torch.finfo(temperature.dtype).max
        lowest, highest = map(float, temperature.aminmax())
        if not (lowest >= least and highest <= most):  # NaN is neither
            where = (~((temperature >= least) & (temperature <= most))).nonzero()[0].tolist()
            _temperature(f"temperature{where}", temperature[tuple(where)].item(), temperature.dtype)


def constant(argument: str, tensor: Tensor) -> None:
    """A float tensor that the result does not pass a gradient to."""
    floating(argument, tensor)
    without_gradient(argument, tensor)


def like(argument: str, tensor: Tensor, other: str, reference: Tensor) -> None:
    """On the same device and of the same shape."""
    if tensor.shape != reference.shape:
        want, got = tuple(reference.shape), tuple(tensor.shape)
        whose = f"{other}'" if other.endswith("s") else f"{other}'s"
        raise ValueError(f"{argument} must have {whose} shape {want}, got {got}")
    same_device(argument, tensor, other, reference.device)


def mask(tensor: Tensor | None, other: str, reference: Tensor) -> Tensor | None:
    """Nonzero where an element counts, as a bool tensor whose rows are dense; None stays None."""
    if tensor is None:
        return None
    is_tensor("mask", tensor)
    like("mask", tensor, other, reference)
    kept = nonzero("mask", tensor)
    return kept if kept.dim() == 0 or kept.stride(-1) == 1 or kept.shape[-1] < 2 else kept.contiguous()


def flags(argument: str, tensor: Tensor, other: str, reference: Tensor) -> Tensor:
    """True where ``tensor`` is not 0, side by side; it has the shape and the device of ``reference``."""
    is_tensor(argument, tensor)
    like(argument, tensor, other, reference)
    return nonzero(argument, tensor).contiguous()


def nonzero(argument: str, tensor: Tensor) -> Tensor:
    """True where ``tensor`` is not 0.  NaN is neither: looked for on a CPU, and on a GPU in debug mode."""
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_complex():
        raise ValueError(f"{argument} must be bool, integer or float, got {name(tensor.dtype)}")
    if tensor.is_floating_point() and debug.may_read(tensor) and bool((unknown := tensor != tensor).any()):
        raise ValueError(f"{argument}{unknown.nonzero()[0].tolist()} must be a number, got nan")
    return tensor != 0


def item_count(
    argument: str, value: float | Tensor | None, device: torch.device
) -> tuple[Tensor | None, float | None]:
    """What a mean divides by, > 0 in either form: as a tensor of fp64, or as a number.

    A tensor is looked at on a CPU and in debug mode.  Elsewhere that would synchronise: one that is no count
    becomes NaN, and so does the loss.
    """
    if value is None:
        return None, None
    if not isinstance(value, Tensor):
        if not _scalars.is_number(value):
            raise ValueError(f"{argument} must be a number or a tensor, got {type(value).__name__}")
        if not 0 < value < math.inf:
            raise ValueError(f"{argument} must be > 0 and finite, got {value}")
        return None, float(value)
    if value.numel() != 1:
        raise ValueError(f"{argument} must be one number, got shape {tuple(value.shape)}")
    if value.is_complex():
        raise ValueError(f"{argument} must be a real number, got {str(value.dtype).removeprefix('torch.')}")
    without_gradient(argument, value)
    readable = debug.may_read(value)
    if readable and not 0 < value.item() < math.inf:
        raise ValueError(f"{argument} must be > 0 and finite, got {value.item()}")
    count = value.detach().reshape(()).to(device=device, dtype=torch.float64)
    return count if readable else torch.where((count > 0) & (count < math.inf), count, math.nan), None


def fraction(argument: str, value: float) -> float:
    """A number in [0, 1]."""
    return number(argument, value, 0.0, 1.0)


def number(
    argument: str, value: float, low: float = -math.inf, high: float = math.inf, *, above: bool = False,
    want: str = "",
) -> float:  # fmt: skip
    """A finite number from ``low`` to ``high``; ``above``: larger than ``low``.  An error says ``want``, with
    ``low`` in its braces: of a symbol, as numbers are to a compiler, no text can be made."""
    if not _scalars.is_number(value):
        raise ValueError(f"{argument} must be a number, got {type(value).__name__}")
    if not (low < value <= high if above else low <= value <= high) or value in (math.inf, -math.inf):
        text = f"in {'(' if above else '['}{low:g}, {high:g}]"
        if high == math.inf:
            text = "finite" if low == -math.inf else f"{'>' if above else '>='} {low:g} and finite"
        raise ValueError(f"{argument} must be {want.format(low) or text}, got {value}")
    return float(value)


class Range(NamedTuple):
    """The numbers that an option may be, declared beside it: ``low``, ``high``, ``above`` and ``want`` are
    those of ``number``, ``absent`` is what None stands for; without it ``numbers`` refuses None."""

    low: float = -math.inf
    high: float = math.inf
    above: bool = False
    want: str = ""
    absent: float | None = None

    def holds(self, x: float) -> bool:
        """Infinity too, where it is the bound."""
        return (self.low < x if self.above else self.low <= x) and x <= self.high


def numbers(ranges: Mapping[str, Range], options: Mapping[str, Any]) -> dict[str, float]:
    """The options that ``ranges`` declares, checked in its order.

    ``_validate.numbers({"eps": Range(0.0), "clip": Range(0.0, absent=math.inf)}, {"eps": 0, "clip": None})``
    is ``{"eps": 0.0, "clip": math.inf}``.
    """
    return {
        name: absent
        if (value := options[name]) is None and absent is not None
        else number(name, value, low, high, above=above, want=want)
        for name, (low, high, above, want, absent) in ranges.items()
    }


def at_least_one(argument: str, value: Any, otherwise: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{argument} must be an integer >= 1{otherwise}, got {value!r}")


def choice(argument: str, value: str, known: Iterable[str]) -> str:
    if not isinstance(value, str) or value not in known:
        raise ValueError(f"{argument} must be one of {', '.join(map(repr, known))}, got {value!r}")
    return value


def ascending(argument: str, offsets: Tensor, total: int) -> None:
    """Looks at the offsets themselves: on a CPU, and on a GPU in debug mode."""
    if debug.may_read(offsets):
        if offsets[0] != 0 or offsets[-1] != total:
            raise ValueError(
                f"{argument} must go from 0 to {total}, got {offsets[0].item()} to {offsets[-1].item()}"
            )
        rising(argument, offsets)


def rising(argument: str, offsets: Tensor) -> None:
    falls = (offsets[1:] < offsets[:-1]).nonzero()
    if len(falls):
        i = int(falls[0]) + 1
        before, here = offsets[i - 1].item(), offsets[i].item()
        raise ValueError(f"{argument}[{i}] must be >= {argument}[{i - 1}] = {before}, got {here}")


def finite(argument: str, tensor: Tensor, kept: Tensor | None = None) -> None:
    """Looks at the values where ``kept`` is set: on a CPU, and on a GPU in debug mode."""
    if debug.may_read(tensor):
        if not tensor.numel():
            return
        low, high = (tensor if kept is None else torch.where(kept, tensor, 0)).aminmax()
        if -math.inf < low.item() and high.item() < math.inf:  # one read; NaN is neither
            return
        bad = ~tensor.isfinite() if kept is None else ~tensor.isfinite() & kept
        if bad.any():
            where = bad.nonzero()[0].tolist()
            value = tensor[tuple(where)].item()
            raise ValueError(f"{argument}{where} must be finite where the mask is set, got {value}")


def finite_in_debug(*fields: str) -> Callable[[Any, Any], Any]:
    """``forward`` of an op that looks, in debug mode, at these fields of a call where its mask is set."""

    def forward(impl: Any, call: Any) -> Any:
        if debug.enabled():
            for field in fields:
                finite(field, getattr(call, field), call.mask)
        return impl.forward(call)

    return forward


def look(argument: str, values: Tensor, inside: Callable[[float], bool], want: str) -> None:
    """Looks at the values: on a CPU, and on a GPU in debug mode.  ``inside`` an interval: NaN is not."""
    if debug.may_read(values) and values.numel() and not all(inside(x.item()) for x in values.aminmax()):
        i, wrong = next((i, x) for i, x in enumerate(values.tolist()) if not inside(x))
        raise ValueError(f"{argument}[{i}] must be {want}, got {wrong}")


def healthy(source: str, lse: Tensor) -> None:
    """In debug mode, raises for a row from which no distribution can be made."""
    if debug.enabled() and debug.may_read(lse):
        bad = ~lse.isfinite()
        if bad.any():
            where = bad.nonzero()[0].tolist()
            what = "is -inf everywhere" if lse[tuple(where)] == -torch.inf else "holds NaN or +inf"
            raise ValueError(f"{source}{where or ''} must give a finite log-sum-exp, but the row {what}")
