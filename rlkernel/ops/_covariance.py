"""Which tokens clip_cov and kl_cov pick: by the batch's covariance of log-probability and advantage."""

import torch
from torch import Tensor

from rlkernel.types import PolicyRule


def selected(
    loss_type: str,
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor | None,
    ratio: float,
    low: float,
    high: float,
    seed: int,
    rule: PolicyRule,
) -> Tensor:
    """One bool for each token.  Raises ValueError for a ratio that is none."""
    if not 0 < ratio <= 1:
        raise ValueError(f"cov_ratio must be in (0, 1], got {ratio}")
    logprobs = logprobs.detach()
    old = logprobs if old_logprobs is None else old_logprobs
    position = torch.arange(logprobs.shape[-1], device=logprobs.device).expand(logprobs.shape)
    if cu_seqlens is not None:
        row = torch.searchsorted(cu_seqlens[1:], position, right=True).clamp(max=cu_seqlens.shape[0] - 2)
        position = position - cu_seqlens[row]
    if advantages.shape != logprobs.shape:
        spread = advantages[:, None].expand(logprobs.shape) if cu_seqlens is None else advantages[row]
        advantages = spread
    cov = covariance(logprobs, advantages, mask)
    if loss_type == "kl_cov":
        return tokens_above(cov, mask, ratio)
    r = (logprobs - old).exp()
    plain, bounded = -r * advantages, -r.clamp(rule.low, rule.high) * advantages
    keys = keys_of(old, position)
    return tokens_between(cov, mask & ~(bounded > plain), mask.sum().double(), ratio, low, high, keys, seed)


def tokens_above(cov: Tensor, mask: Tensor, ratio: float) -> Tensor:
    """kl_cov's: the ``max(1, ratio * tokens)`` largest covariances, and those equal to the least of them.

    A sort finds them, since a top-k of a length that only the device knows would synchronise.
    """
    if not cov.numel():
        return mask
    wanted = (mask.sum() * ratio).long().clamp(1, cov.numel())
    ranked = torch.where(mask, cov, -torch.inf).flatten().sort(descending=True).values
    return mask & (cov >= ranked.gather(0, (wanted - 1)[None]))


def tokens_between(
    cov: Tensor,
    candidates: Tensor,
    tokens: Tensor,
    ratio: float,
    low: float,
    high: float,
    keys: Tensor,
    seed: int,
) -> Tensor:
    """clip_cov's: of the candidates with a covariance in (low, high), about ``max(1, ratio * tokens)``.

    Each is picked with the probability that makes this their expected number, by a hash of ``keys`` and the
    seed: the same tokens in every run, wherever their sequence stands in the batch.
    """
    candidates = candidates & (cov > low) & (cov < high)
    wanted = (tokens * ratio).floor().clamp(min=1)
    share = wanted / candidates.sum().clamp(min=1)
    return candidates & (_hash(keys ^ _hash(torch.full_like(keys, seed & 0xFFFFFFFF))) < share * 2**32)


def keys_of(logprobs: Tensor, position: Tensor) -> Tensor:
    """32 bits for each token, of its log-probability in fp32 and its position in the sequence."""
    bits = logprobs.float().contiguous().view(torch.int32).long() & 0xFFFFFFFF
    return bits ^ _hash(position)


def _hash(x: Tensor) -> Tensor:
    """A bijection of 32 bits in which every input bit changes every output bit: murmur3's finaliser."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return x ^ (x >> 16)


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean A) (logprob - mean logprob) of each token; the means in fp64, so that their order hardly
    matters."""

    def centred(x: Tensor) -> Tensor:
        x = torch.where(mask, x, 0)
        return x - (x.double().sum() / mask.sum().clamp(min=1)).to(x.dtype)

    return centred(advantages) * centred(logprobs)
