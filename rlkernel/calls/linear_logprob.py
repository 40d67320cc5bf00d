"""What a backend is asked for ``linear_logprob``, and what it answers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobResults
from rlkernel.types import Statistic

STATISTICS: tuple[Statistic, ...] = (
    "mean_logits", "is_top1", "log_sum_sq_probs", "min_logits", "max_logits",
)  # fmt: skip
EXTREMES = STATISTICS[3:]  # of tiles alone
INPUT_SCHEMES = ("static", "token", "group", "group_ue8m0")  # how hidden is rounded to the FP8 of the weight
Needs = tuple[bool, ...]  # whether the gradients of hidden, weight and bias are wanted


class LinearLogprobStatistics(NamedTuple):
    """A ``LogprobOutput``, and of each row what trainers log; None unless asked for, without a gradient.

    ``mean_logits``: the mean of ``logits / T`` over the vocabulary.  ``is_top1``: whether no logit is larger
    than the target's.  ``log_sum_sq_probs``: ``log(sum of p**2)``.  ``min_logits``, ``max_logits``: the
    smallest and the largest of ``logits / T``.  0 and False on ignored rows.
    """

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean_logits: Tensor | None
    is_top1: Tensor | None
    log_sum_sq_probs: Tensor | None
    min_logits: Tensor | None = None
    max_logits: Tensor | None = None


class Head(NamedTuple):
    """What is done between the product and the softmax, checked and normalised."""

    bias: Tensor | None
    temperature: float | Tensor  # one value, or one per row
    logit_scale: float
    softcap: float | None
    ignore_index: int
    logits_dtype: torch.dtype  # to which the product is rounded
    compute_dtype: torch.dtype  # of the product's operands


class LinearLogprobCall(NamedTuple):
    """Checked and flat.

    ``keep``: a backward pass will want the logits again, and the workspace may hold on to them.
    ``need_direction``: it will want d logprobs / d hidden, the head being frozen.
    """

    hidden: Tensor  # [N, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None
    target_ids: Tensor  # [N] int64
    temperature: float | Tensor
    logit_scale: float
    softcap: float | None
    ignore_index: int
    logits_dtype: torch.dtype
    compute_dtype: torch.dtype
    return_entropy: bool
    algorithm: str = "auto"
    need_direction: bool = False
    keep: bool = False
    statistics: tuple[str, ...] = ()  # of STATISTICS
    support_ids: Tensor | None = None
    support_offsets: Tensor | None = None
    needs: Needs = (False, False, False)
    group: str | None = None  # of ranks that share out the vocabulary; target_ids are of all of it
    vocab_start: int = 0  # the first entry of this rank
    parts: int = 1  # equal ones of the entries here, which are combined as those of ranks are
    weight_scale: Tensor | None = None  # fp32, one of each block of an FP8 weight, [ceil(V / R), ceil(H / K)]
    weight_block: tuple[int, ...] = ()  # (R, K)
    input_scheme: str = ""  # of INPUT_SCHEMES; "": hidden is not rounded
    input_group: int = 0  # elements of a row of hidden that share a scale; not of "static"
    input_scale: Tensor | None = None  # [] fp32 of "static"

    @property
    def head(self) -> Head:
        return Head(*(self.bias, self.temperature, *self[5:10]))

    @classmethod
    def of(
        cls, hidden: Tensor, weight: Tensor, target_ids: Tensor, head: Head, **options: object
    ) -> "LinearLogprobCall":
        first = {"hidden": hidden, "weight": weight, "target_ids": target_ids}
        return cls(**first, **head._asdict(), **options)  # type: ignore[arg-type]


class LinearLogprobResults(NamedTuple):
    """[N] each; ``direction`` [N, H] in hidden's dtype, ``products`` [nnz] at supports before the softcap.

    ``lse = row_max / T + log_sum``, as in ``LogprobResults``.
    """

    logprobs: Tensor
    entropy: Tensor | None
    lse: Tensor
    mean_logits: Tensor | None
    is_top1: Tensor | None
    log_sum_sq_probs: Tensor | None
    min_logits: Tensor | None
    max_logits: Tensor | None
    row_max: Tensor
    log_sum: Tensor
    direction: Tensor | None = None
    products: Tensor | None = None

    @classmethod
    def of(cls, rows: LogprobResults, **others: Any) -> "LinearLogprobResults":
        """What ``logprob`` says of the rows, and ``others`` by name."""
        asked = (others.pop(name, None) for name in STATISTICS)
        values: Any = rows.logprobs, rows.entropy, rows.lse, *asked, rows.row_max, rows.log_sum
        return cls(*values, **others)


class LinearGrads(NamedTuple):
    """Of hidden, weight and bias."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
