"""``running_normalize`` over the compiled extension: the kernels of ``whiten``, on CPU, CUDA or HIP."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.native import kernels_for, whiten


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = ["x must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else []
    kernels = kernels_for(tensors[0].device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = torch.empty(3, dtype=torch.float64, device=call.x.device)
    normalized = whiten.scaled(call.whitening, call.states, state, call.update, call.clip)
    return RunningNormalizeResults(normalized, state)
