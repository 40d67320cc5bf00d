"""``sampling`` over AITER: token ids on AMD GPUs for callers who ask for nothing else.

The distribution is that of the other backends but for three things, which come with AITER: a token that ties
with the last one kept is kept too, masses are summed in fp32, and each call seeds itself from the system, so
``torch.manual_seed`` does not repeat a draw.
"""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, SamplingCall
from rlkernel.drivers import sampling as driver

LIBRARY = "aiter.ops.sampling"


def unsupported(logits: Tensor, *tensors: Tensor, **options: Any) -> list[str]:
    request = options.get("sampling")
    reasons = driver.reasons("aiter", logits, **options)
    if logits.device.type != "cuda" or torch.version.hip is None:
        reasons.append(f"logits must be on an AMD GPU, got {logits.device}")
    elif torch.cuda.is_current_stream_capturing():
        reasons.append("aiter takes its seed on the host: a captured graph would repeat one draw")
    if request is not None and (isinstance(request.min_p, Tensor) or request.min_p > 0):
        reasons.append("aiter has no min_p")
    return reasons or list(filter(None, driver.imported(LIBRARY)[1:]))


def forward(call: SamplingCall) -> SampleStats:
    library, _ = driver.imported(LIBRARY)
    logits, request = call.logits, call.request
    rows, vocab = logits.shape
    if rows == 0:
        return driver.no_rows(call)
    probs, valid = driver.probabilities(call)
    k, p = driver.top_k(request.top_k, vocab), driver.top_p(request.top_p)
    ids = torch.arange(rows, dtype=torch.int32, device=logits.device)
    generator = torch.cuda.default_generators[logits.get_device()]
    state = generator.get_state()
    try:
        with torch.cuda.device_of(logits):
            if request.order != "joint" and (isinstance(k, Tensor) or k != vocab):
                probs = library.top_k_renorm_probs(probs, *_array_and_number(k, 0))
                k = vocab
            bounds = *_array_and_number(k, 0), *_array_and_number(p, 0.0)
            token_ids = library.top_k_top_p_sampling_from_probs(probs, ids, *bounds, deterministic=True)
    finally:
        generator.set_state(state)  # AITER seeds torch's own generator anew
    return driver.stats(request, token_ids, valid)


def _array_and_number(value: float | Tensor, absent: float) -> tuple[Tensor | None, float]:
    """How AITER takes a bound: one per row, or one number."""
    return (value, absent) if isinstance(value, Tensor) else (None, value)
