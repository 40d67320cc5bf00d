"""vLLM's layers on a CPU in the arithmetic of transformers, for a ``batch_invariant`` patch.

Most operations are torch's, which ``rlkernel.batch_invariant`` serves while the patch is on.  Layers are a
kernel each, of the same bits: products, whose weights vLLM would pack; norms, whose residual is rounded
before it is normalised; gated activations; and rotary embeddings, rounded after each product, as transformers
does.  A model with layers of another kind is refused, and so are options of an engine that were not compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.activation import GeluAndMul, SiluAndMul
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.platforms import current_platform
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from rlkernel.consistency import composed
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._same_model import check_parameters
from rlkernel.integrations.vllm import contract, invariant_experts
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

# whose order of operations was compared with transformers, layer by layer and as a whole
MODELS = (
    "Gemma2ForCausalLM", "Gemma3ForCausalLM", "GemmaForCausalLM", "Glm4ForCausalLM", "GraniteForCausalLM",
    "LlamaForCausalLM", "MistralForCausalLM", "Phi3ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM", "StablelmForCausalLM",
)  # fmt: skip
# layers of vLLM that were seen to give the bits of transformers; of torch's own all are taken
LAYERS = (
    "ApplyRotaryEmb", "Attention", "GateLinear", "GeluAndMul", "GemmaRMSNorm", "Llama3RotaryEmbedding",
    "LogitsProcessor", "MergedColumnParallelLinear", "MoERunner", "ParallelLMHead", "QKVParallelLinear",
    "RMSNorm", "RotaryEmbedding", "RoutedExperts", "RowParallelLinear", "SiluAndMul",
    "UnquantizedFusedMoEMethod", "VocabParallelEmbedding",
)  # fmt: skip
METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
WITHOUT = ("Attention", "MoERunner", "RoutedExperts")  # which keep another kind of method, or none

ISA_PARAMETERS = ("dtype", "block_size", "head_size=None", "kv_cache_dtype=None")


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    if not current_platform.is_cpu():
        raise PatchError("batch_invariant must be served on a CPU, got another platform of vLLM")
    norm = contract.checked(RMSNorm, "forward_native", ("self", "x", "residual=None"))
    gemma = contract.checked(GemmaRMSNorm, "forward_native", ("self", "x", "residual=None"))
    rotary = contract.checked(RotaryEmbedding, "forward_cpu", ("self", "positions", "query", "key=None"))
    load = contract.checked(CPUModelRunner, "load_model", ("self", "load_dummy_weights=False"))
    isa = contract.checked(cpu_attn, "_get_attn_isa", ISA_PARAMETERS)
    patch.replace(cpu_attn, "_get_attn_isa", _without_amx(isa), expected=isa)
    patch.replace(RMSNorm, "forward_native", _normed, expected=norm)
    patch.replace(GemmaRMSNorm, "forward_native", _normed, expected=gemma)
    patch.replace(RotaryEmbedding, "forward_cpu", _turned, expected=rotary)
    for activation in (SiluAndMul, GeluAndMul):
        gated = contract.checked(activation, "forward_cpu", ("self", "x"))
        patch.replace(activation, "forward_cpu", _gated, expected=gated)
    patch.replace(CPUModelRunner, "load_model", _checked(load), expected=load)
    for method in METHODS:
        name = "process_weights_after_loading"
        process = contract.checked(method, name, ("self", "layer"))
        patch.replace(method, name, _multiplied, expected=process)
    invariant_experts.plan(patch)


def _without_amx(original: Callable[..., str]) -> Callable[..., str]:
    """Of AMX keys lie in an order of their own, which our attention does not read."""

    def _get_attn_isa(*args: Any, **options: Any) -> str:
        return "vec" if (found := original(*args, **options)) == "amx" else found

    return _get_attn_isa


def _multiplied(self: Any, layer: Any) -> None:
    multiply = composed.Linear()

    def cpu_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if composed.serves(x, weight):
            return multiply(x, weight, bias)
        return torch.nn.functional.linear(x, weight, bias)

    layer.cpu_linear = cpu_linear


def _normed(self: Any, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
    gemma = isinstance(self, GemmaRMSNorm)
    weight = self.weight.data if gemma or self.has_weight else None
    if composed.serves(x, *(y for y in (residual, weight) if y is not None)):
        offset = 1.0 if gemma else 0.0
        normed, summed = composed.rms_norm(
            x, weight, self.variance_epsilon, residual, weight_offset=offset, round_first=not gemma
        )
        return normed if summed is None else (normed, summed)
    if residual is None:
        return _rms_norm(self, x)
    residual = x + residual
    return _rms_norm(self, residual), residual


def _rms_norm(layer: Any, x: Tensor) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + layer.variance_epsilon)
    if isinstance(layer, GemmaRMSNorm):
        return (wide * (1.0 + layer.weight.data.float())).to(x.dtype)
    return layer.weight.data * wide.to(x.dtype) if layer.has_weight else wide.to(x.dtype)


def _gated(self: Any, x: Tensor) -> Tensor:
    if not composed.serves(x):
        return self.forward_native(x)
    if isinstance(self, SiluAndMul):
        return composed.gated(x, "silu")
    return composed.gated(x, "gelu_tanh" if self.approximate == "tanh" else "gelu")


def _turned(
    self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    if not composed.serves(query):
        return self.forward_native(positions, query, key)
    table = self._match_cos_sin_cache_dtype(query)
    heads = query.view(len(query), -1, self.head_size)
    key_heads = None if key is None else key.view(len(key), -1, self.head_size)
    composed.turn(heads, key_heads, table, positions, interleaved=not self.is_neox_style)
    return query, key


def _checked(load: Callable[..., None]) -> Callable[..., None]:
    def load_model(self: Any, load_dummy_weights: bool = False) -> None:
        if reason := _config_reason(self.vllm_config):
            raise ValueError(f"batch_invariant must have {reason}")
        load(self, load_dummy_weights)
        if strange := _strange(self.model):
            raise ValueError(
                "batch_invariant must have layers that were compared with transformers, "
                f"got a model with {', '.join(strange)}"
            )
        check_parameters(self.model, self.vllm_config.model_config.hf_config, "vLLM")

    return load_model


def _config_reason(config: Any) -> str:
    if not config.model_config.enforce_eager:
        return "enforce_eager=True, got a model that vLLM compiles"
    if config.parallel_config.world_size > 1:
        return f"one process for a model, got {config.parallel_config.world_size}"
    if config.lora_config is not None:
        return "no LoRA: merge it into the weights"
    if config.speculative_config is not None:
        return "no speculative decoding"
    if config.quant_config is not None:
        return f"weights that are not quantised, got {type(config.quant_config).__name__}"
    if config.cache_config.cache_dtype != "auto":
        return f"a cache of the model's dtype, got {config.cache_config.cache_dtype}"
    return ""


def _strange(model: Any) -> list[str]:
    """The layers that are not known, and the ways of multiplying; or the model itself."""
    found = set() if type(model).__name__ in MODELS else {type(model).__name__}
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("vllm.model_executor.layers") and kind.__name__ not in LAYERS:
            found.add(kind.__name__)
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in METHODS and kind.__name__ not in WITHOUT:
            found.add(type(method).__name__)
        if kind is RMSNorm and module.variance_size_override is not None:
            found.add("RMSNorm over a part of its row")
        if kind is MoERunner:
            found |= set(invariant_experts.strange(module))
    return sorted(found)
