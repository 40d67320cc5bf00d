"""What ``preference_loss`` asks of its tensors: each function checks one and gives it as backends take it."""

import torch
from torch import Tensor

from rlkernel.calls.preference_loss import PREFERENCE_TERMS, PreferenceRule
from rlkernel.ops import _packing, _validate
from rlkernel.ops.preference_loss import rule as preference_rule


def sequences(logprobs: Tensor, cu_seqlens: Tensor | None) -> tuple[torch.dtype, int, Tensor | None]:
    _validate.floating("logprobs", logprobs)
    dims, want = (2, "[2B, L], or [N] with cu_seqlens") if cu_seqlens is None else (1, "[N] with cu_seqlens")
    if logprobs.dim() != dims:
        raise ValueError(f"logprobs must be {want}, got shape {tuple(logprobs.shape)}")
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    if cu_seqlens is None:
        return dtype, logprobs.shape[0], None
    cu_seqlens = _packing.offsets("cu_seqlens", cu_seqlens, "logprobs", logprobs.device)
    return dtype, cu_seqlens.shape[0] - 1, cu_seqlens


def reference(
    x: Tensor | None, logprobs: Tensor, rows: int, dtype: torch.dtype
) -> tuple[Tensor | None, bool]:
    """And whether it is one sum for each sequence."""
    if x is None:
        return None, False
    _validate.constant("ref_logprobs", x)
    x, each = _packing.per_sequence("ref_logprobs", x, "logprobs", logprobs, rows, "sum")
    _validate.same_device("ref_logprobs", x, "logprobs", logprobs.device)
    return _validate.dense(x.detach(), dtype), each


def mask(argument: str, x: Tensor, logprobs: Tensor) -> Tensor:
    if not isinstance(x, Tensor):
        raise ValueError(f"{argument} must be a tensor, got {type(x).__name__}")
    _validate.like(argument, x, "logprobs", logprobs)
    return (x if x.dtype == torch.bool else x != 0).contiguous()


def supported(
    logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, nll_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The masks without the tokens whose log-probability is -inf; in the likelihood the policy's alone."""
    inside = logprobs != -torch.inf
    nll_mask = None if nll_mask is None else nll_mask & inside
    if ref_logprobs is not None:
        inside &= ref_logprobs != -torch.inf
    return mask & inside, nll_mask


def aligned(x: Tensor | None, wanted: bool, logprobs: Tensor, dtype: torch.dtype) -> Tensor | None:
    if not wanted:
        return None
    if x is None:
        raise ValueError("log_sum_sq_probs must be given with use_weighting, got None")
    _validate.constant("log_sum_sq_probs", x)
    _validate.like("log_sum_sq_probs", x, "logprobs", logprobs)
    return _validate.dense(x.detach(), dtype)


def labels(x: Tensor | None, paired: bool, rows: int, logprobs: Tensor) -> Tensor | None:
    if paired != (x is None):
        want = "None with a loss of pairs" if paired else "given with an unpaired loss"
        raise ValueError(f"labels must be {want}, got {'a tensor' if paired else None}")
    if x is None:
        return None
    if not isinstance(x, Tensor) or x.shape != (rows,):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"labels must have shape {(rows,)}, got {got}")
    _validate.same_device("labels", x, "logprobs", logprobs.device)
    return (x if x.dtype == torch.bool else x != 0).contiguous()


def kl(
    x: float | Tensor | None, rule: PreferenceRule, rows: int, logprobs: Tensor, dtype: torch.dtype
) -> Tensor | None:
    if x is None:
        return None
    if PREFERENCE_TERMS.index("kto") not in rule.terms:
        raise ValueError("kl must be None with a loss_type other than 'kto', got a value")
    if not isinstance(x, Tensor):
        return torch.full((1,), preference_rule.finite("kl", x), dtype=dtype, device=logprobs.device)
    if x.numel() != 1 and x.shape != (rows,):
        raise ValueError(f"kl must be one number or have shape {(rows,)}, got {tuple(x.shape)}")
    _validate.same_device("kl", x, "logprobs", logprobs.device)
    return x.detach().reshape(-1).to(dtype).contiguous()


def delta(x: Tensor | None, rule: PreferenceRule, logprobs: Tensor, dtype: torch.dtype) -> Tensor | None:
    if x is None:
        return None
    if PREFERENCE_TERMS.index("bco_pair") not in rule.terms:
        raise ValueError("running_delta must be None with a loss_type other than 'bco_pair', got a tensor")
    _validate.floating("running_delta", x)
    if x.shape != (2,):
        raise ValueError(f"running_delta must be [2], a mean and a count, got {tuple(x.shape)}")
    _validate.same_device("running_delta", x, "logprobs", logprobs.device)
    return x.detach().to(dtype).contiguous()
