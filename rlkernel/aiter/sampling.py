"""``sampling`` over AITER: token ids on AMD GPUs for callers who ask for nothing else.

The distribution is that of the other backends but for three things, which come with AITER: a token that ties
with the last one kept is kept too, masses are summed in fp32, and each call seeds itself from the system, so
``torch.manual_seed`` does not repeat a draw.
"""

import functools
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling, SamplingCall
from rlkernel.drivers import sampling as library_sampling


def unsupported(
    logits: Tensor,
    *tensors: Tensor,
    sampling: Sampling | None = None,
    needs: frozenset[str] = frozenset(),
    **options: Any,
) -> list[str]:
    reasons = library_sampling.reasons("aiter", logits, sampling, needs)
    if logits.device.type != "cuda" or torch.version.hip is None:
        reasons.append(f"logits must be on an AMD GPU, got {logits.device}")
    elif torch.cuda.is_current_stream_capturing():
        reasons.append("aiter takes its seed on the host: a captured graph would repeat one draw")
    if sampling is not None and (isinstance(sampling.min_p, Tensor) or sampling.min_p > 0):
        reasons.append("aiter has no min_p")
    if not reasons:  # an import takes seconds and asks for the device
        _, missing = _library()
        reasons += [missing] if missing else []
    return reasons


def forward(call: SamplingCall) -> SampleStats:
    logits, adjusted, sampling, _ = call
    library, _ = _library()
    assert library is not None and not isinstance(sampling.temperature, Tensor)
    if logits.shape[0] == 0:
        return library_sampling.no_rows(logits)
    probs, valid = library_sampling.probabilities(logits, adjusted, sampling.temperature)
    k = library_sampling.top_k(sampling.top_k, logits.shape[1])
    p = library_sampling.top_p(sampling.top_p)
    ids = torch.arange(logits.shape[0], dtype=torch.int32, device=logits.device)
    generator = torch.cuda.default_generators[logits.get_device()]
    state = generator.get_state()
    try:
        with torch.cuda.device_of(logits):
            if sampling.order != "joint" and not _is_off(k, logits.shape[1]):
                probs = library.top_k_renorm_probs(probs, *_array_and_number(k, 0))
                k = logits.shape[1]
            bounds = *_array_and_number(k, 0), *_array_and_number(p, 0.0)
            token_ids = library.top_k_top_p_sampling_from_probs(probs, ids, *bounds, deterministic=True)
    finally:
        generator.set_state(state)  # AITER seeds torch's own generator anew
    return library_sampling.stats(token_ids, library_sampling.held(sampling, valid))


@functools.cache
def _library() -> tuple[ModuleType | None, str]:
    try:
        import aiter.ops.sampling as library
    except Exception as error:  # a machine without ROCm's tools fails with an error of any kind
        return None, f"aiter does not import here: {error}"
    return library, ""


def _is_off(k: int | Tensor, vocab: int) -> bool:
    return not isinstance(k, Tensor) and k == vocab


def _array_and_number(value: float | Tensor, absent: float) -> tuple[Tensor | None, float]:
    """How AITER takes a bound: one per row, or one number."""
    return (value, absent) if isinstance(value, Tensor) else (None, value)
