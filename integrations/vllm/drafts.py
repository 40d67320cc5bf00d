"""Drafts without probabilities: what each place of a request draws, in one call of ``rlkernel.sample``.

The target's token is drawn at every place as it is without drafts, by the request's seed and the place, and
a draft stands while it is that token.  So a request with a seed has the very tokens that it has without
drafts.  Log-probabilities, ranks and likeliest tokens of all places come with the draw.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

from rlkernel.integrations.vllm import contract, positions, support
from rlkernel.integrations.vllm.adjustments import Adjusted, Places, drafted, sayable
from rlkernel.integrations.vllm.sampler import sampled_from
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "RejectionSampler.forward"
PARAMETERS = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    original = contract.checked(RejectionSampler, "forward", PARAMETERS)
    patch.replace(RejectionSampler, "forward", _forward(original, patch), expected=original)


def _forward(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def forward(
        self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        if draft_probs is not None:  # rejection_sample decides over them
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        if reason := unserved(self, sampling_metadata):
            patch.left(NAME, reason)
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        patch.count(patch.calls, NAME)
        return chained(self.sampler, metadata, logits, sampling_metadata)

    return forward


def unserved(rejection: Any, metadata: Any) -> str:
    """Why vLLM's own function takes this call; empty where it does not."""
    if type(rejection.sampler) is not Sampler:
        return f"{type(rejection.sampler).__name__} is a sampler of its own"
    if rejection.synthetic_mode:
        return "drafts are accepted by another rule: synthetic"
    if any("fly" in name and "window" in name and value for name, value in vars(rejection).items()):
        return "drafts are accepted by another rule: FLy"
    if not sayable(metadata):
        return "processors of the user, thinking budgets or ends of structured outputs change logits"
    if metadata.max_num_logprobs is not None and rejection.sampler.logprobs_mode == "processed_logits":
        return "logprobs_mode='processed_logits' asks for logits"
    if metadata.generators and not positions.known():
        return "requests have seeds, and no model runner says where their tokens stand"
    if metadata.generators and positions.late():
        return "requests have seeds, and which drafts stood before is known on the device alone"
    return ""


def chained(sampler: Any, metadata: Any, logits: Tensor, asked: Any) -> SamplerOutput:
    """Of requests with ``num_draft_tokens`` drafts each; ``logits`` has one row more for each of them."""
    device = logits.device
    places = Places.of(metadata.num_draft_tokens, metadata.draft_token_ids, device)
    z = Adjusted(logits, drafted(asked, places))
    count = len(metadata.num_draft_tokens)
    if (seeds := positions.seeds(asked.generators, count, device)) is not None:
        first = positions.positions(count, device) - places.lengths
        z.options["seeds"] = seeds[places.request]
        z.options["positions"] = first[places.request] + places.place
    support.add_options(z.options, logits)
    wants = asked.max_num_logprobs is not None
    out = sampled_from(sampler.logprobs_mode, logits, z, wants, asked.max_num_logprobs or 0, None)
    support.part(metadata.target_logits_indices, metadata.bonus_logits_indices)
    width = max(metadata.num_draft_tokens) + 1
    table = torch.full((count, width), -1, dtype=torch.int32, device=device)
    table[places.request, places.place] = out.sampled_token_ids[:, 0]
    column = torch.arange(width, device=device)
    there = column[:-1] < places.lengths[:, None]
    accepted = ((table[:, :-1] == places.drafts) & there).to(torch.int32).cumprod(1).sum(1)
    tokens = torch.where(column <= accepted[:, None], table, -1)
    logprobs = out.logprobs_tensors
    if logprobs is not None:  # in vLLM's shape: a row for each place of the widest request
        index = (places.first[:, None] + column).clamp(max=len(logits) - 1).flatten()
        logprobs = LogprobsTensors(*(x[index] for x in logprobs[:3]))
    return SamplerOutput(sampled_token_ids=tokens, logprobs_tensors=logprobs)
