"""Drafts and logits of verify_chain's tests, and its calls on a backend."""

import pytest
import torch
from backends import is_slow, of, running, skip_unless_able

import rlkernel

ON_EVERY_BACKEND = pytest.mark.parametrize(("backend", "device"), of("sampling"))
# It is made of `sample`, whose own tests run everywhere: a rollout on what is slow would show nothing new.
ON_FAST_BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), [pair for pair in of("sampling") if not is_slow(*pair.values)]
)
B, K, V = 4, 3, 150


def verify(backend, *arguments, **options):
    with running(backend):
        return rlkernel.verify_chain(*arguments, **options)


def logits_of(*shape, seed=0, scale=3.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def able(backend, device):
    skip_unless_able(backend, "sampling", torch.zeros(2, V, device=device))


def case(rows=B, seed=5):
    logits = logits_of(rows, K + 1, V, seed=seed)
    q = (logits[:, :K] + logits_of(rows, K, V, seed=seed + 1, scale=0.5)).log_softmax(-1)
    drafts = q.argmax(-1)
    return drafts, logits, q, torch.arange(rows) + 40
