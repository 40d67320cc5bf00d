"""Log-probabilities of prompts, of each chunk's logits as they are: no copy of rows, no ``log_softmax``."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsMetadata
from sglang.srt.layers.logprob_processor import InputLogprobProcessor, LogprobResult
from sglang.srt.model_executor.runner_utils.pool import borrow_graph_pool
from torch import Tensor

import rlkernel
from rlkernel.integrations._likeliest import all_named
from rlkernel.integrations._replacing import Arguments, misplaced, replacement
from rlkernel.integrations.sglang import contract, deterministic, given_ids
from rlkernel.integrations.sglang.sglang_patch import SglangPatch


def plan(patch: SglangPatch) -> None:
    """Raises PatchError where SGLang is not what it must be."""
    contract.check_fields(LogitsMetadata)
    contract.check_fields(LogprobResult)
    original = contract.checked(InputLogprobProcessor, "_forward_by_chunk")
    new = replacement(patch, original, "logprob", functools.partial(_unable, patch), _by_chunk)
    patch.replace(InputLogprobProcessor, "_forward_by_chunk", new, expected=original)


def _prompts(given: Arguments) -> _Prompts:
    return _Prompts(given["logits_metadata"], given["sample_indices"], given["input_logprob_indices"])


def _unable(patch: SglangPatch, given: Arguments) -> str | None:
    states = given["pruned_states"]
    if reason := misplaced(hidden_states=states) or (None if len(states) else "there are no rows"):
        return reason
    return deterministic.left(patch, "sampler") or _prompts(given).unserved(given["self"].vocab_size)


def _by_chunk(given: Arguments) -> Any:
    prompts, states, lm_head = _prompts(given), given["pruned_states"], given["lm_head"]
    size = given["chunk_size"]
    count = -(-len(states) // size)
    # what the head's logits may lie in until the next replay of a graph; ours need no memory to borrow
    borrowed = given["borrow_logits_memory"]
    for start in _passes(lm_head, count, size):
        end = min(start + size, len(states))
        with borrow_graph_pool(user="input logits") if borrowed else nullcontext():
            logits = given["get_logits_fn"](
                states[start:end], lm_head, given["logits_metadata"], use_logits_buffer=count == 1
            )
        prompts.score(logits, start, end)
        del logits  # before those of the next chunk are made
    return prompts.result(), prompts.sampled


def _passes(lm_head: Any, count: int, chunk_size: int) -> Iterator[int]:
    """The first row of each chunk; a head with LoRA is told which one it is."""
    if count == 1 or not hasattr(lm_head, "set_lm_head_pass"):
        yield from range(0, count * chunk_size, chunk_size)
        return
    for i in range(count):
        lm_head.set_lm_head_pass(i)
        yield i * chunk_size
    lm_head.reset_lm_head_pass()


class _Prompts:
    """The rows of a prefill whose next tokens are in the prompts; rows to sample from are among its rows,
    too, and are scored with token 0 rather than left out, as that would be a copy of the others."""

    def __init__(self, metadata: Any, sampled_rows: Tensor, scored_rows: Tensor) -> None:
        self.metadata, self.sampled_rows, self.scored_rows = metadata, sampled_rows, scored_rows
        self.lengths = [max(n, 0) for n in metadata.extend_logprob_pruned_lens_cpu]  # of each sequence
        tops = metadata.top_logprobs_nums if metadata.extend_return_top_logprob else None
        self.tops = None if tops is None else given_ids.counts(tops)
        self.given = metadata.token_ids_logprobs if metadata.extend_token_ids_logprob else None
        self.of_sequence = [i for i, n in enumerate(self.lengths) for _ in range(n)]  # a number for each row
        self.logprobs: list[Tensor] = []
        self.top_ids: list[Tensor] = []
        self.top_logprobs: list[Tensor] = []
        self.id_logprobs: list[Tensor] = []
        self.sampled: Any = None  # the logits of the rows to sample from

    def unserved(self, vocab: int) -> str:
        if len(self.of_sequence) != len(self.scored_rows):
            return "the rows are not those of the sequences, one after another"
        return given_ids.outside(self.given, vocab)

    def score(self, logits: Tensor, start: int, end: int) -> None:
        """A chunk of rows: those from ``start`` to ``end``."""
        if self.sampled is None:
            self.sampled = logits.new_empty(len(self.sampled_rows), logits.shape[-1])
        a, b = _between(self.metadata.sample_indices_cpu, start, end)
        if b > a:
            self.sampled[a:b] = logits[self.sampled_rows[a:b] - start]
        a, b = _between(self.metadata.input_logprob_indices_cpu, start, end)
        rows = self.scored_rows[a:b] - start
        ids = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
        ids[rows] = self.metadata.extend_input_logprob_token_ids_gpu[a:b].to(torch.int64)
        if self.tops is None and self.given is None:
            self.logprobs.append(rlkernel.logprob(logits, ids).logprobs[rows])
            return
        asked: dict[str, Any] = {"return_logprobs": ("raw",), "ranking": "raw"}
        if self.tops is not None:
            asked["top_logprobs"] = min(max(self.tops), logits.shape[-1])
        if self.given is not None:
            asked["logprob_token_ids"] = self._given(logits, rows, a, b)
        out = rlkernel.score_tokens(logits, ids, **asked)
        assert out.raw_logprobs is not None
        self.logprobs.append(out.raw_logprobs[rows])
        if out.top_ids is not None and out.top_logprobs is not None:
            self.top_ids.append(all_named(out.top_ids, logits.shape[-1])[rows])
            self.top_logprobs.append(out.top_logprobs[rows])
        if out.id_logprobs is not None:
            self.id_logprobs.append(out.id_logprobs[rows])

    def _given(self, logits: Tensor, rows: Tensor, a: int, b: int) -> Tensor:
        """[rows of the chunk, K], -1 where nothing is asked for."""
        table = given_ids.table(self.given or [], logits.device)
        made = table.new_full((len(logits), table.shape[1]), -1)
        made[rows] = table[torch.tensor(self.of_sequence[a:b], dtype=torch.int64, device=logits.device)]
        return made

    def result(self) -> LogprobResult:
        """As SGLang has it: lists for each sequence, of a list for each of its rows."""
        found = LogprobResult(token_logprobs=torch.cat(self.logprobs))
        if self.tops is not None:
            found.top_logprobs_val = self._lists(self.top_logprobs, self.tops)
            found.top_logprobs_idx = self._lists(self.top_ids, self.tops)
        if self.given is not None:
            widths = [-1 if ids is None else len(ids) for ids in self.given]
            found.token_ids_logprobs_val = self._lists(self.id_logprobs, widths)
            each = zip(self.given, self.lengths, strict=True)
            found.token_ids_logprobs_idx = [[] if ids is None else [ids] * n for ids, n in each]
        return found

    def _lists(self, parts: list[Tensor], widths: Sequence[int]) -> list[list[list[Any]]]:
        """Of each sequence as much of its rows as it asks for; -1: not even the rows."""
        rows = iter(torch.cat(parts).tolist() if parts else [[]] * len(self.of_sequence))
        made = []
        for length, width in zip(self.lengths, widths, strict=True):
            own = [next(rows)[: max(width, 0)] for _ in range(length)]
            made.append([] if width < 0 else own)
        return made


def _between(sorted_rows: Sequence[int], start: int, end: int) -> tuple[int, int]:
    return bisect.bisect_left(sorted_rows, start), bisect.bisect_left(sorted_rows, end)
