"""The routers of transformers' mixtures of experts: which classes are known, and where a model has them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from rlkernel.integrations._contract import checked
from rlkernel.integrations.hf.registration import SUPPORTED

# class of a router -> how its forward is called. Each chooses by one torch.topk over its scores of all
# experts, and returns what that chose; integrations/hf/routing_patch.py holds every call to it.
HIDDEN = ("self", "hidden_states")
CORRECTED = (*HIDDEN, "e_score_correction_bias")
ROUTERS: dict[str, tuple[str, ...]] = {
    "AXK1TopkRouter": HIDDEN,
    "AXK2TopkRouter": HIDDEN,
    "AfmoeTokenChoiceRouter": (*HIDDEN, "expert_bias"),
    "AriaTextTopKRouter": HIDDEN,
    "BailingHybridTopkRouter": HIDDEN,
    "Cohere2MoeTopKRouter": HIDDEN,
    "DeepseekOcr2TextTopkRouter": HIDDEN,
    "DeepseekV2TopkRouter": HIDDEN,
    "DeepseekV32TopkRouter": HIDDEN,
    "DeepseekV3TopkRouter": HIDDEN,
    "Dots1TopkRouter": HIDDEN,
    "Ernie4_5_MoeTopKRouter": HIDDEN,
    "ExaoneMoeTopkRouter": HIDDEN,
    "FlexOlmoTopKRouter": HIDDEN,
    "FlintTopKRouter": HIDDEN,
    "Gemma4TextRouter": HIDDEN,
    "Glm4MoeLiteTopkRouter": HIDDEN,
    "Glm4MoeTopkRouter": HIDDEN,
    "Glm4vMoeTextTopkRouter": HIDDEN,
    "Glm5NextTextTopkRouter": HIDDEN,
    "GlmMoeDsaTopkRouter": HIDDEN,
    "GptOssTopKRouter": HIDDEN,
    "GraniteMoeHybridTopKRouter": HIDDEN,
    "GraniteMoeSWATopKRouter": HIDDEN,
    "GraniteMoeSharedTopKRouter": HIDDEN,
    "GraniteMoeTopKRouter": HIDDEN,
    "HYV3TopKRouter": CORRECTED,
    "HYV4TopkRouter": HIDDEN,
    "HYV4VLTopkRouter": HIDDEN,
    "HunYuanMoEV1Gate": HIDDEN,
    "Inkling2TopKRouter": HIDDEN,
    "InklingTopkRouter": HIDDEN,
    "JambaTopKRouter": HIDDEN,
    "KimiLinearTopkRouter": HIDDEN,
    "Kolibri1TopKRouter": HIDDEN,
    "LagunaTopKRouter": HIDDEN,
    "LaraMiniTopKRouter": HIDDEN,
    "Lfm2MoeTopKRouter": (*HIDDEN, "expert_bias=None"),
    "MellumTopKRouter": HIDDEN,
    "MiMoV2FlashTopkRouter": HIDDEN,
    "MiniMaxM2TopKRouter": CORRECTED,
    "MiniMaxM3VLTopKRouter": HIDDEN,
    "MiniMaxTopKRouter": HIDDEN,
    "Mistral4TopkRouter": HIDDEN,
    "MistralLarge4TextTopkRouter": HIDDEN,
    "MixtralTopKRouter": HIDDEN,
    "NemotronHTopkRouter": HIDDEN,
    "OlmoeTopKRouter": HIDDEN,
    "Qwen2MoeTopKRouter": HIDDEN,
    "Qwen3MoeTopKRouter": HIDDEN,
    "Qwen3NextTopKRouter": HIDDEN,
    "Qwen3OmniMoeThinkerTextTopKRouter": HIDDEN,
    "Qwen3VLMoeTextTopKRouter": HIDDEN,
    "Qwen3_5MoeTopKRouter": HIDDEN,
    "Qwen4ExpTextTopKRouter": HIDDEN,
    "SolarOpenTopkRouter": HIDDEN,
    "Step3p7TopKRouter": HIDDEN,
    "UnlimitedOcrTextTopkRouter": HIDDEN,
}


@dataclass(frozen=True)
class Router:
    """The router of a layer, where the model has it, and the block in which it stands beside the experts."""

    path: str
    modules: tuple[Any, ...]  # one; or PEFT's copy beside the original, of which one runs
    block: nn.Module

    @property
    def module(self) -> Any:
        return self.modules[0]

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
        if not hasattr(self.module, "top_k"):  # Gemma 4's are in its configuration
            return int(self.module.config.num_experts), int(self.module.config.top_k_experts)
        return int(self.module.num_experts), int(self.module.top_k)


def routers(model: nn.Module) -> list[Router]:
    """The routers of a model in the order of its layers.

    Raises:
        ValueError: the model has none, or some that are not known, whose block is named.
        PatchError: a router is called otherwise than those of the supported transformers.
    """
    modules = dict(model.named_modules())
    blocks: dict[str, list[str]] = {}
    for path, module in modules.items():
        if kind := _known(module):
            checked(kind, "forward", ROUTERS[kind.__name__], "transformers", SUPPORTED)
            blocks.setdefault(_block(path, modules), []).append(path)
    for path, module in modules.items():
        parent, _, name = path.rpartition(".")
        is_experts = name == "experts" or type(module).__name__.endswith("Experts")
        if is_experts and not any(path.startswith(f"{block}.") for block in blocks):
            raise ValueError(
                f"model must have routers that rlkernel knows (docs/routing_replay.md lists them), got "
                f"{type(modules[parent]).__name__} at {parent or 'its root'}, whose router is not known"
            )
    if not blocks:
        raise ValueError(
            f"model must be a mixture of experts, got {type(model).__name__}, which has no router"
        )
    found = [
        Router(paths[0], tuple(modules[path] for path in paths), modules[block])
        for block, paths in blocks.items()
    ]
    shapes = {router.shape for router in found}
    if len(shapes) > 1:
        raise ValueError(f"model must have the same number of experts in every layer, got {sorted(shapes)}")
    return found


def _block(router: str, modules: dict[str, nn.Module]) -> str:
    """The path of the module around a router that has the experts; PEFT's wrappers may stand between."""
    parents = [router := router.rpartition(".")[0] for _ in router.split(".")]
    return next((path for path in parents if f"{path}.experts" in modules), parents[0])


def moe_layers(model: nn.Module) -> list[int]:
    """The numbers of the hidden layers that have a router: where an engine, which counts all, has them."""
    return [router.hidden_layer for router in routers(model)]


def _known(module: nn.Module) -> type | None:
    """The class of transformers by which a router is known; FSDP2 makes a class of its own of it."""
    for kind in type(module).__mro__:
        if kind.__name__ in ROUTERS and kind.__module__.startswith("transformers."):
            return kind
    return None
