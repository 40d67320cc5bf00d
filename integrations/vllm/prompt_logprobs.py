"""Prompt log-probabilities by ``rlkernel.score_tokens``, a few rows of logits at a time.

vLLM builds the logits of all prompt tokens of a request at once, and their ``log_softmax``.  Here its own
loop runs over a model that hands out hidden states in the place of logits, and over a sampler that turns them
into log-probabilities and ranks, block by block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import rlkernel
from rlkernel.integrations._likeliest import all_named
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.sampler import RANKS
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "GPUModelRunner._get_prompt_logprobs_dict"
ROWS = 128  # of logits that exist at once


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    original = contract.checked(GPUModelRunner, "_get_prompt_logprobs_dict", contract.PROMPT_PARAMETERS)
    new = _prompt_logprobs(original, patch)
    patch.replace(GPUModelRunner, "_get_prompt_logprobs_dict", new, expected=original)


def _prompt_logprobs(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def _get_prompt_logprobs_dict(self: Any, hidden_states: Tensor, num_scheduled_tokens: Any) -> Any:
        if not self.num_prompt_logprobs:
            return original(self, hidden_states, num_scheduled_tokens)
        if self.model_config.logprobs_mode in ("raw_logits", "processed_logits"):
            patch.left(NAME, f"logprobs_mode={self.model_config.logprobs_mode} asks for logits")
            return original(self, hidden_states, num_scheduled_tokens)
        patch.count(patch.calls, NAME)
        model, sampler = self.model, self.sampler
        self.model, self.sampler = _Deferred(), _Scorer(model)
        try:
            return original(self, hidden_states, num_scheduled_tokens)
        finally:
            self.model, self.sampler = model, sampler

    return _get_prompt_logprobs_dict


class _Deferred:
    """In the place of the model: its hidden states are its logits."""

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden


class _Scorer:
    """In the place of the sampler: what it is given are hidden states."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def compute_logprobs(self, hidden: Tensor) -> Tensor:
        return hidden

    def gather_logprobs(self, hidden: Tensor, num_logprobs: int, token_ids: Tensor) -> LogprobsTensors:
        blocks = [
            scored(self.model.compute_logits(rows), num_logprobs, own)
            for rows, own in zip(hidden.split(ROWS), token_ids.split(ROWS), strict=True)
        ]
        return LogprobsTensors(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def scored(logits: Tensor, num_logprobs: int, token_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Ids and log-probabilities [n, 1 + num_logprobs], the token's own first, and its rank."""
    out = rlkernel.score_tokens(
        logits,
        token_ids,
        return_logprobs=("raw",),
        top_logprobs=num_logprobs,
        ranking="raw",
        **RANKS,
    )
    assert out.raw_logprobs is not None and out.rank is not None
    ids, logprobs = token_ids[:, None], out.raw_logprobs[:, None]
    if out.top_ids is not None and out.top_logprobs is not None:
        ids = torch.cat((ids, all_named(out.top_ids, logits.shape[1])), 1)
        logprobs = torch.cat((logprobs, out.top_logprobs), 1)
    return ids.to(torch.int32), logprobs, out.rank
