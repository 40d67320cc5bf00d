"""``kl_shaped_rewards`` over the compiled extension, on CPU, CUDA or HIP by device, in one launch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.native import kernels_for, launch

ESTIMATORS = {"k1": 0, "abs": 1, "k2": 2, "k3": 3}  # rlkernel::KlEstimator


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    wide = any(x.dtype == torch.float64 for x in tensors[:3])
    reasons = ["rewards and logprobs must be at most fp32, got float64"] if wide else []
    kernels = kernels_for(tensors[0].device)
    return [*reasons, kernels] if isinstance(kernels, str) else reasons


def forward(
    rewards: Tensor,
    logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor | None,
    beta: float,
    kl_estimator: str,
    per_sequence: bool,
    cu_seqlens: Tensor | None,
) -> Tensor:
    out = torch.empty(logprobs.shape, dtype=torch.float32, device=logprobs.device)
    rows = len(logprobs) if cu_seqlens is None else len(cu_seqlens) - 1
    strides = (_stride(x) for x in (None if per_sequence else rewards, logprobs, ref_logprobs, mask))
    launch(
        "kl_shaped_rewards", logprobs.device, rewards.data_ptr(), logprobs.data_ptr(),
        ref_logprobs.data_ptr(), per_sequence, _address(mask), *strides, rows, logprobs.shape[-1],
        _address(cu_seqlens), 8, beta, ESTIMATORS[kl_estimator], out.data_ptr(),
    )  # fmt: skip
    return out


def _stride(x: Tensor | None) -> int:
    return x.stride(0) if x is not None and x.dim() == 2 else 0


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()
