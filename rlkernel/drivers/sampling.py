"""What the backends over sampling libraries share: such a library returns token ids and nothing else."""

import torch
from torch import Tensor

from rlkernel.calls.sampling import SampleStats, Sampling

NEVER = 2.0  # a probability that no mass reaches: a filter that is off


def reasons(library: str, logits: Tensor, sampling: Sampling | None, needs: frozenset[str]) -> list[str]:
    """Why a library of token ids cannot do this; ``needs`` names what the caller wants beside them."""
    why = [f"{library} returns token ids only, asked for {name}" for name in sorted(needs)]
    if logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        why.append(f"logits must be float32, float16 or bfloat16, got {logits.dtype}")
    if sampling is None:
        return why
    if sampling.gumbel:
        why.append(f"{library} has a random stream of its own, asked for method 'gumbel'")
    if isinstance(sampling.temperature, Tensor) or sampling.temperature == 0:
        why.append(f"{library} has no rows at temperature 0: temperature must be one number > 0")
    if sampling.may_use_sigma:
        why.append(f"{library} has no top_n_sigma")
    if sampling.band is not None:
        why.append(f"{library} has no typical_p and no XTC")
    for name in ("token_ids", "token_bitmask", "thresholds", "skip"):
        if getattr(sampling, name) is not None:
            why.append(f"{library} has no {name}")
    return why


def probabilities(logits: Tensor, adjusted: Tensor | None, temperature: float) -> tuple[Tensor, Tensor]:
    """fp32 [B, V] and whether a row has any: one without is uniform, so that no kernel loops forever."""
    z = (logits if adjusted is None else adjusted).float()
    probs = torch.softmax((z - z.amax(-1, keepdim=True)) / temperature, -1)
    # NaN, +inf or nothing but -inf makes every element NaN
    valid = ~probs[:, 0].isnan()
    return torch.where(valid[:, None], probs, 1 / max(logits.shape[1], 1)), valid


def held(sampling: Sampling, valid: Tensor) -> Tensor:
    """Rows that are ``valid`` and whose parameters are in range: nobody has looked at those of tensors."""
    k, p, m = sampling.top_k, sampling.top_p, sampling.min_p
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


def no_rows(logits: Tensor) -> SampleStats:
    return stats(logits.new_empty(0, dtype=torch.int64), logits.new_empty(0, dtype=torch.bool))


def stats(token_ids: Tensor, valid: Tensor) -> SampleStats:
    nothing = dict.fromkeys(SampleStats._fields)
    ids = torch.where(valid, token_ids.to(torch.int64), -1)
    return SampleStats(**{**nothing, "token_ids": ids, "valid": valid})  # type: ignore[arg-type]
