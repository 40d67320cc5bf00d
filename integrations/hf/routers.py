"""The routers of transformers' mixtures of experts: which classes are known, and where a model has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlkernel.integrations._contract import checked

# class of a router -> how its forward is called. Each chooses by one torch.topk over its scores of all
# experts, and returns what that chose; integrations/hf/routing_patch.py holds every call to it.
HIDDEN = ("self", "hidden_states")
CORRECTED = (*HIDDEN, "e_score_correction_bias")
ROUTERS: dict[str, tuple[str, ...]] = {
    "AXK1TopkRouter": HIDDEN,
    "AfmoeTokenChoiceRouter": (*HIDDEN, "expert_bias"),
    "Cohere2MoeTopKRouter": HIDDEN,
    "DeepseekV2TopkRouter": HIDDEN,
    "DeepseekV32TopkRouter": HIDDEN,
    "DeepseekV3TopkRouter": HIDDEN,
    "Dots1TopkRouter": HIDDEN,
    "Ernie4_5_MoeTopKRouter": HIDDEN,
    "ExaoneMoeTopkRouter": HIDDEN,
    "FlexOlmoTopKRouter": HIDDEN,
    "Glm4MoeLiteTopkRouter": HIDDEN,
    "Glm4MoeTopkRouter": HIDDEN,
    "GlmMoeDsaTopkRouter": HIDDEN,
    "GptOssTopKRouter": HIDDEN,
    "GraniteMoeSWATopKRouter": HIDDEN,
    "GraniteMoeSharedTopKRouter": HIDDEN,
    "GraniteMoeTopKRouter": HIDDEN,
    "HYV3TopKRouter": CORRECTED,
    "HunYuanMoEV1Gate": HIDDEN,
    "JambaTopKRouter": HIDDEN,
    "LagunaTopKRouter": HIDDEN,
    "Lfm2MoeTopKRouter": (*HIDDEN, "expert_bias=None"),
    "MellumTopKRouter": HIDDEN,
    "MiMoV2FlashTopkRouter": HIDDEN,
    "MiniMaxM2TopKRouter": CORRECTED,
    "MiniMaxTopKRouter": HIDDEN,
    "MixtralTopKRouter": HIDDEN,
    "OlmoeTopKRouter": HIDDEN,
    "Qwen2MoeTopKRouter": HIDDEN,
    "Qwen3MoeTopKRouter": HIDDEN,
    "Qwen3NextTopKRouter": HIDDEN,
    "Qwen3_5MoeTopKRouter": HIDDEN,
    "SolarOpenTopkRouter": HIDDEN,
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
            f"model must have routers that rlkernel knows (docs/routing_replay.md lists them), got "
            f"{type(model.get_submodule(path)).__name__} at {path or 'its root'}, whose router is not known"
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
