"""``running_normalize`` over Triton: the kernels of ``whiten``."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.triton_ops import whiten
from rlkernel.triton_ops._device import device_reasons


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = device_reasons(tensors[0])
    return reasons + (["x must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else [])


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = torch.empty(3, dtype=torch.float64, device=call.x.device)
    normalized = whiten.scaled(call.whitening, call.states, state, call.update, call.clip)
    return RunningNormalizeResults(normalized, state)
