"""Stand around the routers of a model, where they choose, and around the experts, where they are summed.

A router's own code runs as it is, with its own softmax or sigmoid, its own weights and its own gradient; what
changes is the answer of the one ``torch.topk`` in it that chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlkernel.integrations._forward import Standing
from rlkernel.integrations._patch import ABSENT, Patch, PatchError
from rlkernel.integrations.hf import checkpointing
from rlkernel.integrations.hf.routers import Router, routers
from rlkernel.routing_replay.choice import combine, top_k

# (scores [tokens, experts], free) -> the experts [tokens, top_k]; free() is what the router would choose
Choose = Callable[[Tensor, Callable[[], Tensor]], Tensor]


class RoutingPatch(Patch):
    """Stands around the routers of one model; ``deterministic``: around its experts as well."""

    def __init__(self, name: str, model: nn.Module, deterministic: bool) -> None:
        super().__init__(f"routing_replay.{name}")
        self.deterministic = deterministic
        self.routers = routers(model)
        for index, router in enumerate(self.routers):
            for module in router.modules:
                self._around(module, self._routed(index, router, module.forward))
            if deterministic:
                self._around(_experts(router), _summed(router))
        modules = {id(module) for router in self.routers for module in router.modules}
        for layer, attribute, function in checkpointing.checkpoints(model):
            if any(id(module) in modules for module in layer.modules()):
                bound = Standing(checkpointing.bound(function, layer), layer, attribute, function)
                self.replace(layer, attribute, bound, expected=function)

    def _around(self, module: Any, forward: Callable[..., Any]) -> None:
        expected = vars(module).get("forward", ABSENT)  # accelerate's hooks leave one there
        if isinstance(expected, _Around):
            raise ValueError(
                f"model must be in one with of record, replay and deterministic at a time, "
                f"got {self.name} inside of {expected.routing.name}"
            )
        self.replace(module, "forward", _Around(forward, module, expected, self), expected=expected)

    def _routed(self, index: int, router: Router, forward: Callable[..., Any]) -> Callable[..., Any]:
        def route(*args: Any, **kwargs: Any) -> Any:
            with _Choice(router, self._choose(index), self.deterministic) as choice:
                results = forward(*args, **kwargs)
            choice.require_used(results)
            return results

        @functools.wraps(forward)
        def routed(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                from rlkernel.runtime.graph_break import outside  # a pass's routes are no part of a graph

                return outside(functools.partial(route, *args, **kwargs))
            return route(*args, **kwargs)

        return routed

    def _choose(self, index: int) -> Choose:
        """The choice of a router in the pass that runs: its own."""
        return lambda scores, free: free()


class _Around(Standing):
    """What stands around a router, or around its experts."""

    def __init__(
        self, forward: Callable[..., Any], module: nn.Module, expected: Any, routing: RoutingPatch
    ) -> None:
        super().__init__(forward, module, "forward", expected)
        self.routing = routing


def _experts(router: Router) -> nn.Module:
    experts = getattr(router.block, "experts", None)
    if not isinstance(experts, nn.Module):
        raise ValueError(
            f"{type(router.block).__name__} must have its experts in a module of that name for "
            f"deterministic=True, got {type(experts).__name__}"
        )
    return experts


def _summed(router: Router) -> Callable[..., Any]:
    """The experts' ``forward`` slot by slot, each with the weight 1, and their weighted sum in that order."""
    experts = _experts(router)
    forward = experts.forward

    @functools.wraps(forward)
    def summed(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        ones = torch.ones_like(top_k_weights[:, :1])
        slots = [forward(hidden_states, index, ones) for index in top_k_index.split(1, dim=1)]
        return combine(torch.stack(slots, 1), top_k_weights)

    return summed


class _Choice(TorchFunctionMode):
    """Answers the ``torch.topk`` by which a router chooses, and no other operation."""

    def __init__(self, router: Router, choose: Choose, deterministic: bool) -> None:
        super().__init__()
        self.router = router
        self.choose = choose
        self.deterministic = deterministic
        self.chosen: Tensor | None = None
        self.masked: tuple[Any, Any] = None, None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.topk, Tensor.topk) and self._chooses(*args, **kwargs):
            return self._answer(func, args, kwargs)
        results = func(*args, **kwargs)
        if func in (torch.masked_fill, Tensor.masked_fill):
            # the experts of groups that a router leaves out have a score all the same, where they were chosen
            self.masked = results, args[0]
        return results

    def _chooses(self, input: Tensor, k: int, dim: int = -1, *args: Any, **kwargs: Any) -> bool:
        # groups of experts are chosen by topk too, from scores of another shape
        experts, chosen = self.router.shape
        return input.dim() == 2 and input.shape[1] == experts and k == chosen and dim in (-1, 1)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.chosen is not None:
            raise PatchError(f"{self.router.path} must choose its experts once, got a second torch.topk")
        scores = kwargs["input"] if "input" in kwargs else args[0]
        experts, chosen = self.router.shape
        stock: list[Any] = []

        def free() -> Tensor:
            if self.deterministic:
                return top_k(scores, chosen)[1]
            stock.append(func(*args, **kwargs))
            return stock[0][1]

        self.chosen = self.choose(scores, free)
        if stock and self.chosen is stock[0][1]:
            return stock[0]
        results, unmasked = self.masked
        values = (unmasked if scores is results else scores).gather(-1, self.chosen)
        return torch.return_types.topk((values, self.chosen))

    def require_used(self, results: Any) -> None:
        """Hold the router to what it is known to be, without a look at a value."""
        if self.chosen is None:
            raise PatchError(
                f"{self.router.path} must choose its experts by torch.topk over {self.router.shape[0]} "
                "scores, got none"
            )
        if not any(part is self.chosen for part in results):
            raise PatchError(f"{self.router.path} must return the experts that torch.topk chose, got others")
