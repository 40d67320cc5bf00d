"""What of SGLang was compared with transformers: ``patch_sglang(batch_invariant=True)`` refuses all else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import (
    UnquantizedEmbeddingMethod,
    UnquantizedFusedMoEMethod,
    UnquantizedLinearMethod,
)
from sglang.srt.layers.radix_attention import RadixAttention

from rlkernel.integrations._same_model import check_parameters
from rlkernel.integrations.sglang import invariant_experts

MODELS = (
    "Gemma3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)  # fmt: skip
# layers of SGLang that were seen to give the bits of transformers; of torch's own all are taken
LAYERS = (
    "FusedMoE", "GeluAndMul", "Gemma3RMSNorm", "Llama3RotaryEmbedding", "LogitsProcessor",
    "MergedColumnParallelLinear", "ParallelLMHead", "Pooler", "QKVParallelLinear", "RMSNorm",
    "RadixAttention", "ReplicatedLinear", "RotaryEmbedding", "RowParallelLinear", "SiluAndMul", "TopK",
    "UnquantizedFusedMoEMethod", "VocabParallelEmbedding",
)  # fmt: skip
METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod, UnquantizedFusedMoEMethod)
# what an engine must be asked for: of each argument of a server the values that were compared
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "device": ("cpu",),
    "attention_backend": ("torch_native",),
    "prefill_attention_backend": (None, "torch_native"),
    "decode_attention_backend": (None, "torch_native"),
    "tp_size": (1,),
    "pp_size": (1,),
    "kv_cache_dtype": ("auto",),
    "quantization": (None,),
    "enable_lora": (None, False),
    "speculative_algorithm": (None,),
    "enable_torch_compile": (False,),
    "enable_fp32_lm_head": (False,),
    "rl_on_policy_target": (None,),
}

# of settings that SGLang's models pass over, with as many parameters, the values that change nothing
SETTINGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "Gemma3ForCausalLM": {
        "attn_logit_softcapping": (None,),
        "use_bidirectional_attention": (None, False),
        "tie_word_embeddings": (True,),  # a head of its own is not loaded
    },
}


def checked(load: Callable[..., None]) -> Callable[..., None]:
    def load_model(self: Any) -> None:
        for name, values in ARGUMENTS.items():
            if (got := getattr(self.server_args, name)) not in values:
                raise ValueError(f"batch_invariant must have {name}={values[-1]!r}, got {got!r}")
        load(self)
        if found := strange(self.model):
            raise ValueError(
                "batch_invariant must have layers that were compared with transformers, "
                f"got a model with {', '.join(found)}"
            )
        check_parameters(self.model, self.model_config.hf_config, "SGLang")

    return load_model


def strange(model: Any) -> list[str]:
    """The layers that are not known, and the ways of multiplying; or the model itself."""
    name, config = type(model).__name__, getattr(model, "config", None)
    found = set() if name in MODELS else {name}
    settings = SETTINGS.get(name, {}).items()
    found |= {setting for setting, known in settings if getattr(config, setting, None) not in known}
    windows = _has_windows(config)
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("sglang.srt.layers") and kind.__name__ not in LAYERS:
            found.add(kind.__name__)
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in METHODS:
            found.add(type(method).__name__)
        if kind is RMSNorm and not _is_plain(module):
            found.add("RMSNorm with options")
        if kind is RadixAttention:
            windows = windows and module.sliding_window_size in (None, -1)
            if module.logit_cap or module.use_irope or module.is_cross_attention:
                found.add("RadixAttention with options")
        found |= set(invariant_experts.strange(module))
    if windows:
        found.add("sliding windows")  # which most of SGLang's models pass over
    return sorted(found)


def _has_windows(config: Any) -> bool:
    if kinds := getattr(config, "layer_types", None):
        return "sliding_attention" in kinds
    return getattr(config, "sliding_window", None) is not None


def _is_plain(norm: Any) -> bool:
    return norm.variance_size_override is None and norm.override_orig_dtype is None and not norm.fp32_residual
