"""How one of a framework's functions is replaced, and which tensors rlkernel does not take in its place."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import PatchError
from rlkernel.ops.logprob import logprob

NARROW = (torch.float16, torch.bfloat16, torch.float32)
WIDE = (*NARROW, torch.float64)
DEVICES = ("cpu", "cuda")
KINDS = ("loss_type", "importance_sampling_level", "policy_loss_type")

Arguments = dict[str, Any]


class Table:
    """A dictionary as an owner of attributes, which is what a patch replaces."""

    __slots__ = ("__dict__", "_name")

    def __init__(self, name: str, table: dict[str, Any]) -> None:
        self._name = name
        self.__dict__ = table  # the very dictionary: what is set here is set there

    def __repr__(self) -> str:
        return self._name


class Seen:
    """An object of which some attributes look different."""

    def __init__(self, target: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


def shown(new: Callable[..., Any], original: Callable[..., Any], op: str) -> Callable[..., Any]:
    """``new`` with the framework's signature, and as a patch shows itself."""
    functools.update_wrapper(new, original)
    new.__module__, new.__qualname__ = "rlkernel", op
    return new


def replacement(
    patch: CountedPatch,
    original: Callable[..., Any],
    op: str,
    unable: Callable[[Arguments], str | None],
    run: Callable[[Arguments], Any],
) -> Callable[..., Any]:
    """In the place of ``original``: ``run`` with its arguments by name, unless ``unable`` has a reason."""
    signature = inspect.signature(original)
    name = original.__qualname__

    def new(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        if reason := unable(bound.arguments):
            patch.left(name, reason)
            return original(*args, **kwargs)
        patch.count(patch.calls, name)
        return run(bound.arguments)

    return shown(new, original, op)


def unsuitable(dtypes: tuple[torch.dtype, ...] = WIDE, **tensors: Any) -> str | None:
    """Why rlkernel does not take these tensors of numbers."""
    for name, x in tensors.items():
        if reason := misplaced(**{name: x}):
            return reason
        if x.dtype not in dtypes:
            return f"{name} is {x.dtype}"
    return None


def finite(x: Any) -> TypeGuard[float]:
    """Whether rlkernel's ops take ``x`` for a number; frameworks also compute with inf and with tensors."""
    return isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x)


def unfit_temperature(temperature: Any) -> str | None:
    if not finite(temperature) or not temperature > 0:
        return "the temperature is no number above 0"
    return None


def fraction(x: Any) -> bool:
    return finite(x) and 0 <= x <= 1


def unfit_numbers(options: Arguments) -> str | None:
    """Which of the options of a ``policy_loss``, but for its kinds, is none."""
    return next(
        (f"{name} is no finite number" for name, x in options.items() if name not in KINDS and not finite(x)),
        None,
    )


def is_count(items: Any) -> bool:
    """Whether rlkernel's means divide by ``items``; of a GPU's number a look would wait for the GPU."""
    if not isinstance(items, Tensor):
        return finite(items) and items > 0
    return items.dim() == 0 and (items.device.type != "cpu" or bool(items > 0))


def misplaced(**tensors: Any) -> str | None:
    """The same of tensors of any dtype."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            return f"{name} is no tensor"
        if type(x).__name__ == "DTensor":
            return f"{name} is a DTensor"
        if x.is_nested or x.is_sparse:
            return f"{name} is nested or sparse"
        if x.device.type not in DEVICES:
            return f"{name} is on a device of type {x.device.type}"
    return None


def unfit_logits(logits: Any) -> str | None:
    if reason := unsuitable(NARROW, logits=logits):
        return reason
    return None if logits.dim() > 1 and logits.shape[-1] else "logits are not [..., V] with rows"


def unfit_labels(logits: Tensor, labels: Any) -> str | None:
    if reason := misplaced(labels=labels):
        return reason
    return None if labels.shape == logits.shape[:-1] else "labels have not the shape of the rows of logits"


def logprobs_of_logits(
    patch: CountedPatch,
    original: Callable[..., Any],
    unfit: Callable[[Any], str | None],
    has_flash_attn: Callable[[], bool],
) -> Callable[..., Any]:
    """In the place of a ``logprobs_from_logits`` that writes over the logits in flash-attn's function alone,
    so that without it callers elsewhere may still need them."""

    def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Any:
        if reason := unfit(logits) or unfit_labels(logits, labels):
            patch.left(original.__name__, reason)
            return original(logits, labels, inplace_backward)
        patch.count(patch.calls, original.__name__)
        inplace = inplace_backward and has_flash_attn() and logits.requires_grad
        return logprob(logits, labels, inplace_backward=inplace).logprobs

    return logprobs_from_logits


def unfit_rewards(given: Arguments) -> str | None:
    """Of an estimator: ``token_level_rewards`` and ``response_mask``."""
    rewards, mask = given["token_level_rewards"], given["response_mask"]
    if reason := unsuitable(token_level_rewards=rewards) or misplaced(response_mask=mask):
        return reason
    if rewards.requires_grad:
        return "token_level_rewards requires a gradient"
    return differing(token_level_rewards=rewards, response_mask=mask)


def group_numbers(index: Any, device: torch.device) -> Tensor:
    """A number for each response's group, by its names: strings or numbers, in a list or an array."""
    first: dict[Any, int] = {}
    names = index.tolist() if hasattr(index, "tolist") else index
    return torch.tensor([first.setdefault(name, len(first)) for name in names], device=device)


def differing(**tensors: Tensor) -> str | None:
    """Tensors that must have one shape [B, L] and one device, and all but the first no gradient."""
    (first, whole), *others = tensors.items()
    if whole.dim() != 2 or not whole.numel():
        return f"{first} is not [B, L] with a token"
    for name, x in others:
        if x.shape != whole.shape or x.device != whole.device:
            return f"{name} has not {first}'s shape and device"
        if x.requires_grad and torch.is_grad_enabled():
            return f"{name} requires a gradient"
    return None


def require_same(table: dict[str, Any], key: str, function: Any) -> None:
    """A registry's entry must be the function that the framework registered."""
    if table.get(key) is not function:
        raise PatchError(f"the registry's {key!r} must be its own {function.__name__}")
