"""``running_normalize`` over Triton: the kernels of ``whiten``."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.triton_ops import whiten
from rlkernel.triton_ops._device import refusals


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return refusals("x", tensors[0])


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = torch.empty(3, dtype=torch.float64, device=call.x.device)
    normalized = whiten.scaled(call.whitening, call.states, state, call.update, call.clip)
    return RunningNormalizeResults(normalized, state)
