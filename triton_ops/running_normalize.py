"""``running_normalize`` over Triton: the kernels of ``whiten``."""

import torch

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.triton_ops import whiten
from rlkernel.triton_ops._device import at_most_fp32

unsupported = at_most_fp32("x")


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = torch.empty(3, dtype=torch.float64, device=call.x.device)
    normalized = whiten.scaled(call.whitening, call.states, state, call.update, call.clip)
    return RunningNormalizeResults(normalized, state)
