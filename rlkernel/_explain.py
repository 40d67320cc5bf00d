"""Why a call would run where it does: the answer of ``dispatch.pick`` to that very call."""

import functools
import inspect
import sys
import typing
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlkernel import dispatch


def explain(op: str, *tensors: Tensor, **options: Any) -> dispatch.Reasons:
    """Every backend's reasons for not running a call of ``op``; an empty list means that it can.

    ``paths`` of the result says, of those that can and have several ways to run it, which one and why.

    ``op`` is the name of a public function, or of an op, and the rest what one would pass to it, up to what
    one knows: ``explain("sample", logits, top_p=0.9)``.  Tensors without options, and a call that lacks
    arguments, are looked at for the tensors alone.  Nothing is computed, and torch's generators stay as they
    are.

    Raises:
        ValueError: ``op`` is not known or has no such option; or an argument is off, as the function says.

    Examples:
        >>> rlkernel.explain("logprob", torch.randn(2, 8), torch.tensor([1, 5]))["reference"]
        []
    """
    function, name = _function(op)
    parameters = list(inspect.signature(function).parameters.values())
    places = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    if len(tensors) > len(places):
        raise ValueError(f"tensors must be at most {len(places)} of {op}, got {len(tensors)}")
    known = _names(function)
    for option in options:
        if option not in known:
            raise ValueError(f"options must be among those of {op} ({', '.join(known)}), got {option!r}")
    given = dict(zip(places, tensors, strict=False))
    if twice := given.keys() & options.keys():
        raise ValueError(f"{min(twice)} must be given once, got it by place and by name")
    given |= options
    required = [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    tensors_alone = not options and all(isinstance(x, Tensor) for x in tensors)
    if not tensors_alone and all(x in given for x in required):
        devices = {x.device for x in given.values() if isinstance(x, Tensor) and x.device.type == "cuda"}
        with torch.random.fork_rng(devices=sorted(devices, key=str)), dispatch.asking() as answer:
            function(**given)
        if answer:
            return answer
    shown = [given[x] for x in known if isinstance(given.get(x), Tensor)]
    shown.sort(key=lambda x: not x.is_floating_point())  # as ``pick`` has them: ids and masks follow
    if not isinstance(given.get(known[0]), Tensor):
        raise ValueError(f"{known[0]} must be a tensor, got {type(given.get(known[0])).__name__}")
    return dispatch.reasons(name, *shown)


def last_backend(op: str) -> str | None:
    """The backend that ran ``op``, or the op of that public function, most recently in this process, or None
    when it has not run.

    Examples:
        >>> with rlkernel.use_backend("reference"):
        ...     whitened = rlkernel.whiten(torch.randn(8))
        >>> rlkernel.last_backend("whiten")
        'reference'
    """
    return dispatch.last(_function(op)[1])


def _names(function: Callable[..., Any]) -> list[str]:
    """Of the arguments, also of those that are handed on: linear_policy_loss's options are policy_loss's."""
    parameters = inspect.signature(function).parameters
    names = [p.name for p in parameters.values() if p.kind is not p.VAR_KEYWORD]
    if len(names) == len(parameters):
        return names
    return names + [x for x in inspect.signature(_function("policy_loss")[0]).parameters if x not in names]


def _function(name: str) -> tuple[Callable[..., Any], str]:
    """The public function of this name, and the op that it asks a backend for."""
    functions = _functions()
    if not isinstance(name, str) or name not in functions:
        raise ValueError(f"op must be one of {', '.join(map(repr, sorted(functions)))}, got {name!r}")
    return functions[name]


@functools.cache
def _functions() -> dict[str, tuple[Callable[..., Any], str]]:
    ops = dispatch.ops()
    found: dict[str, tuple[Callable[..., Any], str]] = {}
    public = sys.modules[__package__]  # which imports this module, and not the other way round
    for name in public.__all__:
        function = getattr(public, name, None)
        if not inspect.isfunction(function) or not function.__module__.startswith("rlkernel.ops."):
            continue
        first = next(iter(inspect.signature(function).parameters))
        if typing.get_type_hints(function).get(first) is Tensor:
            found[name] = function, function.__module__.split(".")[2]
    for op in ops:  # an op that has no function of its name is known by its first one
        found.setdefault(op, next(x for x in found.values() if x[1] == op))
    return found
