"""Equality of bits, and the ways in which a row may be surrounded without changing its own."""

import torch


def assert_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    """Same bits; NaN equals NaN, -0 is not 0.  Says where the first difference is and what stands there."""
    assert got.shape == want.shape and got.dtype == want.dtype, (
        f"{name}: {got.shape} {got.dtype}, not {want.shape}"
    )
    differs = (_bits(got) != _bits(want)) & ~(got.isnan() & want.isnan())
    if bool(differs.any()):
        where = tuple(differs.nonzero()[0].tolist())
        count = int(differs.sum())
        raise AssertionError(f"{name}{list(where)} is {got[where]!r}, want {want[where]!r}; {count} differ")


def _bits(x: torch.Tensor) -> torch.Tensor:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().view(integers[x.itemsize]) if x.is_floating_point() else x


def probe(rows: int, vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Logits whose softmax sum depends on its order: many small terms beside large ones."""
    g = torch.Generator().manual_seed(rows * 31 + vocab)
    logits = torch.randn(rows, vocab, generator=g) * 3
    logits[:, :: max(vocab // 7, 1)] += 8
    return logits.to(dtype).to(device)


def assert_batch_invariant(run, logits: torch.Tensor, *per_row: torch.Tensor) -> None:
    """Rows of ``run(logits, *per_row)`` keep their bits alone, in any order, at any address."""
    whole = run(logits, *per_row)
    n = logits.shape[0]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(5)).to(logits.device)
    shifted = torch.cat([logits.flatten().new_zeros(1), logits.flatten()])[1:].view(
        logits.shape
    )  # other alignment
    variants = {
        "permuted": ([order], run(logits[order], *(x[order] for x in per_row))),
        "misaligned": ([slice(None)], run(shifted, *per_row)),
        "last half": ([slice(n // 2, n)], run(logits[n // 2 :], *(x[n // 2 :] for x in per_row))),
    }
    for i in range(0, n, max(n // 3, 1)):
        alone = slice(i, i + 1)
        variants[f"row {i} alone"] = ([alone], run(logits[alone].clone(), *(x[alone] for x in per_row)))
    for name, ([index], got) in variants.items():
        for k, (a, b) in enumerate(zip(got, whole, strict=True)):
            if b is not None:
                assert_equal(f"{name}, output {k}", a, b[index])
