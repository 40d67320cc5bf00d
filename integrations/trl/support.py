"""The tokens that the filters of a rollout kept, from vLLM's outputs to the passes that score it.

TRL has no place for them: its trainers hand on ids and log-probabilities.  But which tokens were kept at a
place follows from the tokens in front, so what vLLM has said of a sample is found again by the sample's own
tokens, whatever TRL has sorted, padded, shuffled, split or appended in between.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl import contract
from rlkernel.integrations.vllm import support_of

NOT_SENT = "vLLM sent no kept tokens with a sample"
NOT_KNOWN = (
    "the kept tokens of a place are not known: they were more than there is room for, or drawn by vLLM"
)
NOT_FOUND = "a sample is none that vLLM has generated since"
ADVICE = "such tokens are scored over the whole vocabulary"


class Kept(NamedTuple):
    """Of one answer: what was kept for the tokens behind ``start``, those of the prompt."""

    start: int
    ids: Tensor  # int32, of all places one after another
    counts: Tensor  # int64 [places], 0: all tokens


class Rows(NamedTuple):
    """``support_ids`` and ``support_offsets`` of the rows of a head."""

    ids: Tensor
    offsets: Tensor

    def options(self) -> dict[str, Any]:
        return {"support_ids": self.ids, "support_offsets": self.offsets}


class Support:
    """The part of a ``TrlPatch`` that scores samples over the tokens that their rollout could draw."""

    def __init__(self, patch: CountedPatch, room: int) -> None:
        self.patch = patch
        self.room = room
        self._samples: dict[str, dict[tuple[int, ...], Kept]] = {"train": {}, "eval": {}}
        self._into = "train"
        self._passes: Iterator[tuple[Tensor, Tensor, int]] = iter(())

    def plan(self) -> None:
        """Raises PatchError where TRL is not what it must be."""
        import trl.generation.vllm_generation as generation

        extract = contract.checked(generation, contract.EXTRACT)
        self.patch.replace(generation, contract.EXTRACT, _noting(extract, self), expected=extract)
        for trainer in contract.trainers():
            original = contract.checked(trainer, contract.GENERATE)
            self.patch.replace(trainer, contract.GENERATE, _starting(original, self), expected=original)

    # from vLLM

    def start(self, mode: str) -> None:
        """What is generated now takes the place of what was before: TRL keeps one buffer of each mode."""
        self._into = mode
        self._samples[mode] = {}

    def note(self, outputs: Any) -> None:
        for output in outputs:
            for sample in output.outputs:
                try:
                    kept = support_of([sample])
                except ValueError:
                    self.patch.left(contract.EXTRACT, NOT_SENT, ADVICE)
                    continue
                if not bool(kept.known.all()):
                    self.patch.left(contract.EXTRACT, NOT_KNOWN, ADVICE)
                start = len(output.prompt_token_ids)
                tokens = (*output.prompt_token_ids, *sample.token_ids)
                self._samples[self._into][tokens] = Kept(start, kept.ids, kept.offsets.diff())

    # to the head

    @contextlib.contextmanager
    def scoring(self, ids: Tensor, mask: Tensor, length: int, chunk: int) -> Iterator[None]:
        """Inside, TRL scores the last ``length`` tokens of these samples, ``chunk`` of them at a time."""
        before = self._passes
        self._passes = iter(
            [(i, m, length) for i, m in zip(ids.split(chunk), mask.split(chunk), strict=True)]
        )
        try:
            yield
        finally:
            self._passes = before

    def rows(self, count: int, device: torch.device) -> Rows | None:
        """Of the next pass, whose head has as many rows; None outside, and where nothing was kept away."""
        if not any(self._samples.values()) or (call := next(self._passes, None)) is None:
            return None
        ids, mask, length = call
        counts = torch.zeros(ids.shape, dtype=torch.int64, device="cpu")
        scored = mask.to("cpu", copy=True) != 0
        found = []
        for row, (sample, there) in enumerate(zip(ids.tolist(), scored, strict=True)):
            places = there.nonzero()[:, 0]
            prompt = int((places < ids.shape[1] - length).sum())
            tokens = tuple(sample[place] for place in places)
            answers = self._answers(tokens, prompt)
            if len(tokens) > prompt and not answers:
                self.patch.left(contract.METHOD, NOT_FOUND, ADVICE)
            for answer in answers:
                counts[row, places[answer.start : answer.start + len(answer.counts)]] = answer.counts
                found.append(answer.ids)
        # the row in front of a token scores it; on a CPU TRL has all rows, elsewhere those of completions
        scored[:, :-length] = False
        counts = counts[:, 1:].flatten() if count == counts[:, 1:].numel() else counts[scored]
        if not found or len(counts) != count:
            return None
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        return Rows(torch.cat(found).to(device), offsets.to(device))

    def _answers(self, tokens: tuple[int, ...], prompt: int) -> list[Kept]:
        """What a sample is made of: one answer, or several with what tools said in between."""
        for samples in self._samples.values():
            lengths = sorted({len(key) for key in samples if prompt < len(key) <= len(tokens)})
            found = [kept for n in lengths if (kept := samples.get(tokens[:n])) and kept.start >= prompt]
            if found:
                return found
        return []


def _noting(original: Callable[..., Any], support: Support) -> Callable[..., Any]:
    def extract_logprobs(all_outputs: Any) -> Any:
        support.note(all_outputs)
        return original(all_outputs)

    return extract_logprobs


def _starting(original: Callable[..., Any], support: Support) -> Callable[..., Any]:
    def _generate_and_score_completions(self: Any, inputs: Any) -> Any:
        support.start("train" if self.model.training else "eval")
        return original(self, inputs)

    return _generate_and_score_completions


def supported_method(original: Callable[..., Any], support: Support) -> Callable[..., Any]:
    def _get_per_token_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        *rest: Any,
        **named: Any,
    ) -> Any:
        with support.scoring(input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids)):
            return original(
                self, model, input_ids, attention_mask, logits_to_keep, batch_size, *rest, **named
            )

    return _get_per_token_logps_and_entropies
