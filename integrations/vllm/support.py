"""The tokens that the filters kept for each sampled one, in the output of its request.

vLLM has a field for them, ``CompletionOutput.sampling_mask``, and a way there from the model runner through
the scheduler and its processes.  Its second model runner fills it; the first, which runs on CPUs, never does.
Here it does, for the requests that ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput, SamplingMaskLists
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.vllm import contract
from rlkernel.integrations.vllm.rollout import ASK, UNKNOWN
from rlkernel.integrations.vllm.vllm_patch import VllmPatch

NAME = "GPUModelRunner.sample_tokens"
LISTS = ("token_ids", "offsets", "cu_num_generated_tokens")  # what the output of a request is made of


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


# in the process of the model


class _Step:
    """The tokens that are sampled now: how many kept ones each row has room for, and what became of it."""

    def __init__(self, rooms: list[int]) -> None:
        self.rooms = rooms
        self.kept: _Kept | None = None


class _Kept(NamedTuple):
    """Of ``rlkernel.SampleOutput``."""

    ids: Tensor  # [n K]
    offsets: Tensor  # [n + 1]
    unknown: Tensor  # [n]

    def to_cpu(self) -> _Kept:
        return _Kept(*(x.to("cpu", non_blocking=True) for x in self))


_step: _Step | None = None


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
        _step.kept = _Kept(out.support_ids, out.support_offsets, out.support_overflow | ~out.valid)


def _sample_tokens(original: Callable[..., Any], patch: VllmPatch) -> Callable[..., Any]:
    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        global _step
        rooms = [] if self.execute_model_state is None else _asked(self, patch)
        if not any(rooms):
            return original(self, grammar_output)
        if self.speculative_config is not None:
            patch.left(NAME, "the support of tokens that were drafted")
            return original(self, grammar_output)
        patch.count(patch.calls, NAME)
        before, _step = _step, (step := _Step(rooms))
        try:
            output = original(self, grammar_output)
        finally:
            _step = before
        if isinstance(output, AsyncModelRunnerOutput):
            return _Later(output, step, self)
        output.sampling_masks = Masks.of(step.kept, rooms)
        return output

    return sample_tokens


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
    return room


class _Later(AsyncModelRunnerOutput):
    """An output whose tokens are still on their way from the device, with its kept sets on the same way."""

    def __init__(self, output: AsyncModelRunnerOutput, step: _Step, runner: Any) -> None:
        self._output, self._rooms, self._kept = output, step.rooms, step.kept
        self._on_device, self._ready = step.kept, None
        if step.kept is not None and step.kept.ids.is_cuda:
            stream = runner.async_output_copy_stream
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                self._kept = step.kept.to_cpu()
                self._ready = torch.cuda.Event(blocking=True)
                self._ready.record()

    def get_output(self) -> ModelRunnerOutput:
        output = self._output.get_output()
        if self._ready is not None:
            self._ready.synchronize()
        self._on_device = None  # held until the copies were made
        output.sampling_masks = Masks.of(self._kept, self._rooms)
        return output


# between the processes


class Masks(NamedTuple):
    """In the place of vLLM's ``SamplingMaskLists`` of a batch: it may be that one request asks and another
    does not."""

    token_ids: np.ndarray
    offsets: np.ndarray
    asked: list[bool]

    @classmethod
    def of(cls, kept: _Kept | None, rooms: list[int]) -> Masks:
        """Of a batch that vLLM's own sampler served, nothing is known."""
        room = np.array(rooms, dtype=np.int64)
        if kept is None:
            ids, counts = np.empty(0, dtype=np.int32), np.zeros_like(room)
            unknown = np.ones(len(room), dtype=bool)
        else:
            ids, offsets, unknown = (x.cpu().numpy() for x in kept)
            counts = np.diff(offsets)
            unknown = unknown | (counts > room)
        said = (room > 0) & ~unknown
        unsaid = (room > 0) & unknown
        ids = ids[: counts.sum()][np.repeat(said, counts)]
        counts = np.where(said, counts, 0)
        ids = np.insert(ids, np.cumsum(counts)[unsaid], UNKNOWN)
        offsets = np.concatenate(([0], np.cumsum(counts + unsaid)))
        return cls(ids, offsets, (room > 0).tolist())

    def slice_request(self, row: int, num_positions: int) -> SamplingMaskLists | None:
        """What vLLM's scheduler takes for the request of a row, which has ``num_positions`` new tokens."""
        if not self.asked[row] or num_positions != 1:
            return None
        return SamplingMaskLists(self.token_ids[self.offsets[row] : self.offsets[row + 1]])


# in the process of the scheduler


def _update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if not isinstance(model_runner_output.sampling_masks, Masks):
            return original(self, scheduler_output, model_runner_output)
        before, self.return_sampling_mask = self.return_sampling_mask, True
        try:
            return original(self, scheduler_output, model_runner_output)
        finally:
            self.return_sampling_mask = before

    return update_from_output
