"""vLLM's mixtures of experts on a CPU, for a ``batch_invariant`` patch: see ``_eager_experts``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from rlkernel.integrations._eager_experts import add_experts, routed
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

APPLY_PARAMETERS = (
    "self", "output", "hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation",
    "global_num_experts", "expert_map", "a1q_scale", "a2_scale", "workspace13", "workspace2",
    "expert_tokens_meta", "apply_router_weight_on_input",
)  # fmt: skip
ROUTING_PARAMETERS = ("self", "hidden_states", "router_logits", "indices_type", "input_ids=None")


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    name = "process_weights_after_loading"
    process = contract.checked(CPUUnquantizedExperts, name, ("self", "layer"))
    apply = contract.checked(CPUUnquantizedExperts, "apply", APPLY_PARAMETERS)
    route = contract.checked(CPURouter, "_compute_routing", ROUTING_PARAMETERS)
    patch.replace(CPUUnquantizedExperts, name, _unpacked, expected=process)
    patch.replace(CPUUnquantizedExperts, "apply", _apply, expected=apply)
    patch.replace(CPURouter, "_compute_routing", _routed(route), expected=route)


def strange(runner: Any) -> list[str]:
    """What a layer of experts, a ``MoERunner`` of vLLM, has beside what is served here."""
    layer, router = runner.routed_experts, runner.router
    kernel = layer.quant_method.moe_kernel
    experts = kernel and kernel.fused_experts
    found = [type(x).__name__ for x in (experts,) if not isinstance(x, CPUUnquantizedExperts)]
    found += [type(x).__name__ for x in (router,) if type(x) is not CPURouter or not _is_plain(x)]
    options = {
        "shared experts": runner.shared_experts is not None,
        "biases": layer.moe_config.has_bias,
        f"the activation {layer.activation.value}": layer.activation != MoEActivation.SILU,
        "weights on their input": layer.apply_router_weight_on_input,
        "a part of the experts": layer.expert_map is not None,
    }
    return found + [f"experts with {name}" for name, is_there in options.items() if is_there]


def _is_plain(router: Any) -> bool:
    chosen = router.use_grouped_topk or router.custom_routing_function is not None
    biased = router.e_score_correction_bias is not None or router.routed_scaling_factor != 1
    return router.scoring_func == "softmax" and not chosen and not biased


def _unpacked(self: Any, layer: Any) -> None:
    self._use_zentorch = False


def _routed(original: Callable[..., Any]) -> Callable[..., Any]:
    def _compute_routing(
        self: Any,
        hidden_states: Tensor,
        router_logits: Tensor,
        indices_type: torch.dtype | None,
        *,
        input_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        if not _is_plain(self):
            return original(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        weights, ids = routed(router_logits, self.top_k, self.renormalize)
        return weights.float(), ids

    return _compute_routing


def _apply(
    self: Any,
    output: Tensor,
    hidden_states: Tensor,
    w1: Tensor,
    w2: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    *_: Any,
    **__: Any,
) -> None:
    output.zero_()
    add_experts(output, hidden_states, w1, w2, topk_weights, topk_ids)
