"""What rlkernel takes vLLM to be: its versions, its functions and how they are called."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlkernel.integrations import _contract
from rlkernel.integrations._patch import PatchError

SUPPORTED = ">=0.31,<0.34"  # 0.32.0 and 0.31.0 run in CI; 0.33 has the same contracts

FORWARD_PARAMETERS = (
    "self", "logits", "sampling_metadata", "predict_bonus_token=False", "logprobs_mode_override=None",
)  # fmt: skip
SAMPLE_PARAMETERS = ("self", "logits", "spec_decode_metadata")
BOOKKEEPING_PARAMETERS = (
    "self", "scheduler_output", "sampler_output", "logits", "hidden_states", "num_scheduled_tokens",
)  # fmt: skip
SAMPLE_TOKENS_PARAMETERS = ("self", "grammar_output")
UPDATE_PARAMETERS = ("self", "scheduler_output", "model_runner_output")
PROMPT_PARAMETERS = ("self", "hidden_states", "num_scheduled_tokens")

# All that a batch may ask of a sampler: a field that is not among these would be passed over.
METADATA = (
    "temperature", "all_greedy", "all_random", "top_p", "top_k", "generators", "max_num_logprobs",
    "no_penalties", "prompt_token_ids", "frequency_penalties", "presence_penalties", "repetition_penalties",
    "output_token_ids", "allowed_token_ids_mask", "bad_words_token_ids", "logitsprocs", "logprob_token_ids",
    "spec_token_ids", "thinking_budget_state_holder",
)  # fmt: skip


def require_version(strict: bool) -> None:
    """Raises:
    ImportError: vLLM is not installed. PatchError: its version is one that has not been run.
    """
    _contract.installed("vLLM", SUPPORTED, strict)


def checked(owner: Any, name: str, parameters: tuple[str, ...]) -> Any:
    """vLLM's function ``owner.name``, which must take ``parameters`` with these defaults."""
    return _contract.checked(owner, name, parameters, "vLLM", SUPPORTED)


def check_metadata(metadata: Any) -> None:
    """``SamplingMetadata`` must have the fields that the sampler here reads, and no other."""
    found = tuple(field.name for field in dataclasses.fields(metadata))
    if found != METADATA:
        raise PatchError(f"{metadata.__name__} must have the fields {METADATA}, got {found}")
