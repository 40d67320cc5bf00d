"""``linear_logprob`` over the compiled extension: a library GEMM and a kernel of ``logprob`` per tile."""

from typing import Any

from torch import Tensor

from rlkernel.calls.logprob import RowGrads
from rlkernel.drivers import linear_logprob as tiles
from rlkernel.drivers.linear_logprob_statistics import Statistics
from rlkernel.native import logprob
from rlkernel.types import Head, LinearGrads, LinearStats


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    hidden, weight = tensors[:2]
    reasons = [*logprob.unsupported_tensor("hidden", hidden), *logprob.unsupported_tensor("weight", weight)]
    return list(dict.fromkeys(reasons))


def forward(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    algorithm: str,
    need_direction: bool,
    keep: bool,
) -> LinearStats:
    return tiles.forward(logprob, hidden, weight, target_ids, head, return_entropy, need_direction, keep)


def statistics(
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    return_entropy: bool,
    need_direction: bool,
    keep: bool,
    names: tuple[str, ...],
) -> tuple[LinearStats, Statistics]:
    return tiles.statistics(
        logprob, hidden, weight, target_ids, head, return_entropy, need_direction, keep, names
    )


def backward(
    grads: RowGrads,
    hidden: Tensor,
    weight: Tensor,
    target_ids: Tensor,
    head: Head,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    direction: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> LinearGrads:
    return tiles.backward(
        logprob, grads, hidden, weight, target_ids, head, entropy, row_max, log_sum, direction, needs
    )
