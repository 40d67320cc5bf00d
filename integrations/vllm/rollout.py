"""What a trainer reads of vLLM's outputs: which tokens were kept, as ``rlkernel.logprob`` takes them.

Needs no vLLM: a trainer may have the outputs of a server, as lists.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

ASK = "rlkernel_support"  # in the extra_args of a request: room for the kept tokens of each sampled one
UNKNOWN = (
    -1
)  # in the place of a kept set that has not come: larger than the room, or of a token drawn elsewhere


class Support(NamedTuple):
    """The kept tokens of ``[samples, length]`` places, one row after another.

    ``ids[offsets[i] : offsets[i + 1]]`` are those of place i; none of a place whose distribution was whole.
    ``known`` is False where there is no token, or its set has not come: to be left out of a loss.
    """

    ids: Tensor  # int32 [nnz]
    offsets: Tensor  # int64 [samples * length + 1]
    known: Tensor  # bool [samples, length]


def support_of(outputs: Iterable[Any], length: int | None = None, device: Any = None) -> Support:
    """The support of every sample, for ``support_ids`` and ``support_offsets`` of ``rlkernel.logprob`` and
    ``rlkernel.linear_logprob``.

    Args:
        outputs: of ``LLM.generate``: requests, of which every sample counts, or samples; or the lists
            ``sampling_mask`` of a server's answers, one for each sample.
        length: of the rows, which are padded behind; None: that of the longest.
        device: of the tensors.

    Raises:
        ValueError: a sample came without its support, or is longer than ``length``.
    """
    rows = [mask for output in outputs for mask in _masks(output)]
    longest = max(map(len, rows), default=0)
    if length is None:
        length = longest
    if length < longest:
        raise ValueError(f"length must be at least {longest}, that of the longest sample, got {length}")
    counts = torch.zeros(len(rows), length, dtype=torch.int64, device="cpu")
    known = torch.zeros(len(rows), length, dtype=torch.bool, device="cpu")
    ids: list[int] = []
    for row, mask in enumerate(rows):
        for place, kept in enumerate(mask):
            if kept != [UNKNOWN]:
                ids += kept
                counts[row, place] = len(kept)
                known[row, place] = True
    offsets = torch.nn.functional.pad(counts.flatten().cumsum(0), (1, 0))
    made = torch.tensor(ids, dtype=torch.int32, device="cpu")
    return Support(made.to(device), offsets.to(device), known.to(device))


def _masks(output: Any) -> list[list[list[int]]]:
    """For each sample the kept tokens of each of its places."""
    if isinstance(output, list):
        return [output]
    found = []
    for sample in getattr(output, "outputs", [output]):
        masks = [] if sample.sampling_mask is None else sample.sampling_mask.token_ids
        if len(masks) != len(sample.token_ids):
            raise ValueError(
                f"outputs must have the support of each of their tokens, got {len(masks)} of "
                f"{len(sample.token_ids)}: ask for it with patch_vllm(return_support=K), or with "
                f"SamplingParams(extra_args={{{ASK!r}: K}}), before the request is made"
            )
        found.append(masks)
    return found
