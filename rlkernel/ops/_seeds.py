"""Seeds for several samples of one request."""

import torch
from torch import Tensor

from rlkernel import stream
from rlkernel.ops import _sampling_inputs as inputs
from rlkernel.ops import _validate


def split_seeds(seeds: int | Tensor, n: int) -> Tensor:
    """A seed for each of ``n`` samples of the requests with ``seeds``, distinct within a request.

    Equal to ``seeds`` for the first sample, so that n = 1 and the first of n draw the same tokens; two words
    of MurmurHash3 of (seed, i) for sample i.  Either word alone is a bijection of i, so that samples 1 to
    n - 1 never share a seed; any other two do with a probability of 2**-64.

    Args:
        seeds: [...] 64-bit integers, or one.
        n: samples of each request, >= 1.

    Returns:
        int64 [..., n], on the device of ``seeds``.

    Raises:
        ValueError: ``seeds`` are not integers; ``n`` is not an integer in [1, 2**31).
    """
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n < 2**31:
        raise ValueError(f"n must be an integer in [1, 2**31), got {n!r}")
    if not isinstance(seeds, Tensor):
        if isinstance(seeds, bool) or not isinstance(seeds, int) or not -(2**63) <= seeds < 2**63:
            raise ValueError(f"seeds must be a 64-bit integer or a tensor, got {seeds!r}")
        seeds = torch.tensor(seeds)
    if seeds.dtype not in inputs.INTEGERS:
        raise ValueError(f"seeds must be integers, got {_validate.name(seeds.dtype)}")
    first = seeds.to(torch.int64)[..., None]
    i = torch.arange(n, device=seeds.device)
    return torch.where(i == 0, first, stream.seeds_of(stream.SPLIT, first, i))
