"""``sampling`` over FlashInfer: token ids for callers who ask for nothing else.

The distribution is that of the other backends but for three things, which come with FlashInfer: a token that
ties with the last one kept is kept too, masses are summed in fp32, and a token depends on the place of its
row in the batch.  ``sample`` draws the seeds of its callers who give none, on the device: a graph can be
captured.
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
    reasons = library_sampling.reasons("flashinfer", logits, sampling, needs)
    if logits.device.type != "cuda" or torch.version.hip is not None:
        reasons.append(f"logits must be on an NVIDIA GPU, got {logits.device}")
    if sampling is not None and _min_p(sampling) and (_top_k(sampling, logits) or _top_p(sampling)):
        reasons.append("flashinfer has min_p only by itself, asked for top_k or top_p too")
    if not reasons:  # an import takes seconds and sets up CUDA
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
    assert sampling.seeds is not None
    seeds = sampling.seeds.contiguous()
    stream = {"seed": seeds, "offset": torch.zeros_like(seeds)}
    k = library_sampling.top_k(sampling.top_k, logits.shape[1])
    p = library_sampling.top_p(sampling.top_p)
    if _min_p(sampling):
        m = library_sampling.min_p(sampling.min_p)
        ids = library.min_p_sampling_from_probs(probs, m, **stream)
    elif _top_k(sampling, logits) and _top_p(sampling):
        order = "joint" if sampling.order == "joint" else "top_k_first"
        ids = library.top_k_top_p_sampling_from_probs(probs, k, p, filter_apply_order=order, **stream)
    elif _top_k(sampling, logits):
        ids = library.top_k_sampling_from_probs(probs, k, **stream)
    elif _top_p(sampling):
        ids = library.top_p_sampling_from_probs(probs, p, **stream)
    else:
        ids = library.sampling_from_probs(probs, **stream)
    return library_sampling.stats(ids, library_sampling.held(sampling, valid))


@functools.cache
def _library() -> tuple[ModuleType | None, str]:
    try:
        import flashinfer.sampling as library
    except Exception as error:  # a CUDA that it does not know fails with an error of any kind
        return None, f"flashinfer does not import here: {error}"
    return library, ""


def _top_k(sampling: Sampling, logits: Tensor) -> bool:
    return isinstance(sampling.top_k, Tensor) or 1 <= sampling.top_k < logits.shape[1]


def _top_p(sampling: Sampling) -> bool:
    return isinstance(sampling.top_p, Tensor) or sampling.top_p < 1


def _min_p(sampling: Sampling) -> bool:
    return isinstance(sampling.min_p, Tensor) or sampling.min_p > 0
