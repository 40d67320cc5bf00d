"""``sampling`` over FlashInfer: token ids for callers who ask for nothing else.

The distribution is that of the other backends but for three things, which come with FlashInfer: a token that
ties with the last one kept is kept too (not so where both filters are on and ``top_k`` is one number of at
most 256, of 65,536 tokens or more), masses are summed in fp32, and a token depends on the place of its row in
the batch.  ``sample`` draws the seeds of its callers who give none, on the device: a graph can be captured.
"""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling, SamplingCall
from rlkernel.drivers import sampling as driver

LIBRARY = "flashinfer.sampling"


def unsupported(logits: Tensor, *tensors: Tensor, **options: Any) -> list[str]:
    request = options.get("sampling")
    reasons = driver.reasons("flashinfer", logits, **options)
    if logits.device.type != "cuda" or torch.version.hip is not None:
        reasons.append(f"logits must be on an NVIDIA GPU, got {logits.device}")
    if request is not None:
        k, p, m = _filters(request, logits.shape[1])
        if m and (k or p):
            reasons.append("flashinfer has min_p only by itself, asked for top_k or top_p too")
    return reasons or list(filter(None, driver.imported(LIBRARY)[1:]))


def forward(call: SamplingCall) -> SampleStats:
    library, _ = driver.imported(LIBRARY)
    request, vocab = call.request, call.logits.shape[1]
    if call.logits.shape[0] == 0:
        return driver.no_rows(call)
    probs, valid = driver.probabilities(call)
    assert request.seeds is not None
    seeds = request.seeds.contiguous()
    stream = {"seed": seeds, "offset": torch.zeros_like(seeds)}
    k, p = driver.top_k(request.top_k, vocab), driver.top_p(request.top_p)
    k_on, p_on, m_on = _filters(request, vocab)
    if m_on:
        ids = library.min_p_sampling_from_probs(probs, driver.min_p(request.min_p), **stream)
    elif k_on and p_on:
        order = "joint" if request.order == "joint" else "top_k_first"
        ids = library.top_k_top_p_sampling_from_probs(probs, k, p, filter_apply_order=order, **stream)
    elif k_on:
        ids = library.top_k_sampling_from_probs(probs, k, **stream)
    elif p_on:
        ids = library.top_p_sampling_from_probs(probs, p, **stream)
    else:
        ids = library.sampling_from_probs(probs, **stream)
    return driver.stats(request, ids, valid)


def _filters(request: Sampling, vocab: int) -> tuple[bool, bool, bool]:
    """Whether top-k, top-p and min-p may be on."""
    k, p, m = request.top_k, request.top_p, request.min_p
    return (
        isinstance(k, Tensor) or 1 <= k < vocab,
        isinstance(p, Tensor) or p < 1,
        isinstance(m, Tensor) or m > 0,
    )
