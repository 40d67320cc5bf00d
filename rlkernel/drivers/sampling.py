"""What the backends over sampling libraries share: such a library returns token ids and nothing else."""

import functools
import importlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling, SamplingCall

NEVER = 2.0  # a probability that no mass reaches: a filter that is off


def reasons(
    library: str, logits: Tensor, *, sampling: Sampling | None = None, needs: Collection[str] = ()
) -> list[str]:
    """Why a library of token ids cannot do this; ``needs`` names what the caller wants beside them."""
    request = sampling
    why = [f"{library} returns token ids only, asked for {name}" for name in sorted(needs)]
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        why.append(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if request is None:
        return why
    if request.gumbel:
        why.append(f"{library} has a random stream of its own, asked for method 'gumbel'")
    if isinstance(request.temperature, Tensor) or request.temperature == 0:
        why.append(f"{library} has no rows at temperature 0: temperature must be one number > 0")
    lacks = {"top_n_sigma": request.may_use_sigma, "typical_p and no XTC": request.band is not None}
    names = ("token_ids", "token_bitmask", "thresholds", "skip")
    lacks |= {name: getattr(request, name) is not None for name in names}
    return why + [f"{library} has no {name}" for name, asked in lacks.items() if asked]


@functools.cache
def imported(module: str) -> tuple[Any, str]:
    """A library's module, or why it does not import here: an import takes seconds and sets up the device."""
    try:
        return importlib.import_module(module), ""
    except Exception as error:  # a machine that it does not know fails with an error of any kind
        return None, f"{module.partition('.')[0]} does not import here: {error}"


def probabilities(call: SamplingCall) -> tuple[Tensor, Tensor]:
    """fp32 [B, V] and whether a row has any: one without is uniform, so that no kernel loops forever."""
    t = call.request.temperature
    z = (call.logits if call.adjusted is None else call.adjusted).float()
    probs = torch.softmax((z - z.amax(-1, keepdim=True)) / t, -1)
    # NaN, +inf or nothing but -inf makes every element NaN
    valid = ~probs[:, 0].isnan()
    return torch.where(valid[:, None], probs, 1 / max(z.shape[1], 1)), valid


def _held(request: Sampling, valid: Tensor) -> Tensor:
    """Rows that are ``valid`` and whose parameters are in range: nobody has looked at those of tensors."""
    k, p, m = request.top_k, request.top_p, request.min_p
    if isinstance(k, Tensor):
        valid = valid & (k >= -1)
    if isinstance(p, Tensor):
        valid = valid & (p > 0) & (p <= 1)
    if isinstance(m, Tensor):
        valid = valid & (m >= 0) & (m <= 1)
    return valid


def top_k(value: int | Tensor, vocab: int) -> int | Tensor:
    """The bound as a library takes it: ``vocab`` where it is off."""
    if isinstance(value, Tensor):
        return torch.where((value < 1) | (value > vocab), vocab, value).to(torch.int32)
    return value if 1 <= value < vocab else vocab


def top_p(value: float | Tensor) -> float | Tensor:
    if isinstance(value, Tensor):  # without one that is none, for which a kernel could loop forever
        return torch.where((value > 0) & (value < 1), value.float(), NEVER)
    return value if value < 1 else NEVER


def min_p(value: float | Tensor) -> float | Tensor:
    """Likewise; 0 where it is off."""
    return torch.where((value >= 0) & (value <= 1), value, 0) if isinstance(value, Tensor) else value


def stats(request: Sampling, token_ids: Tensor, valid: Tensor) -> SampleStats:
    nothing = dict.fromkeys(SampleStats._fields)
    valid = _held(request, valid)
    ids = torch.where(valid, token_ids.to(torch.int64), -1)
    return SampleStats(**{**nothing, "token_ids": ids, "valid": valid})  # type: ignore[arg-type]


def no_rows(call: SamplingCall) -> SampleStats:
    ids, valid = (call.logits.new_empty(0, dtype=x) for x in (torch.int64, torch.bool))
    return stats(Sampling(), ids, valid)
