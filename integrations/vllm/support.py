"""The tokens that the filters kept for each sampled one, in the output of its request.

vLLM has a field for them, ``CompletionOutput.sampling_mask``, and a way there from the model runner through
the scheduler and its processes.  Its second model runner fills it; the first, which runs on CPUs, never does.
Here it does, for the requests that ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

import rlkernel
from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.masks import Kept, Masks
from rlkernel.integrations.vllm.rollout import ASK
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "GPUModelRunner.sample_tokens"
LISTS = ("token_ids", "offsets", "cu_num_generated_tokens")  # what the output of a request is made of
ENOUGH = 2**31 - 1  # for any vocabulary


def plan(patch: VllmPatch) -> None:
    """Raises PatchError where vLLM is not what it must be."""
    if "sampler" not in patch.ops or "sampler" in patch.refused:
        raise PatchError("the op 'sampler', which knows what was kept, must be replaced too")
    sample = contract.checked(GPUModelRunner, "sample_tokens", contract.SAMPLE_TOKENS_PARAMETERS)
    update = contract.checked(Scheduler, "update_from_output", contract.UPDATE_PARAMETERS)
    fields = [field.name for field in dataclasses.fields(ModelRunnerOutput)]
    names = update.__code__.co_names
    if (
        "sampling_masks" not in fields
        or "return_sampling_mask" not in names
        or SamplingMaskLists._fields != LISTS
    ):
        raise PatchError(
            "the scheduler must hand sampling_masks of ModelRunnerOutput on, got one that does not"
        )
    patch.replace(GPUModelRunner, "sample_tokens", _sample_tokens(sample, patch), expected=sample)
    patch.replace(Scheduler, "update_from_output", _update_from_output(update), expected=update)


class _Step:
    """The tokens that are sampled now: what the requests ask for, and what is known of it."""

    def __init__(self, rooms: list[int], drafts: list[int] | None) -> None:
        self.rooms = rooms  # for the kept tokens of a place, by row
        self.drafts = drafts  # how many, by row
        self.kept: Kept | None = None  # for the token of each row, or that behind its drafts
        self.drafted: Kept | None = None  # for the drafts, row after row

    def masks(self) -> Masks:
        return Masks.of(self.rooms, self.kept, self.drafts, self.drafted)


_step: _Step | None = None


def asked() -> bool:
    """Whether a request of this step asks for its support."""
    return _step is not None


def add_options(options: dict[str, Any], logits: Tensor) -> None:
    """What ``rlkernel.sample`` must be asked for, where a request asks for its support."""
    if _step is None:
        return
    n, vocab = logits.shape
    options["return_support"] = min(max(_step.rooms), vocab)
    # Logits of -inf, of grammars and banned tokens, count as a filter only where there is a mask.
    every = torch.full((n, -(-vocab // 32)), -1, dtype=torch.int32, device=logits.device)
    options.setdefault("token_bitmask", every)


def keep(out: Any) -> None:
    """The support of what was sampled, where a request asks for it."""
    if _step is not None:
        _step.kept = _kept(out)


def part(drafts: Tensor, last: Tensor) -> None:
    """Of what was sampled, these rows are of drafts, and those behind the last drafts."""
    if _step is not None and _step.kept is not None:
        _step.kept, _step.drafted = _step.kept.of_rows(last), _step.kept.of_rows(drafts)


def keep_drafted(target_logits: Tensor, num_draft_tokens: list[int], greedy: Tensor | bool) -> None:
    """The support of drafted places, of whose logits vLLM's filters have left those of the kept tokens."""
    if _step is None:
        return
    one = torch.tensor(num_draft_tokens, device=target_logits.device)
    cold = torch.as_tensor(greedy, device=one.device).expand_as(one).repeat_interleave(one)
    options: dict[str, Any] = {}
    add_options(options, target_logits)
    # a seed of its own: nothing is drawn of the generator that others draw from
    out = rlkernel.sample(
        target_logits, temperature=torch.where(cold, 0.0, 1.0), seeds=0, return_logprobs=(), **options
    )
    _step.drafted = _kept(out)


def _kept(out: Any) -> Kept:
    return Kept(out.support_ids, out.support_offsets, out.support_overflow | ~out.valid)


def _sample_tokens(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        global _step
        state = self.execute_model_state
        rooms = [] if state is None else _asked(self, patch)
        if not any(rooms):
            return original(self, grammar_output)
        if self.speculative_config is not None and not _takes_several_places():
            patch.left(NAME, "the support of several tokens a step")
            return original(self, grammar_output)
        patch.count(patch.calls, NAME)
        drafting = state.spec_decode_metadata
        before, step = _step, _Step(rooms, None if drafting is None else drafting.num_draft_tokens)
        _step = step
        try:
            output = original(self, grammar_output)
        finally:
            _step = before
        if isinstance(output, AsyncModelRunnerOutput):
            return _Later(output, step, self)
        output.sampling_masks = step.masks()
        return output

    return sample_tokens


def _takes_several_places() -> bool:
    """vLLM 0.31 makes one place of those of a step."""
    try:
        SamplingMaskLists(np.arange(2), np.arange(3)).slice_request(0, 2)
    except AssertionError:
        return False
    return True


def _asked(runner: Any, patch: VllmPatch) -> list[int]:
    """The room that each request of the batch asks for, 0: none."""
    return [_room(runner.requests[name].sampling_params, patch) for name in runner.input_batch.req_ids]


def _room(params: Any, patch: VllmPatch) -> int:
    room = patch.return_support
    if params is None or params.extra_args is None or ASK not in params.extra_args:
        return room
    room = params.extra_args[ASK]
    if not isinstance(room, int) or isinstance(room, bool) or room < 0:  # one request must not end the engine
        patch.left(NAME, f"extra_args[{ASK!r}] must be an integer >= 0, got {room!r}")
        return 0
    return min(room, ENOUGH)


class _Later(AsyncModelRunnerOutput):
    """An output whose tokens are still on their way from the device, with its kept sets on the same way."""

    def __init__(self, output: AsyncModelRunnerOutput, step: _Step, runner: Any) -> None:
        self._output, self._step = output, step
        self._on_device = step.kept, step.drafted  # held until they are copied
        self._ready: Any = None
        stream = runner.async_output_copy_stream
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                step.kept, step.drafted = (x and x.to_cpu() for x in self._on_device)
                self._ready = torch.cuda.Event(blocking=True)
                self._ready.record()

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        if self._ready is not None:
            self._ready.synchronize()
        del self._on_device
        output.sampling_masks = self._step.masks()
        return output


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """In the scheduler's process, which may have been told nothing of masks."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not isinstance(model_runner_output.sampling_masks, Masks):
            return original(self, scheduler_output, model_runner_output)
        before, self.return_sampling_mask = self.return_sampling_mask, True
        try:
            return original(self, scheduler_output, model_runner_output)
        finally:
            self.return_sampling_mask = before

    return update_from_output
