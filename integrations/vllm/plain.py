"""The step of most rollouts: nothing changes the logits or filters them, and the log-probability of the token
is asked for, alone or beside that of the likeliest one.

What ``rlkernel.sample`` and the sampler make of it, to the bit, in one call of C++: with a small model theirs
take as long as a layer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from rlkernel import dispatch
from rlkernel.integrations.vllm import adjustments, support
from rlkernel.runtime import invariance, ranges


def takes(logits: Tensor, metadata: Any) -> bool:
    if metadata.max_num_logprobs not in (0, 1) or metadata.logprob_token_ids:
        return False
    return logits.is_cpu and not support.asked() and adjustments.unchanged(metadata)


def sampled(logits: Tensor, metadata: Any, seeds: Tensor, positions: Tensor | None) -> SamplerOutput | None:
    """None where a setting of rlkernel asks for the long way, as its first step does, or a profiler, in which
    that way has its name."""
    if ranges.watched() or (draw := _draw()) is None:
        return None
    temperature = adjustments.temperature(metadata)
    heat = temperature if isinstance(temperature, Tensor) else None  # None: of 0
    top = metadata.max_num_logprobs == 1
    if (found := draw((logits, heat, seeds, positions, top, invariance.is_on()), {})) is None:
        return None
    ids, logprobs, rank = found
    ids = ids.to(torch.int32)
    return SamplerOutput(
        sampled_token_ids=ids[:, :1].contiguous(), logprobs_tensors=LogprobsTensors(ids, logprobs, rank)
    )


@functools.cache
def _draw() -> Callable[[tuple[Any, ...], dict[str, Any]], Any] | None:
    return dispatch.direct("sampling")
