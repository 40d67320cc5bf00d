"""SGLang's layers on a CPU in the arithmetic of transformers, for a ``batch_invariant`` patch.

Most operations are torch's, which ``rlkernel.batch_invariant`` serves while the patch is on.  Layers are a
kernel each: norms, whose residual is rounded before it is normalised; gated activations; rotary embeddings,
rounded after each product, as transformers does; and the attention of ``torch_native``, one call of
``attention`` for all requests of a step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import layernorm
from sglang.srt.layers.activation import GeluAndMul, SiluAndMul
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.layernorm import Gemma3RMSNorm, RMSNorm
from sglang.srt.layers.rotary_embedding import utils as rotary_utils
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.models import gemma3_causal
from torch import Tensor

import rlkernel
from rlkernel.consistency import composed
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import shown
from rlkernel.integrations.sglang import compared, contract, invariant_experts
from rlkernel.integrations.sglang.sglang_patch import SglangPatch


def plan(patch: SglangPatch) -> None:
    """Raises PatchError where SGLang is not what it must be."""
    if layernorm._is_cpu_amx_available:
        raise PatchError("batch_invariant must have torch's operations, got sgl-kernel's for AMX")
    for layer, ours in LAYERS_OF_OURS.items():
        for name in ("forward_cpu", "forward_native"):
            _replace(patch, layer, name, ours)
    _replace(patch, gemma3_causal.Gemma3TextScaledWordEmbedding, "forward", _scaled)
    turn = contract.checked(rotary_utils, name := "apply_rotary_pos_emb")
    patch.replace(gemma3_causal, name, shown(_turned_by_tables(turn), turn, "batch_invariant"), expected=turn)
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        _replace(patch, TorchNativeAttnBackend, name, _attended)
    _replace(patch, ModelRunner, "load_model", compared.checked)
    invariant_experts.plan(patch)


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


def _normed_as_gemma(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, residual: Tensor | None = None) -> Any:
        if not composed.serves(x, self.weight, *(() if residual is None else (residual,))):
            return original(self, x, residual)
        normed, summed = composed.rms_norm(
            x, self.weight.data, self.eps, residual, weight_offset=1.0, round_first=False
        )
        return normed if summed is None else (normed, summed)

    return forward


def _gated(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor) -> Tensor:
        if not composed.serves(x):
            return original(self, x)
        if isinstance(self, SiluAndMul):
            return composed.gated(x, "silu")
        return composed.gated(x, "gelu_tanh" if self.approximate == "tanh" else "gelu")

    return forward


def _scaled(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, input_ids: Tensor) -> Tensor:
        if not composed.serves(self.weight):
            return original(self, input_ids)
        rows = torch.nn.functional.embedding(input_ids, self.weight, self.padding_idx)
        return rows * torch.tensor(self.embed_scale, dtype=rows.dtype, device="cpu")

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


def _turned_by_tables(original: Callable[..., Any]) -> Callable[..., Any]:
    """Gemma's, whose tables are made for each step."""

    def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        if not composed.serves(q, k):
            return original(q, k, cos, sin, unsqueeze_dim)
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        found = []
        for x in (q, k):
            first, second = x.chunk(2, -1)
            found.append(x * cos + torch.cat((-second, first), -1) * sin)
        return tuple(found)

    return apply_rotary_pos_emb


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


LAYERS_OF_OURS: dict[type, Callable[..., Any]] = {
    RMSNorm: _normed,
    Gemma3RMSNorm: _normed_as_gemma,
    RotaryEmbedding: _turned,
    SiluAndMul: _gated,
    GeluAndMul: _gated,
}
