"""Which drafts of a step stand and what follows them: all places of its requests in one call.

Of drafts without probabilities the target's token is drawn at every place as it is without drafts, by the
request's seed and the place, and a draft stands while it is that token.  So a request with a seed has the
very tokens that it has without drafts.  Drafts with probabilities go through ``rlkernel.verify_chain``, by
the request's seed and the place as well.  Log-probabilities, ranks and likeliest tokens of all places come
with the draw, or from one call of ``rlkernel.score_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler

import rlkernel
from rlkernel.integrations.vllm import contract, positions, support
from rlkernel.integrations.vllm.adjustments import Adjusted, Places, drafted, sayable, temperature, written
from rlkernel.integrations.vllm.sampler import sampled_from
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "RejectionSampler.forward"
PARAMETERS = ("self", "metadata", "draft_probs", "logits", "sampling_metadata")
SLACK = 1e-3  # of a sum of probabilities


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    original = contract.checked(RejectionSampler, "forward", PARAMETERS)
    patch.replace(RejectionSampler, "forward", _forward(original, patch), expected=original)


def _forward(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def forward(
        self: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, sampling_metadata: Any
    ) -> Any:
        if reason := unserved(self, metadata, draft_probs, sampling_metadata, logits.shape[1]):
            patch.left(NAME, reason)
            return original(self, metadata, draft_probs, logits, sampling_metadata)
        patch.count(patch.calls, NAME)
        return chained(self.sampler, metadata, draft_probs, logits, sampling_metadata)

    return forward


def unserved(rejection: Any, spec: Any, draft_probs: Tensor | None, metadata: Any, vocab: int) -> str:
    """Why vLLM's own function takes this call; empty where it does not."""
    if type(rejection.sampler) is not Sampler:
        return f"{type(rejection.sampler).__name__} is a sampler of its own"
    if rejection.synthetic_mode:
        return "drafts are accepted by another rule: synthetic"
    if any("fly" in name and "window" in name and value for name, value in vars(rejection).items()):
        return "drafts are accepted by another rule: FLy"
    if not sayable(metadata):
        return "processors of the user, thinking budgets or ends of structured outputs change logits"
    if metadata.generators and not positions.known():
        return "requests have seeds, and no model runner says where their tokens stand"
    return undistributed(spec.draft_token_ids, draft_probs, vocab)


def undistributed(draft_token_ids: Tensor, draft_probs: Tensor | None, vocab: int) -> str:
    """Why these are not the distributions that drafts were drawn from; empty where they are."""
    if draft_probs is None:
        return ""
    if draft_probs.shape[1] != vocab:
        return "draft_probs are of another vocabulary"
    total = draft_probs.sum(1)
    given = (total - 1).abs() <= SLACK
    if not bool((given | ((draft_token_ids < 0) & (total == 0))).all()):
        return "draft_probs must be distributions: of others vLLM has a rule of its own"
    return ""


def chained(
    sampler: Any, metadata: Any, draft_probs: Tensor | None, logits: Tensor, asked: Any
) -> SamplerOutput:
    """Of requests with ``num_draft_tokens`` drafts each; ``logits`` has one row more for each of them."""
    device, mode = logits.device, sampler.logprobs_mode
    places = Places.of(metadata.num_draft_tokens, metadata.draft_token_ids, device)
    options = drafted(asked, places)
    count, width = len(metadata.num_draft_tokens), max(metadata.num_draft_tokens) + 1
    wants, column = asked.max_num_logprobs is not None, torch.arange(width, device=device)
    seeds = positions.seeds(asked.generators, count, device)
    first = None if seeds is None else positions.positions(count, device) - places.lengths
    # a row for each place of the widest request: behind those of a request any other
    index = (places.first[:, None] + column).clamp(max=len(logits) - 1)
    if draft_probs is None:
        as_logits = wants and mode == "processed_logits"
        z = written(logits, options) if as_logits else Adjusted(logits, options)
        if seeds is not None and first is not None:
            z.options["seeds"] = seeds[places.request]
            z.options["positions"] = first[places.request] + places.place
    else:
        z = written(logits, options)
        table = _verified(z.logits[index], places, draft_probs, asked, seeds, first)
        z = z._replace(tokens=table[places.request, places.place].clamp(min=0))
    support.add_options(z.options, z.logits)
    out = sampled_from(mode, logits, z, wants, asked.max_num_logprobs or 0, None)
    support.part(metadata.target_logits_indices, metadata.bonus_logits_indices)
    if draft_probs is None:
        table = torch.full((count, width), -1, dtype=torch.int32, device=device)
        table[places.request, places.place] = out.sampled_token_ids[:, 0]
        there = column[:-1] < places.lengths[:, None]
        accepted = ((table[:, :-1] == places.drafts) & there).to(torch.int32).cumprod(1).sum(1)
        table = torch.where(column <= accepted[:, None], table, -1)
    logprobs = out.logprobs_tensors
    if logprobs is not None:
        logprobs = LogprobsTensors(*(x[index.flatten()] for x in logprobs[:3]))
    return SamplerOutput(sampled_token_ids=table.to(torch.int32), logprobs_tensors=logprobs)


def _verified(
    logits: Tensor, places: Places, draft_probs: Tensor, asked: Any, seeds: Any, first: Any
) -> Tensor:
    """[B, K + 1]: the tokens of each request, -1 behind the last; ``logits`` [B, K + 1, V]."""
    of_draft = (places.first - torch.arange(len(places.first), device=logits.device))[:, None]
    of_draft = of_draft + torch.arange(logits.shape[1] - 1, device=logits.device)
    out = rlkernel.verify_chain(
        places.drafts,
        logits,
        draft_logprobs=draft_probs[of_draft.clamp(max=len(draft_probs) - 1)].log(),
        draft_lengths=places.lengths,
        temperature=temperature(asked),
        top_k=asked.top_k,
        top_p=asked.top_p,
        seeds=seeds,
        positions=first,
        return_logprobs=("processed",),
    )
    end = out.accepted[:, None]
    return out.token_ids.scatter(1, end, out.token_ids.gather(1, end).clamp(min=0))  # none is no token
