"""SGLang's mixtures of experts on a CPU, for a ``batch_invariant`` patch: see ``_eager_experts``."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers.moe import fused_moe_native, topk
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import TopK
from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
from torch import Tensor

from rlkernel.consistency import composed
from rlkernel.integrations._eager_experts import add_experts, routed
from rlkernel.integrations.sglang import contract
from rlkernel.integrations.sglang.sglang_patch import SglangPatch

# of the settings of a router and of its experts the values that were compared
ROUTER: dict[str, tuple[Any, ...]] = {
    "use_grouped_topk": (False,),
    "custom_routing_function": (None,),
    "correction_bias": (None,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (None,),
    "num_shared_topk_slots": (0,),
}
EXPERTS: dict[str, tuple[Any, ...]] = {
    "activation": ("silu",),
    "is_gated": (True,),
    "apply_router_weight_on_input": (False,),
    "no_combine": (False,),
    "routed_scaling_factor": (None,),
    "gemm1_alpha": (None,),
    "gemm1_clamp_limit": (None,),
    "swiglu_limit": (None,),
}


def plan(patch: SglangPatch) -> None:
    """Raises PatchError where SGLang is not what it must be."""
    for name in ("fused_topk", "fused_topk_native"):  # of which the engine's options choose one
        original = contract.checked(topk, name)
        patch.replace(topk, name, _routed(original), expected=original)
    original = contract.checked(fused_moe_native, "moe_forward_native")
    patch.replace(fused_moe_native, "moe_forward_native", _experts(original), expected=original)


def strange(module: Any) -> list[str]:
    """What a layer of a mixture has beside what is served here."""
    if isinstance(module, TopK):
        settings = ROUTER, module.topk_config, "a router"
    elif isinstance(module, FusedMoE):
        settings = EXPERTS, module.moe_runner_config, "experts"
    else:
        return []
    values, given, owner = settings
    found = [f"{owner} with {name}" for name, known in values.items() if getattr(given, name) not in known]
    if isinstance(module, FusedMoE):
        method = module.quant_method
        if type(method) is not UnquantizedFusedMoEMethod or method.w13_swiglu_interleaved:
            found.append(f"experts of {type(method).__name__}")
        if getattr(module, "w13_weight_bias", None) is not None:
            found.append("experts with biases")
        if module.moe_ep_size > 1 or module.moe_tp_size > 1:
            found.append("a part of the experts")
    return found


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def fused_topk(*args: Any, **named: Any) -> tuple[Tensor, Tensor]:
        bound = signature.bind(*args, **named)
        bound.apply_defaults()
        given = bound.arguments
        plain = given["scoring_func"] == "softmax" and given["correction_bias"] is None
        if not plain or not composed.serves(given["gating_output"]):
            return original(*args, **named)
        weights, ids = routed(given["gating_output"], given["topk"], given["renormalize"])
        return weights.float(), ids

    return fused_topk


def _experts(original: Callable[..., Any]) -> Callable[..., Any]:
    def moe_forward_native(layer: Any, x: Tensor, topk_output: Any, moe_runner_config: Any) -> Tensor:
        if not composed.serves(x):
            return original(layer, x, topk_output, moe_runner_config)
        weights, ids, _ = topk_output
        output = torch.zeros_like(x)
        add_experts(output, x, layer.w13_weight, layer.w2_weight, weights, ids)
        return output

    return moe_forward_native
