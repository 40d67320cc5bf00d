"""How ``policy_loss.select`` ranks the tokens of a batch for kl_cov and clip_cov, and which rank highest."""

import torch
from torch import Tensor


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor, tokens: Tensor) -> Tensor:
    """(A - mean A) (logprob - mean logprob) of each token; the means in fp64, so that their order hardly
    matters.  What lies under a zero of the mask is any number, or none."""

    def centred(x: Tensor) -> Tensor:
        total = torch.where(mask, x, 0).sum(dtype=torch.float64)
        return x - (total / tokens).to(x.dtype)

    return centred(advantages) * centred(logprobs)


def largest(rank: Tensor, among: Tensor, wanted: Tensor, share: float) -> Tensor:
    """The ``wanted`` of ``among`` that rank highest; the first in the batch of those that rank alike."""
    if not rank.numel():
        return among
    lowest = -torch.inf if rank.is_floating_point() else torch.iinfo(rank.dtype).min
    # only the device knows how many are wanted: no more than with a mask that is all true
    most = max(1, int(rank.numel() * share))
    ranked = torch.where(among, rank, lowest).flatten().topk(most).values
    least = ranked.gather(0, (wanted - 1)[None])
    above, tied = among & (rank > least), among & (rank == least)
    return above | tied & (tied.flatten().cumsum(0).view_as(tied) <= wanted - above.sum())


def hash_of(logprobs: Tensor, position: Tensor, seed: int) -> Tensor:
    """clip_cov's order of its candidates: an int32 of the log-probability in fp32, the position in the
    sequence and the seed; those with the least are picked, the same tokens in every run."""
    salt = position * _int32(0x9E3779B1) + _int32(seed * 0x85EBCA77)
    return _hash(logprobs.float().contiguous().view(torch.int32) ^ salt)


def _hash(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit changes every output bit: murmur3's finaliser."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ _shifted(x, shift)) * _int32(factor)
    return x ^ _shifted(x, 16)


def _shifted(x: Tensor, count: int) -> Tensor:
    """``x >> count`` that fills with zeros, as that of int32 does not."""
    return (x >> count) & (1 << 32 - count) - 1


def _int32(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31
