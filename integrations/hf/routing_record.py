"""Record the experts that a model's routers choose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from rlkernel.integrations.hf import checkpointing
from rlkernel.integrations.hf.routing_patch import Choose, RoutingPatch
from rlkernel.routing_replay.routes import Routes, cat, storage_dtype


class Recording(RoutingPatch):
    """``passes``: the routes of each forward pass inside of the ``with``; ``routes``: of all of them."""

    def __init__(self, model: nn.Module, deterministic: bool) -> None:
        super().__init__("record", model, deterministic)
        self.passes: list[Routes] = []
        self._shapes: list[tuple[int, ...]] = []  # of the batch of each
        self._shape: tuple[int, ...] = ()
        self._layers: list[Tensor] = []
        self._hook: Any = None

    @property
    def routes(self) -> Routes:
        """Of the one pass; of several over the same rows (a prompt, then token by token), each row joined.

        Raises:
            ValueError: there was no pass, or passes of different numbers of rows.
        """
        if not self.passes:
            raise ValueError("the model must have run inside of routing_replay.record, got no forward pass")
        if len(self.passes) == 1:
            return self.passes[0]
        rows = {shape[0] for shape in self._shapes}
        if len(rows) > 1:
            raise ValueError(
                f"the passes must have the same number of rows, got {self._shapes}: take .passes one by one"
            )
        parts = [
            routes.split([shape[1]] * shape[0])
            for routes, shape in zip(self.passes, self._shapes, strict=True)
        ]
        return cat([part[row] for row in range(rows.pop()) for part in parts])

    def apply(self) -> Self:
        if not self.active:
            super().apply()
            self._hook = self.routers[0].block.register_forward_pre_hook(self._begin, with_kwargs=True)
        return self

    def undo(self) -> None:
        was_active = self.active
        super().undo()
        if was_active:
            self._hook.remove()

    def _begin(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not checkpointing.in_backward():
            hidden: Tensor = args[0] if args else kwargs["hidden_states"]
            self._shape, self._layers = tuple(hidden.shape[:-1]), []

    def _choose(self, index: int) -> Choose:
        def choose(scores: Tensor, free: Callable[[], Tensor]) -> Tensor:
            chosen = free()
            if not checkpointing.in_backward():  # what is computed again was recorded
                self._add(index, chosen)
            return chosen

        return choose

    def _add(self, index: int, chosen: Tensor) -> None:
        if len(self._layers) != index:
            raise RuntimeError(
                f"the routers must run one after the other, got {self.routers[index].path} "
                f"after {len(self._layers)} others"
            )
        experts, _ = self.routers[index].shape
        self._layers.append(chosen.detach().to(storage_dtype(experts)))
        if len(self._layers) == len(self.routers):
            first = self._layers[0].device  # a model may lie on several
            ids = torch.stack([layer.to(first) for layer in self._layers])
            known = torch.ones(ids.shape[1], dtype=torch.bool, device=first)
            self.passes.append(Routes(ids, known, experts))
            self._shapes.append(self._shape)
