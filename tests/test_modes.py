"""A mode of torch that is not entered changes nothing; where it would, it is entered."""

from types import SimpleNamespace

import pytest
import torch

from rlkernel.runtime.modes import once_differentiable, without_autocast


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.calls = 0
        return x * x

    @staticmethod
    @once_differentiable("square")
    def backward(ctx, saved, grad):
        ctx.calls += 1
        return 2 * saved[0] * grad


def test_a_second_derivative_is_refused():
    x = torch.tensor(3.0, requires_grad=True)
    (once,) = torch.autograd.grad(_Square.apply(x), x)
    assert once == 6 and not once.requires_grad
    y = _Square.apply(x)
    (recorded,) = torch.autograd.grad(y, x, create_graph=True)
    assert recorded == 6 and y.grad_fn.calls == 1  # what backward leaves on its context stays there
    with pytest.raises(RuntimeError, match="square has no second derivative"):
        recorded.backward()


def test_no_gradient_at_all_is_no_gradient():
    """An output that nothing depends on, where autograd does not make zeros for it."""
    assert once_differentiable("square")(None)(SimpleNamespace(needs_input_grad=(True, False)), None) == (
        None,
        None,
    )


@pytest.mark.parametrize("on", [False, True])
def test_products_keep_their_dtype(on):
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        with without_autocast(x.device):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == (torch.bfloat16 if on else torch.float32)
