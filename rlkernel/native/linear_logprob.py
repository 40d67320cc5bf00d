"""``linear_logprob`` over the compiled extension: a library GEMM and a kernel of ``logprob`` per tile."""

from typing import Any

import torch
from torch import Tensor

from rlkernel import tiles
from rlkernel.native import logprob

LinearStats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor | None]
Grads = tuple[Tensor | None, Tensor | None, Tensor | None]


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    hidden, weight = tensors[:2]
    reasons = [*logprob.unsupported_tensor("hidden", hidden), *logprob.unsupported_tensor("weight", weight)]
    return list(dict.fromkeys(reasons))


def forward(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    return_entropy: bool,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    algorithm: str,
    need_direction: bool,
) -> LinearStats:
    return tiles.forward(
        logprob, hidden, weight, bias, target_ids, temperature, logit_scale, softcap, ignore_index,
        return_entropy, logits_dtype, compute_dtype, need_direction,
    )  # fmt: skip


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target_ids: Tensor,
    temperature: float | Tensor,
    logit_scale: float,
    softcap: float | None,
    ignore_index: int,
    logits_dtype: torch.dtype,
    compute_dtype: torch.dtype,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    direction: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> Grads:
    return tiles.backward(
        logprob, grad_logprobs, grad_entropy, grad_lse, hidden, weight, bias, target_ids, temperature,
        logit_scale, softcap, ignore_index, logits_dtype, compute_dtype, entropy, row_max, log_sum,
        direction, needs,
    )  # fmt: skip
