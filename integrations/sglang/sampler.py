"""SGLang's sampler: filters, draw and log-probabilities of a step in one call of ``rlkernel.sample``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.layers import sampler as home
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.logprob_processor import LogprobResult
from sglang.srt.layers.sampler import Sampler
from sglang.srt.runtime_context import get_exec
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

import rlkernel
from rlkernel.calls.sampling import SampleOutput
from rlkernel.integrations._likeliest import all_named
from rlkernel.integrations._replacing import shown, unfit_logits
from rlkernel.integrations.sglang import contract, deterministic, given_ids
from rlkernel.integrations.sglang.sglang_patch import SglangPatch

NAME = "Sampler.forward"
LEAST = torch.finfo(torch.float32).min  # which SGLang writes for a log-probability of -inf


def plan(patch: SglangPatch) -> None:
    """Raises PatchError where SGLang is not what it must be."""
    contract.check_fields(SamplingBatchInfo)
    contract.check_fields(LogprobResult)
    for name in ("_preprocess_logits", "_sync_token_ids_across_tp"):  # which are called
        contract.checked(Sampler, name)
    contract.checked(home, "register_sampler_backend")
    forward = contract.checked(Sampler, "forward")
    patch.replace(Sampler, "forward", shown(_forward(forward, patch), forward, "sample"), expected=forward)


def _forward(original: Callable[..., Any], patch: SglangPatch) -> Callable[..., Any]:
    def forward(
        self: Any,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: list[int],
        token_ids_logprobs: list[list[int] | None],
        positions: Tensor,
        *,
        logprob_logits: Tensor | None = None,
    ) -> Tensor:
        step = _Step(sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
        reason = step.unserved(self, logits_output.next_token_logits, patch)
        if logprob_logits is not None:
            reason = "watermarks, which have logits of their own"
        if not reason and sampling_info.is_all_greedy and not return_logprob:
            reason = "argmax alone, which is SGLang's already"
        if reason:
            patch.left(NAME, reason, quiet=reason.startswith("argmax"))
            given = () if logprob_logits is None else (("logprob_logits", logprob_logits),)
            return original(
                self, logits_output, sampling_info, return_logprob, top_logprobs_nums, token_ids_logprobs,
                positions, **dict(given),
            )  # fmt: skip
        patch.count(patch.calls, NAME)
        # processors of requests, and NaN made a number where SGLang is asked to
        logits = self._preprocess_logits(logits_output.next_token_logits, sampling_info)
        out = step.drawn(logits)
        tokens = out.token_ids.clamp(min=0)  # of a row without a distribution 0: SGLang has none that is none
        tokens = tokens.to(torch.int64 if sampling_info.is_all_greedy else torch.int32)
        if return_logprob:
            step.result(out, logits.shape[-1]).write_output_to(logits_output)
        self._sync_token_ids_across_tp(tokens, sampling_info)
        return tokens

    return forward


class _Step:
    """What is asked of one step of a batch."""

    def __init__(
        self, info: Any, wants: bool, tops: list[int], given: list[list[int] | None], positions: Tensor
    ) -> None:
        self.info, self.wants, self.positions = info, wants, positions
        self.tops = given_ids.counts(tops) if wants and tops else []
        self.given = given if wants and given_ids.asks(given) else None

    def unserved(self, sampler: Any, logits: Any, patch: SglangPatch) -> str:
        """Why SGLang's own sampler takes this step; empty where it does not."""
        if type(sampler) is not Sampler:
            return f"{type(sampler).__name__} is a sampler of its own"
        if sampler.rl_on_policy_target is not None:
            return "rl_on_policy_target, which wants the bits of a trainer's torch"
        if sampler.use_ascend_backend:
            return "the sampling backend 'ascend'"
        if self.info.sampling_mask_batch_indices is not None:
            return "return_sampling_mask"
        if self.wants and (reason := deterministic.left(patch, "prompt_logprobs")):
            return reason
        return unfit_logits(logits) or given_ids.outside(self.given, logits.shape[-1])

    @property
    def kind(self) -> Any:
        """Of which distribution log-probabilities are."""
        return "raw" if self.info.is_all_greedy or home.SGLANG_RETURN_ORIGINAL_LOGPROB else "tempered"

    def drawn(self, logits: Tensor) -> SampleOutput:
        asked: dict[str, Any] = {"return_logprobs": ()}
        if self.wants:
            asked = {"return_logprobs": (self.kind,), "ranking": self.kind}
            asked["top_logprobs"] = min(max(self.tops, default=0), logits.shape[-1])
        if self.given is not None:
            asked["logprob_token_ids"] = given_ids.table(self.given, logits.device)
        return rlkernel.sample(logits, **self._options(), **asked)

    def _options(self) -> dict[str, Any]:
        info = self.info
        if info.is_all_greedy:
            return {"temperature": 0.0, "seeds": 0}  # nothing is drawn
        options: dict[str, Any] = {"temperature": info.temperatures.view(-1), "filter_order": self._order()}
        if info.need_top_k_sampling:
            options["top_k"] = info.top_ks
        if info.need_top_p_sampling:
            options["top_p"] = info.top_ps
        if info.need_min_p_sampling:
            options["min_p"] = info.min_ps
        if info.sampling_seed is not None:
            options |= {"seeds": info.sampling_seed, "positions": self.positions}
        return options

    def _order(self) -> str:
        """What top_p takes its share of; SGLang's backends differ where there is a min_p."""
        renormalises = get_exec().kernel.sampling_backend in ("flashinfer", "intel_xpu")
        return "top_k_first" if renormalises and self.info.need_min_p_sampling else "joint"

    def result(self, out: SampleOutput, vocab: int) -> LogprobResult:
        found = LogprobResult()
        found.token_logprobs = _finite(out.raw_logprobs if self.kind == "raw" else out.tempered_logprobs)
        if out.top_ids is not None and any(self.tops):
            ids, values = all_named(out.top_ids, vocab).long(), _finite(out.top_logprobs)
            found.top_logprobs_val = [row[:k] for row, k in zip(values, self.tops, strict=True)]
            found.top_logprobs_idx = [row[:k] for row, k in zip(ids, self.tops, strict=True)]
        if self.given is not None:
            each = [ids or [] for ids in self.given]
            values = _finite(out.id_logprobs)
            found.token_ids_logprobs_val = [row[: len(x)] for row, x in zip(values, each, strict=True)]
            found.token_ids_logprobs_idx = each
        return found


def _finite(logprobs: Tensor | None) -> Tensor:
    assert logprobs is not None
    return logprobs.clamp(min=LEAST)  # NaN stays
