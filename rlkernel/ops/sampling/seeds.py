"""Seeds for several samples of one request."""

import torch
from torch import Tensor

from rlkernel.ops.sampling import numbers
from rlkernel.reference import sampling_stream as stream


def split_seeds(seeds: int | Tensor, n: int) -> Tensor:
    """A seed for each of ``n`` samples of the requests with ``seeds``, distinct within a request.

    Equal to ``seeds`` for the first sample, so that n = 1 and the first of n draw the same tokens; 64 bits of
    Philox of (seed, i) for sample i.  They are a bijection of i, so that samples 1 to n - 1 never share a
    seed; any other two do with a probability of 2**-64.

    Args:
        seeds: [...] 64-bit integers, or one.
        n: samples of each request, >= 1.

    Returns:
        int64 [..., n], on the device of ``seeds``.

    Raises:
        ValueError: ``seeds`` are not integers; ``n`` is not an integer in [1, 2**31).

    Examples:
        >>> seeds = rlkernel.split_seeds(torch.tensor([7, 8]), 4)
        >>> seeds.shape, seeds[:, 0]
        (torch.Size([2, 4]), tensor([7, 8]))
    """
    number = numbers.whole("n", n, 1, 2**31 - 1, "an integer in [1, 2**31)")
    device = seeds.device if isinstance(seeds, Tensor) else "cpu"
    first = torch.as_tensor(numbers.int64("seeds", seeds), dtype=torch.int64, device=device)[..., None]
    i = torch.arange(number, device=first.device)
    return torch.where(i == 0, first, stream.split(first, i))
