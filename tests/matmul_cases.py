"""Products for processes that compare their bits; torch and rlkernel are all that it imports.

`python tests/matmul_cases.py 1 2` prints a digest for each number of threads.
"""

import hashlib
import sys

import torch

import rlkernel

HALVES_AND_FLOAT = (torch.float32, torch.bfloat16, torch.float16)
ROWS = (1, 2, 3, 7, 8, 15, 16, 17, 33, 64, 127, 128, 129, 257)


def probe(rows, columns, seed, dtype=torch.float32):
    """Numbers of 2^-14 beside ones of 4096: the order in which their products are added shows."""
    g = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([2.0**-14, 1.0, 4096.0])[torch.randint(3, (rows, columns), generator=g)]
    return (torch.randn(rows, columns, generator=g) * sizes).to(dtype)


def near_the_least(rows, columns, seed, dtype=torch.float32):
    """Numbers whose products, and sums of such, lie on both sides of the least normal one."""
    return probe(rows, columns, seed).mul(2.0**-63).to(dtype)


def surroundings(product, a, rows):
    """Pairs (name, rows that stand elsewhere, the same rows of the whole product)."""
    whole = product(a)
    for m in rows:
        yield f"the first {m}", product(a[:m]), whole[:m]
        yield f"the last {m}", product(a[-m:].clone()), whole[-m:]
    order = torch.randperm(len(a), generator=torch.Generator().manual_seed(2))
    yield "permuted", product(a[order]), whole[order]
    yield "other strides", product(a.t().contiguous().t()), whole
    yield "other alignment", product(torch.cat([a.new_zeros(1), a.flatten()])[1:].view(a.shape)), whole
    for value in (torch.nan, torch.inf):
        beside = a.clone()
        beside[::2] = value
        yield f"beside {value}", product(beside)[1::2], whole[1::2]


def digest(threads):
    """Of products and gradients of every dtype and layout of the compiled kernels."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return _digest()
    finally:
        torch.set_num_threads(before)


def _digest():
    found = hashlib.sha256()
    for dtype in HALVES_AND_FLOAT:
        for draw, m, k, n in (
            (probe, 3, 211, 300),
            (probe, 29, 1100, 37),
            (probe, 130, 67, 300),
            (near_the_least, 3, 211, 300),
            (near_the_least, 29, 100, 37),
        ):
            if draw is near_the_least and dtype == torch.float16:
                continue  # which has none
            a, weight, upstream = (draw(*s, sum(s), dtype) for s in ((m, k), (n, k), (m, n)))
            bias = torch.arange(float(n))
            for b in (weight.t(), weight.t().contiguous()):
                leaves = [x.detach().requires_grad_() for x in (a, b, bias)]
                with rlkernel.use_backend("native"):
                    out = rlkernel.matmul(*leaves, out_dtype=torch.float32)
                for x in (out, *torch.autograd.grad(out, leaves, upstream.float())):
                    found.update(x.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    print(*(digest(int(threads)) for threads in sys.argv[1:]))
