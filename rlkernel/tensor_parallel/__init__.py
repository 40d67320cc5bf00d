"""Layers cut over 1, 2, 4 or 8 ranks: the bits are those of the whole layer under ``batch_invariant``."""

from rlkernel.tensor_parallel.functional import (
    column_parallel_linear,
    row_parallel_linear,
    shared_weight,
    vocab_parallel_embedding,
)
from rlkernel.tensor_parallel.styles import (
    ColwiseParallel,
    EmbeddingParallel,
    HeadNormParallel,
    RowwiseParallel,
    parallelize,
    plan_of,
)

__all__ = [
    "ColwiseParallel",
    "EmbeddingParallel",
    "HeadNormParallel",
    "RowwiseParallel",
    "column_parallel_linear",
    "parallelize",
    "plan_of",
    "row_parallel_linear",
    "shared_weight",
    "vocab_parallel_embedding",
]
