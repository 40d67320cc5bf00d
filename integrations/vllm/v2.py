"""vLLM's Model Runner V2, the default on GPUs: its draw, its scores and its prompt logprobs.

Three functions that the runner's modules import by name.  None of it has run in an engine: without a GPU vLLM
takes the other runner.  What is known is that the functions are there as they are written here, and that each
replacement gives what the formula of the one that it replaces gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample import gumbel, logprob

import rlkernel
from rlkernel.integrations._likeliest import all_named
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

SAMPLE_PARAMETERS = (
    "logits", "expanded_idx_mapping", "temperature", "seed", "pos", "apply_temperature", "is_drafting",
    "logits_cache=None", "logits_cache_col=None", "use_fp64=False",
)  # fmt: skip
SOURCE = "logits_cache_source"  # behind them since 0.32
TOKEN_PARAMETERS = ("logits", "token_ids")
TOPK_PARAMETERS = (
    "logits", "num_logprobs", "sampled_token_ids", "cu_num_logits=None", "logprob_token_ids_state=None",
    "expanded_idx_mapping=None", "max_per_req_token_ids=0", "logits_mode=False",
)  # fmt: skip
SAMPLE, TOKENS, TOPK = "gumbel_sample", "compute_token_logprobs", "compute_topk_scores"


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    has_source = SOURCE in inspect.signature(gumbel.gumbel_sample).parameters
    sample = SAMPLE_PARAMETERS + ((f"{SOURCE}=None",) if has_source else ())
    for home, name, parameters, make in (
        (gumbel, SAMPLE, sample, _gumbel_sample),
        (logprob, TOKENS, TOKEN_PARAMETERS, _token_logprobs),
        (logprob, TOPK, TOPK_PARAMETERS, _topk_scores),
    ):
        original = contract.checked(home, name, parameters)
        patch.replace_everywhere("vllm", name, make(original, patch), expected=original)


def _gumbel_sample(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def gumbel_sample(
        logits: Tensor,
        expanded_idx_mapping: Tensor,
        temperature: Tensor,
        seed: Tensor,
        pos: Tensor,
        apply_temperature: bool,
        is_drafting: bool,
        logits_cache: Tensor | None = None,
        logits_cache_col: Tensor | None = None,
        use_fp64: bool = False,
        *source: Tensor | None,
        **named_source: Tensor | None,
    ) -> Tensor:
        if is_drafting or logits_cache is not None:
            patch.left(SAMPLE, "a draft's noise and logits are those that vLLM verifies it by")
            return original(
                logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting,
                logits_cache, logits_cache_col, use_fp64, *source, **named_source,
            )  # fmt: skip
        patch.count(patch.calls, SAMPLE)
        request = expanded_idx_mapping.long()
        asked = request >= 0  # rows that pad a captured graph belong to none
        request = request.clamp(min=0)
        t = torch.where(asked, temperature[request].float(), 0.0)
        if not apply_temperature:
            t = (t != 0).float()
        # pos is that of the last token; a draw's place is that of the token that is drawn
        out = rlkernel.sample(
            logits, temperature=t, seeds=seed[request], positions=pos.long() + 1, return_logprobs=()
        )
        return out.token_ids.long().clamp(min=0)  # vLLM has no token that is none

    return gumbel_sample


def _token_logprobs(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def compute_token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
        patch.count(patch.calls, TOKENS)
        return token_logprobs(logits, token_ids)

    return compute_token_logprobs


def _topk_scores(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def compute_topk_scores(
        logits: Tensor,
        num_logprobs: int,
        sampled_token_ids: Tensor,
        cu_num_logits: list[int] | Tensor | None = None,
        logprob_token_ids_state: Any = None,
        expanded_idx_mapping: Tensor | None = None,
        max_per_req_token_ids: int = 0,
        logits_mode: bool = False,
    ) -> LogprobsTensors:
        reason = "logprobs_mode asks for logits" if logits_mode else ""
        if max_per_req_token_ids:
            reason = "requests name tokens of their own"  # it scores them by compute_token_logprobs, ours
        if reason:
            patch.left(TOPK, reason)
            return original(
                logits, num_logprobs, sampled_token_ids, cu_num_logits, logprob_token_ids_state,
                expanded_idx_mapping, max_per_req_token_ids, logits_mode,
            )  # fmt: skip
        patch.count(patch.calls, TOPK)
        ids, scores, ranks = topk_scores(logits, num_logprobs, sampled_token_ids)
        is_tensor = isinstance(cu_num_logits, Tensor)
        return LogprobsTensors(
            logprob_token_ids=ids,
            logprobs=scores,
            selected_token_ranks=ranks,
            cu_num_generated_tokens=None if is_tensor else cu_num_logits,
            cu_num_generated_tokens_tensor=cu_num_logits if is_tensor else None,
        )

    return compute_topk_scores


def token_logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """log_softmax of each row at its tokens, [n, k] fp32."""
    ids = token_ids.long()
    out = rlkernel.score_tokens(logits, ids[:, 0], return_logprobs=(), ranking="raw", logprob_token_ids=ids)
    assert out.id_logprobs is not None
    return out.id_logprobs.float()


def topk_scores(logits: Tensor, count: int, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens and the likeliest ones beside them, [n, 1 + count], their logprobs, the tokens' ranks."""
    ids = token_ids.long()[:, None]
    out = rlkernel.score_tokens(
        logits, ids[:, 0], return_logprobs=("raw",), ranking="raw", top_logprobs=count, return_rank=True,
        rank_ties="max",
    )  # fmt: skip
    assert out.raw_logprobs is not None and out.rank is not None
    scores = out.raw_logprobs.float()[:, None]
    if count:
        assert out.top_ids is not None and out.top_logprobs is not None
        ids = torch.cat([ids, all_named(out.top_ids.long(), logits.shape[1])], 1)
        scores = torch.cat([scores, out.top_logprobs.float()], 1)
    return ids, scores, out.rank
