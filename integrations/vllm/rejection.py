"""vLLM's rejection sampler: which drafted tokens stand, in one call of ``rlkernel.verify_chain``.

What stands around it stays vLLM's: temperature, filters and penalties of the target's logits, the token
behind the last draft, and the log-probabilities.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler

import rlkernel
from rlkernel.integrations.vllm import contract, drafts, positions, support
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "rejection_sample"
PARAMETERS = (
    "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs",
    "target_logits", "bonus_token_ids", "sampling_metadata", "synthetic_mode=False",
    "synthetic_conditional_rates=None", "use_fp64_gumbel=False",
)  # fmt: skip
FLY = ("fly_window_size=None", "fly_entropy_threshold=None", "fly_entropy_top_k=3")  # behind them since 0.33


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    has_fly = hasattr(rejection_sampler, "compute_fly_entropy")
    original = contract.checked(rejection_sampler, NAME, PARAMETERS + (FLY if has_fly else ()))
    drafts.plan(patch)
    patch.replace_everywhere("vllm", NAME, _rejection_sample(original, patch), expected=original)


def _rejection_sample(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def rejection_sample(
        draft_token_ids: Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: Tensor,
        draft_probs: Tensor | None,
        target_logits: Tensor,
        bonus_token_ids: Tensor,
        sampling_metadata: Any,
        synthetic_mode: bool = False,
        synthetic_conditional_rates: Tensor | None = None,
        use_fp64_gumbel: bool = False,
        **fly: Any,
    ) -> Tensor:
        rule = "FLy" if fly.get("fly_window_size") is not None else "synthetic" if synthetic_mode else ""
        if reason := unserved(draft_token_ids, draft_probs, target_logits.shape[1], rule):
            patch.left(NAME, reason)
            return original(
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
                target_logits, bonus_token_ids, sampling_metadata, synthetic_mode,
                synthetic_conditional_rates, use_fp64_gumbel, **fly,
            )  # fmt: skip
        patch.count(patch.calls, NAME)
        return verified(
            draft_token_ids, num_draft_tokens, draft_probs, target_logits, bonus_token_ids, sampling_metadata
        )

    return rejection_sample


def unserved(draft_token_ids: Tensor, draft_probs: Tensor | None, vocab: int, rule: str) -> str:
    """Why vLLM's own function takes this call; empty where it does not."""
    if rule:
        return f"drafts are accepted by another rule: {rule}"
    return drafts.undistributed(draft_token_ids, draft_probs, vocab)


def verified(
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    draft_probs: Tensor | None,
    target_logits: Tensor,
    bonus_token_ids: Tensor,
    metadata: Any,
) -> Tensor:
    """[B, K + 1] int32: the tokens of each request, -1 behind the last."""
    device, rows, places = target_logits.device, len(num_draft_tokens), max(num_draft_tokens)
    lengths = torch.tensor(num_draft_tokens, device=device)
    first = lengths.cumsum(0) - lengths
    # what stands behind a row's drafts is any other row: nothing of it is kept
    index = (first[:, None] + torch.arange(places, device=device)).clamp(max=len(draft_token_ids) - 1)
    # and in the place behind the last draft is the token that vLLM has drawn
    behind = target_logits.new_zeros(rows, 1, target_logits.shape[1])
    greedy = metadata.all_greedy or metadata.temperature == rejection_sampler.GREEDY_TEMPERATURE
    seeds, start = _numbers(metadata.generators, lengths)
    support.keep_drafted(target_logits, num_draft_tokens, greedy)
    out = rlkernel.verify_chain(
        draft_token_ids[index],
        torch.cat([target_logits[index], behind], 1),
        draft_logprobs=None if draft_probs is None else draft_probs[index].log(),
        draft_lengths=lengths,
        temperature=0.0 if greedy is True else torch.where(greedy, 0.0, 1.0),
        seeds=seeds,
        positions=start,
        return_logprobs=() if draft_probs is None else ("processed",),
    )
    end = out.accepted[:, None]
    last = out.token_ids.gather(1, end).clamp(min=0)  # vLLM has no token that is none
    last = torch.where(end == lengths[:, None], bonus_token_ids.to(last.dtype).view(-1, 1), last)
    return out.token_ids.scatter(1, end, last).to(torch.int32)


def _numbers(generators: dict[int, torch.Generator], lengths: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Seeds and the position of the first place of each row."""
    if not generators:
        return None, None
    if positions.known():  # a function of the request alone, whatever was drawn before
        made = positions.seeds(generators, len(lengths), lengths.device)
        return made, positions.positions(len(lengths), lengths.device) - lengths
    low, high = -(2**63), 2**63 - 1
    made = torch.randint(low, high, lengths.shape, dtype=torch.int64, device=lengths.device)
    for row, generator in generators.items():
        if lengths[row]:  # as in vLLM, which draws nothing for a request without drafts
            made[row] = torch.randint(
                low, high, (), dtype=torch.int64, device=lengths.device, generator=generator
            )
    return made, None
