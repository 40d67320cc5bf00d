"""What ``sample_linear`` means, in plain PyTorch, with the logits in memory."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sample_linear import SampleLinearCall, SampleLinearResults, stored_dtype
from rlkernel.calls.sampling import SamplingCall
from rlkernel.reference import linear_logprob
from rlkernel.reference import sampling as op


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    return []


def forward(call: SampleLinearCall) -> SampleLinearResults:
    h, w = (linear_logprob._widened(x, call.head) for x in (call.hidden, call.weight))
    logits, _ = linear_logprob._logits(h, w, call.head)
    if call.store:
        logits = logits.to(stored_dtype(call.head))
    stats = op.forward(SamplingCall(logits, None, call.request)) if call.drawn else ()
    return SampleLinearResults(logits if call.store else None, *stats)


def make_inputs(
    N: int,
    H: int,
    V: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float = 3.0,
) -> dict[str, Any]:
    """Arguments of ``sample_linear``: logits of standard deviation ``scale``, drawn as ``sample``'s are."""
    g = torch.Generator(device).manual_seed(seed)
    weight = torch.empty(V, H, device=device, dtype=dtype)
    for rows in weight.split(8192):  # no fp32 copy of a large head
        rows.copy_(
            torch.randn(rows.shape, generator=g, dtype=torch.float32, device=device) * (scale / H**0.5)
        )
    hidden = torch.randn(N, H, generator=g, dtype=torch.float32, device=device).to(dtype)
    seeds = torch.randint(-(2**63), 2**63 - 1, (N,), generator=g, device=device)
    return {"hidden": hidden, "weight": weight, "seeds": seeds, "positions": torch.arange(N, device=device)}
