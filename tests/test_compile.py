"""Ops without a custom op of their own: torch.compile runs them between graphs, and does not look inside."""

import pytest
import torch

import rlkernel

SHAPE = (4, 16)


def test_policy_loss_under_compile():
    g = torch.Generator().manual_seed(0)
    leaf = (torch.randn(SHAPE, generator=g) * 0.1 - 1).requires_grad_()
    old, advantages = leaf.detach() + 0.1, torch.randn(SHAPE[0], generator=g)
    mask = torch.ones(SHAPE, dtype=torch.bool)

    def loss(logprobs):
        return rlkernel.policy_loss(logprobs * 1, old, advantages, mask).loss

    (want,) = torch.autograd.grad(loss(leaf), leaf)
    compiled = torch.compile(loss, backend="aot_eager")
    for _ in range(3):
        assert torch.equal(torch.autograd.grad(compiled(leaf), leaf)[0], want)


def test_one_graph_is_refused_rather_than_wrong():
    mask = torch.ones(SHAPE, dtype=torch.bool)
    x = torch.zeros(SHAPE)
    compiled = torch.compile(
        lambda x: rlkernel.policy_loss(x, x, x[:, 0], mask).loss, backend="aot_eager", fullgraph=True
    )
    with pytest.raises(torch._dynamo.exc.Unsupported):
        compiled(x)
