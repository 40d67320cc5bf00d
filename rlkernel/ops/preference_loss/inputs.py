"""What ``preference_loss`` asks of its tensors: each function checks one and gives it as backends take it,
of the dtype of the log-probabilities."""

import torch
from torch import Tensor

from rlkernel.calls.preference_loss import PREFERENCE_TERMS, PreferenceRule
from rlkernel.ops import _packing, _validate


def reference(x: Tensor | None, logprobs: Tensor, rows: int) -> tuple[Tensor | None, bool]:
    """And whether it is one sum for each sequence."""
    if x is None:
        return None, False
    _validate.constant("ref_logprobs", x)
    x, each = _packing.per_sequence("ref_logprobs", x, "logprobs", logprobs, rows, "sum")
    _validate.same_device("ref_logprobs", x, "logprobs", logprobs.device)
    return _validate.dense(x.detach(), logprobs.dtype), each


def supported(
    logprobs: Tensor, ref_logprobs: Tensor | None, mask: Tensor, nll_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The masks without the tokens whose log-probability is -inf; in the likelihood the policy's alone."""
    inside = logprobs != -torch.inf
    nll_mask = None if nll_mask is None else nll_mask & inside
    if ref_logprobs is not None:
        inside &= ref_logprobs != -torch.inf
    return inside.logical_and_(mask), nll_mask


def aligned(x: Tensor | None, wanted: bool, logprobs: Tensor) -> Tensor | None:
    if not wanted:
        return None
    if x is None:
        raise ValueError("log_sum_sq_probs must be given with use_weighting, got None")
    _validate.constant("log_sum_sq_probs", x)
    _validate.like("log_sum_sq_probs", x, "logprobs", logprobs)
    return _validate.dense(x.detach(), logprobs.dtype)


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


def kl(x: float | Tensor | None, rule: PreferenceRule, rows: int, logprobs: Tensor) -> Tensor | None:
    if x is None:
        return None
    if PREFERENCE_TERMS.index("kto") not in rule.terms:
        raise ValueError("kl must be None with a loss_type other than 'kto', got a value")
    if not isinstance(x, Tensor):
        return logprobs.new_full((1,), _validate.number("kl", x))
    if x.numel() != 1 and x.shape != (rows,):
        raise ValueError(f"kl must be one number or have shape {(rows,)}, got {tuple(x.shape)}")
    if x.is_complex():
        raise ValueError(f"kl must be real numbers, got {_validate.name(x.dtype)}")
    _validate.without_gradient("kl", x)
    _validate.same_device("kl", x, "logprobs", logprobs.device)
    return _validate.dense(x.detach().reshape(-1), logprobs.dtype)


def delta(x: Tensor | None, rule: PreferenceRule, logprobs: Tensor) -> Tensor | None:
    if x is None:
        return None
    if PREFERENCE_TERMS.index("bco_pair") not in rule.terms:
        raise ValueError("running_delta must be None with a loss_type other than 'bco_pair', got a tensor")
    _validate.constant("running_delta", x)
    if x.shape != (2,):
        raise ValueError(f"running_delta must be [2], a mean and a count, got {tuple(x.shape)}")
    _validate.same_device("running_delta", x, "logprobs", logprobs.device)
    return _validate.dense(x.detach(), logprobs.dtype)
