"""The seed of each request and the place of its next token: what a draw is a function of.

vLLM's sampler is given a ``torch.Generator`` for each request with a seed.  Its state counts draws, of this
request but also those that were thrown away, and so depends on how the prompt was cut into chunks.  Its
initial seed does not, nor does the number of tokens in front of the one that is drawn, which the model
runner knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

_runner: Any = None


def sampling_runner(original: Callable[..., Any]) -> Callable[..., Any]:
    """``GPUModelRunner._sample``, during which ``positions`` knows whose rows are sampled."""

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        global _runner
        before, _runner = _runner, self
        try:
            return original(self, logits, spec_decode_metadata)
        finally:
            _runner = before

    return _sample


def known() -> bool:
    return _runner is not None


def positions(rows: int, device: torch.device) -> Tensor:
    """How many tokens stand before the next one of each row, prompt included, its drafts taken to stand.

    Of the device: under asynchronous scheduling the host does not know which drafts of the step before stood.
    """
    return _runner.seq_lens[:rows].to(device, torch.int64)


def seeds(generators: Mapping[int, torch.Generator], rows: int, device: torch.device) -> Tensor | None:
    """Of requests with a seed, theirs; of the others of torch's generator, as in vLLM.  None: of it all."""
    if not generators:
        return None
    if len(generators) < rows:
        made = drawn_seeds(rows, device)
    else:
        made = torch.empty(rows, dtype=torch.int64, device=device)
    own = {row: generator.initial_seed() for row, generator in generators.items() if row < rows}
    values = [seed - 2**64 if seed >= 2**63 else seed for seed in own.values()]
    made[torch.tensor(list(own), device=device)] = torch.tensor(values, dtype=torch.int64, device=device)
    return made


def drawn_seeds(rows: int, device: torch.device) -> Tensor:
    """Those that ``rlkernel.sample`` draws where it is given none."""
    return torch.randint(-(2**63), 2**63 - 1, (rows,), dtype=torch.int64, device=device)


def without_rewinding(original: Callable[..., Any]) -> Callable[..., Any]:
    """``GPUModelRunner._bookkeeping_sync`` with no generator of a CPU to rewind.

    vLLM gives back the draws of rows that were thrown away by an offset that CPU generators do not have.
    """

    def _bookkeeping_sync(self: Any, *arguments: Any, **named: Any) -> Any:
        with _hidden(self.input_batch):
            return original(self, *arguments, **named)

    return _bookkeeping_sync


@contextmanager
def _hidden(batch: Any) -> Iterator[None]:
    generators = batch.generators
    if all(generator.device.type != "cpu" for generator in generators.values()):
        yield
        return
    batch.generators = {}
    try:
        yield
    finally:
        batch.generators = generators
