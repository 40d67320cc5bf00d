"""The routers of transformers' mixtures of experts: which classes are known, and where a model has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlkernel.integrations._contract import checked

# class of a router -> how its forward is called. Each chooses by one torch.topk over its scores of all
# experts, and returns what that chose; integrations/hf/routing.py holds every call to it.
HIDDEN = ("self", "hidden_states")
ROUTERS: dict[str, tuple[str, ...]] = {
    "MixtralTopKRouter": HIDDEN,
    "Qwen3MoeTopKRouter": HIDDEN,
}
SUPPORTED = ">=5.16,<5.24"  # of transformers, as of packed attention


@dataclass(frozen=True)
class Router:
    """A router, where the model has it, and the block of which it is a part."""

    path: str
    module: Any
    block: nn.Module

    @property
    def hidden_layer(self) -> int:
        """The number of the hidden layer, those without a router counted as well."""
        numbers = re.findall(r"\.layers\.(\d+)\.", f".{self.path}.")
        if not numbers:
            raise ValueError(f"the path of a router must have its layer's number, got {self.path}")
        return int(numbers[-1])

    @property
    def shape(self) -> tuple[int, int]:
        """(experts, chosen of them for a token)."""
        return int(self.module.num_experts), int(self.module.top_k)


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model in the order of its layers.

    Raises:
        ValueError: the model has none, or some that are not known; both names stand in the message.
        PatchError: a router is called otherwise than those of the supported transformers.
    """
    blocks = {
        path.rpartition(".")[0]
        for path, module in model.named_modules()
        if path.rpartition(".")[2] == "experts" or type(module).__name__.endswith("Experts")
    }
    found = []
    for path, module in model.named_modules():
        if kind := _known(module):
            checked(kind, "forward", ROUTERS[kind.__name__], "transformers", SUPPORTED)
            block = path.rpartition(".")[0]
            found.append(Router(path, module, model.get_submodule(block)))
            blocks.discard(block)
    if blocks:
        path = min(blocks)
        raise ValueError(
            f"model must route by {', '.join(ROUTERS)}, got {type(model.get_submodule(path)).__name__} at "
            f"{path or 'its root'}, whose router is not known"
        )
    if not found:
        raise ValueError(
            f"model must be a mixture of experts, got {type(model).__name__}, which has no router"
        )
    shapes = {router.shape for router in found}
    if len(shapes) > 1:
        raise ValueError(f"model must have the same number of experts in every layer, got {sorted(shapes)}")
    return found


def moe_layers(model: nn.Module) -> list[int]:
    """The numbers of the hidden layers that have a router: where an engine, which counts all, has them."""
    return [router.hidden_layer for router in routers(model)]


def _known(module: nn.Module) -> type | None:
    """The class of transformers by which a router is known; FSDP2 makes a class of its own of it."""
    for kind in type(module).__mro__:
        if kind.__name__ in ROUTERS and kind.__module__.startswith("transformers."):
            return kind
    return None
