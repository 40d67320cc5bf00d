"""``running_normalize`` over the compiled extension: the kernels of ``whiten``, on CPU, CUDA or HIP."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.native import refusals, whiten


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return refusals("x", tensors[0])


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = torch.empty(3, dtype=torch.float64, device=call.x.device)
    normalized = whiten.scaled(call.whitening, call.states, state, call.update, call.clip)
    return RunningNormalizeResults(normalized, state)
