"""SGLang's layers on a CPU in the arithmetic of transformers, for a ``batch_invariant`` patch.

Most operations are torch's, which ``rlkernel.batch_invariant`` serves while the patch is on.  Layers are a
kernel each: norms, whose residual is rounded before it is normalised; gated activations; rotary embeddings,
rounded after each product, as transformers does; and the attention of ``torch_native``, one call of
``attention`` for all requests of a step.  A model of another kind, or with other layers, is refused, and so
are options of an engine that were not compared.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import layernorm
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.quantization.unquant import UnquantizedEmbeddingMethod, UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.model_runner import ModelRunner
from torch import Tensor

import rlkernel
from rlkernel.consistency import composed
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import shown
from rlkernel.integrations.sglang import contract
from rlkernel.integrations.sglang.sglang_patch import SglangPatch

MODELS = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# layers of SGLang that were seen to give the bits of transformers; of torch's own all are taken
LAYERS = (
    "Llama3RotaryEmbedding", "LogitsProcessor", "MergedColumnParallelLinear", "ParallelLMHead", "Pooler",
    "QKVParallelLinear", "RMSNorm", "RadixAttention", "RotaryEmbedding", "RowParallelLinear", "SiluAndMul",
    "VocabParallelEmbedding",
)  # fmt: skip
METHODS = (UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
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


def plan(patch: SglangPatch) -> None:
    """Raises PatchError where SGLang is not what it must be."""
    if layernorm._is_cpu_amx_available:
        raise PatchError("batch_invariant must have torch's operations, got sgl-kernel's for AMX")
    for layer, ours in ((RMSNorm, _normed), (RotaryEmbedding, _turned), (SiluAndMul, _gated)):
        for name in ("forward_cpu", "forward_native"):
            _replace(patch, layer, name, ours)
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        _replace(patch, TorchNativeAttnBackend, name, _attended)
    _replace(patch, ModelRunner, "load_model", _checked)


def _replace(patch: SglangPatch, owner: type, name: str, ours: Callable[..., Any]) -> None:
    original = contract.checked(owner, name)
    patch.replace(owner, name, shown(ours(original), original, "batch_invariant"), expected=original)


def _normed(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, residual: Tensor | None = None, *further: Any, **named: Any) -> Any:
        weight = self.weight.data if self.has_weight else None
        if not composed.serves(x, *(y for y in (residual, weight) if y is not None)):
            return original(self, x, residual, *further, **named)
        if any(y is not None for y in (*further, *named.values())):
            raise RuntimeError("batch_invariant must have norms of x and a residual, got further operands")
        normed, summed = composed.rms_norm(x, weight, self.variance_epsilon, residual)
        return normed if summed is None else (normed, summed)

    return forward


def _gated(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        return composed.gated(x, "silu") if composed.serves(x) else original(self, x)

    return forward


def _turned(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(
        self: Any, positions: Tensor, query: Tensor, key: Tensor, offsets: Tensor | None = None,
        *further: Any, **named: Any,
    ) -> Any:  # fmt: skip
        if offsets is not None or positions.dim() != 1 or not composed.serves(query, key):
            return original(self, positions, query, key, offsets, *further, **named)
        self._match_cos_sin_cache_dtype(query)
        q, k = (x.clone().view(len(x), -1, self.head_size) for x in (query, key))
        composed.turn(q, k, self.cos_sin_cache, positions, interleaved=not self.is_neox_style)
        return q.view(query.shape), k.view(key.shape)

    return forward


def _attended(original: Callable[..., Any]) -> Callable[..., Any]:
    """The last rows of each request attend to all of it, whose keys lie in the cache by its table."""
    signature = inspect.signature(original)

    def attended(*args: Any, **named: Any) -> Any:
        given = signature.bind(*args, **named).arguments
        if not composed.serves(query := given["query"]):
            return original(*args, **named)
        if given.get("encoder_lens") is not None or given.get("is_cross_attn"):
            raise RuntimeError("batch_invariant must have a decoder's own attention, got that of an encoder")
        lengths, window = given["seq_lens"], given.get("sliding_window_size")
        rows = given.get("extend_seq_lens", torch.ones_like(lengths))  # of a step one each
        each = zip(given["req_pool_indices"].tolist(), lengths.tolist(), strict=True)
        slots = torch.cat([given["req_to_token"][request, :length] for request, length in each]).long()
        starts = [torch.nn.functional.pad(n.cumsum(0), (1, 0)).to(torch.int32) for n in (rows, lengths)]
        found = rlkernel.attention(
            query, given["k_cache"][slots], given["v_cache"][slots], cu_seqlens_q=starts[0],
            cu_seqlens_k=starts[1], scale=given.get("scaling"), window=None if window is None else window + 1,
        )  # fmt: skip
        return given["output"].copy_(found)

    return attended


def _checked(load: Callable[..., None]) -> Callable[..., None]:
    def load_model(self: Any) -> None:
        for name, values in ARGUMENTS.items():
            if (got := getattr(self.server_args, name)) not in values:
                raise ValueError(f"batch_invariant must have {name}={values[-1]!r}, got {got!r}")
        load(self)
        if strange := _strange(self.model):
            raise ValueError(
                "batch_invariant must have layers that were compared with transformers, "
                f"got a model with {', '.join(strange)}"
            )

    return load_model


def _strange(model: Any) -> list[str]:
    """The layers that are not known, and the ways of multiplying; or the model itself."""
    found = set() if type(model).__name__ in MODELS else {type(model).__name__}
    if getattr(getattr(model, "config", None), "use_sliding_window", False):
        found.add("sliding windows")  # which SGLang's do not have
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("sglang.srt.layers") and kind.__name__ not in LAYERS:
            found.add(kind.__name__)
        method = getattr(module, "quant_method", None)
        if method is not None and type(method) not in METHODS:
            found.add(type(method).__name__)
        if kind is RMSNorm and not _is_plain(module):
            found.add("RMSNorm with options")
        if kind is RadixAttention and (module.logit_cap or module.use_irope or module.is_cross_attention):
            found.add("RadixAttention with options")
    return sorted(found)


def _is_plain(norm: Any) -> bool:
    return norm.variance_size_override is None and norm.override_orig_dtype is None and not norm.fp32_residual
