"""``running_normalize`` over the compiled extension: the kernels of ``whiten``, on CPU, CUDA or HIP."""

import torch

from rlkernel.calls.running_normalize import RunningNormalizeCall, RunningNormalizeResults
from rlkernel.native import at_most_fp32, whiten

unsupported = at_most_fp32("x")


def forward(call: RunningNormalizeCall) -> RunningNormalizeResults:
    state = torch.empty(3, dtype=torch.float64, device=call.x.device)
    normalized = whiten.scaled(call.whitening, call.states, state, call.update, call.clip)
    return RunningNormalizeResults(normalized, state)
