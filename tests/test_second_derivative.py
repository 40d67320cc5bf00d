"""A gradient of ours is not differentiated again: whoever tries gets an error, never a missing term."""

import differentiable
import pytest
import torch
from torch.utils.checkpoint import checkpoint

OPS = list(differentiable.OPS)
ARGUMENTS = [(op, name) for op, (_, shapes) in differentiable.OPS.items() for name in shapes]
COMPILED = ["eager", "aot_eager"]


def loss_of(op, arguments):
    return differentiable.OPS[op][0](*arguments)


def refused(op):
    return pytest.raises(
        RuntimeError, match=rf"\b{differentiable.name_of(op)}(_of_sum)? has no second derivative"
    )


def penalised(loss, x):
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + gradient.square().sum()


@pytest.mark.parametrize("op,name", ARGUMENTS)
def test_a_gradient_penalty_is_refused(op, name):
    arguments = differentiable.leaves(op, {name})
    (x,) = (a for a in arguments if a.requires_grad)
    total = penalised(loss_of(op, arguments), x)
    with refused(op):
        total.backward(retain_graph=True)
    assert x.grad is None
    with refused(op):
        torch.autograd.grad(total, x)


@pytest.mark.parametrize("op", OPS)
def test_a_gradient_penalty_of_an_activation_is_refused(op):
    """Whether the derivative is asked of the tensor itself, of one before it, or of another argument."""
    arguments = differentiable.leaves(op)
    activations = [2 * a for a in arguments]
    total = penalised(loss_of(op, activations), activations[0])
    for x in (activations[0], arguments[0], activations[-1], arguments[-1]):
        with refused(op):
            torch.autograd.grad(total, x, retain_graph=True)
    assert all(x.grad is None for x in arguments)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("factor_requires_grad", [False, True])
def test_an_upstream_gradient_with_or_without_a_graph(op, factor_requires_grad):
    arguments = differentiable.leaves(op)
    factor = torch.tensor(3.0, requires_grad=factor_requires_grad)
    total = penalised(loss_of(op, arguments) * factor, arguments[0])
    with refused(op):
        total.backward(retain_graph=True)
    if factor_requires_grad:
        with refused(op):
            torch.autograd.grad(total, factor)
    # nothing half done: the argument of the penalty has no gradient, and its own is what it was
    assert arguments[0].grad is None
    want = torch.autograd.grad(loss_of(op, arguments) * 3, arguments[0])[0]
    assert torch.equal(torch.autograd.grad(loss_of(op, arguments) * factor.detach(), arguments[0])[0], want)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("op", OPS)
def test_a_graph_that_nobody_differentiates_again_costs_nothing(op):
    arguments = differentiable.leaves(op)
    want = torch.autograd.grad(loss_of(op, arguments), arguments)
    got = torch.autograd.grad(loss_of(op, arguments), arguments, create_graph=True)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b) and b.requires_grad
        b.detach().mul_(2)
        with torch.no_grad():
            b.mul_(2)  # as clip_grad_norm_ does
    loss_of(op, arguments).backward(create_graph=True)
    loss_of(op, arguments).backward(create_graph=True)
    for x, b in zip(arguments, want, strict=True):
        torch.testing.assert_close(x.grad, 2 * b, rtol=1e-5, atol=1e-7)
        x.grad = None


@pytest.mark.parametrize("op", OPS)
def test_two_passes_through_one_graph(op):
    arguments = differentiable.leaves(op)
    loss = loss_of(op, arguments)
    first = torch.autograd.grad(loss, arguments, retain_graph=True)
    second = torch.autograd.grad(loss, arguments)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(op, reentrant):
    arguments = differentiable.leaves(op)
    want = torch.autograd.grad(loss_of(op, arguments), arguments)
    loss = checkpoint(differentiable.OPS[op][0], *arguments, use_reentrant=reentrant)
    loss.backward()
    for x, b in zip(arguments, want, strict=True):
        assert torch.equal(x.grad, b)
    if not reentrant:  # the other kind refuses grad() by itself
        loss = checkpoint(differentiable.OPS[op][0], *arguments, use_reentrant=False)
        total = penalised(loss, arguments[0])
        with refused(op):
            total.backward()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("compiler", COMPILED)
def test_compiled(op, compiler):
    """AOTAutograd refuses double backward by itself, for every op of torch."""
    arguments = differentiable.leaves(op)
    total = penalised(torch.compile(differentiable.OPS[op][0], backend=compiler)(*arguments), arguments[0])
    with refused(op) if compiler == "eager" else pytest.raises(RuntimeError, match="double backward"):
        total.backward()


def test_a_loss_that_is_changed_in_place():
    """What stands for the graph is no tensor of the caller's."""
    arguments = differentiable.leaves("policy_loss")
    want = torch.autograd.grad(loss_of("policy_loss", arguments), arguments)
    loss = loss_of("policy_loss", arguments)
    loss /= 2
    for a, b in zip(torch.autograd.grad(loss, arguments), want, strict=True):
        assert torch.equal(a, b / 2)
