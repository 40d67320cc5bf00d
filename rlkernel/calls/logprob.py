"""What a backend is asked for ``logprob``, and what it answers."""

from enum import IntEnum
from typing import TYPE_CHECKING, Generic, NamedTuple

import torch
from torch import Tensor


class State(IntEnum):
    """What a softmax over tiles of the vocabulary knows of each row so far: the rows of a buffer [4, R].

    With ``e = exp((y - maximum) / T)``: the maximum of y, the sums of e and of ``e * (y - maximum) / T``, and
    y at the target.
    """

    maximum = 0
    sum_exp = 1
    weighted_sum = 2
    at_target = 3


if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # a Tensor where it is asked for, else None, as overloads tell; no NamedTuple of Python 3.10 is generic
    Entropy = TypeVar("Entropy", bound=Tensor | None, default=Tensor | None, covariant=True)

    class LogprobOutput(NamedTuple, Generic[Entropy]):
        logprobs: Tensor
        entropy: Entropy
        lse: Tensor

else:

    class LogprobOutput(NamedTuple):
        """Per-token statistics of a softmax over the vocabulary, in nats; fp32 (fp64 for fp64 input).

        ``logprobs`` of the target token, ``entropy`` of the whole distribution (None unless asked for) and
        ``lse``, the log-sum-exp of the logits after temperature.  All have the shape of the target ids, are
        differentiable, and are 0 on ignored rows.
        """

        logprobs: Tensor
        entropy: Tensor | None
        lse: Tensor


class LogprobCall(NamedTuple):
    """Checked and normalised.

    ``gathered``: ``logits`` [nnz] are those of the supports alone, and rows without one give 0.
    """

    logits: Tensor  # [..., V]
    target_ids: Tensor  # [...] int64
    temperature: float | Tensor  # one value, or [...]
    ignore_index: int
    return_entropy: bool
    inplace_backward: bool = False  # the gradient may be written over the logits
    support_ids: Tensor | None = None  # int32
    support_offsets: Tensor | None = None  # int64, [N + 1] over the N rows
    gathered: bool = False
    group: str | None = None  # of ranks that share out the vocabulary; target_ids are of all of it
    vocab_start: int = 0  # the first entry of this rank
    parts: int = 1  # equal ones of the entries here, which are combined as those of ranks are


class LogprobResults(NamedTuple):
    """[...] each, with ``lse = row_max / T + log_sum``; ``values`` [nnz] are the logits at the supports.

    ``row_max`` and ``log_sum`` are what backward needs: ``exp(z - lse)`` loses digits when the logits share a
    large offset, while ``exp((y - row_max) / T - log_sum)`` does not.
    """

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    row_max: Tensor
    log_sum: Tensor
    values: Tensor | None = None

    @classmethod
    def empty(cls, target_ids: Tensor, entropy: bool) -> "LogprobResults":
        """Dense memory in fp32 for each statistic of these rows, apart: a caller may keep one of them."""
        layout = torch.contiguous_format
        logprobs = torch.empty_like(target_ids, dtype=torch.float32, memory_format=layout)
        lse, row_max, log_sum = (torch.empty_like(logprobs) for _ in range(3))
        return cls(logprobs, torch.empty_like(logprobs) if entropy else None, lse, row_max, log_sum)

    @classmethod
    def for_backward(cls, entropy: Tensor | None, row_max: Tensor, log_sum: Tensor) -> "LogprobResults":
        """What backward reads of rows without a support."""
        return cls(row_max, entropy, row_max, row_max, log_sum)

    @property
    def statistics(self) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]:
        """What each row has, in the order in which kernels take it."""
        return self.logprobs, self.entropy, self.lse, self.row_max, self.log_sum


class RowGrads(NamedTuple):
    """Upstream gradients, dense and in the dtype of the statistics; None where there is none."""

    logprobs: Tensor | None = None
    entropy: Tensor | None = None
    lse: Tensor | None = None


class Tile(NamedTuple):
    """Logits of some entries of the vocabulary as a GEMM leaves them, before bias, scale and softcap."""

    logits: Tensor  # [R, Vt]
    vocab_start: int
    target_ids: Tensor
    temperature: float | Tensor
    ignore_index: int
    bias: Tensor | None = None  # of these entries
    logit_scale: float = 1.0
    softcap: float | None = None
