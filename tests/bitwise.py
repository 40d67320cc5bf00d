"""Equality of bits, and the ways in which a row may be surrounded without changing its own."""

import torch

from rlkernel import testing
from rlkernel.consistency import assert_invariant


def assert_equal(name: str, got: torch.Tensor, want: torch.Tensor) -> None:
    testing.assert_bitwise(got, want, name)


def probe(rows: int, vocab: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Logits whose softmax sum depends on its order: many small terms beside large ones."""
    g = torch.Generator().manual_seed(rows * 31 + vocab)
    logits = torch.randn(rows, vocab, generator=g) * 3
    logits[:, :: max(vocab // 7, 1)] += 8
    return logits.to(dtype).to(device)


def assert_batch_invariant(run, logits: torch.Tensor, *per_row: torch.Tensor) -> None:
    """Rows of ``run(logits, *per_row)`` keep their bits alone, in any order, at any address: few runs, for
    kernels that an interpreter or an emulation executes."""
    half = (len(logits) + 1) // 2
    assert_invariant(run, (logits, *per_row), sizes=(1, half), rows=3, neighbours=())
