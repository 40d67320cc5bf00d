"""What a backend is asked for ``sample_linear``, and what it answers."""

from typing import NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import Head
from rlkernel.calls.sampling import SampleStats, Sampling


class SampleLinearCall(NamedTuple):
    """``drawn``: tokens are wanted, and not the logits alone; ``store``: logits are; ``algorithm``
    "fused" draws and stores none."""

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    head: Head
    request: Sampling
    drawn: bool
    store: bool
    algorithm: str = "auto"


def stored_dtype(head: Head) -> torch.dtype:
    """Of logits in memory: rounded products need no more than ``logits_dtype``, what a bias, a scale or a
    softcap makes of them does."""
    if head.compute_dtype == torch.float64:
        return torch.float64
    return torch.float32 if transforms(head) else head.logits_dtype


def transforms(head: Head) -> bool:
    return head.bias is not None or head.logit_scale != 1.0 or head.softcap is not None


class SampleLinearResults(NamedTuple):
    """The logits [N, V], and the fields of ``SampleStats``, None where no tokens are wanted."""

    logits: Tensor | None
    token_ids: Tensor | None = None
    raw_logprobs: Tensor | None = None
    tempered_logprobs: Tensor | None = None
    processed_logprobs: Tensor | None = None
    kept_mass: Tensor | None = None
    kept_count: Tensor | None = None
    entropy: Tensor | None = None
    rank: Tensor | None = None
    support: Tensor | None = None
    valid: Tensor | None = None
    row_max: Tensor | None = None
    log_sum: Tensor | None = None

    @property
    def stats(self) -> SampleStats | None:
        return None if self.token_ids is None else SampleStats(*self[1:])  # type: ignore[arg-type]
