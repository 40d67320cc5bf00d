"""A mode of torch that is not entered changes nothing; where it would, it is entered."""

import pytest
import torch

from rlkernel.ops._modes import once_differentiable, without_autocast


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def test_a_second_derivative_is_refused():
    x = torch.tensor(3.0, requires_grad=True)
    (once,) = torch.autograd.grad(_Square.apply(x), x)
    assert once == 6 and not once.requires_grad
    (recorded,) = torch.autograd.grad(_Square.apply(x) * x, x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        recorded.backward()


@pytest.mark.parametrize("on", [False, True])
def test_products_keep_their_dtype(on):
    x = torch.ones(2, 2)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
        with without_autocast(x.device):
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == (torch.bfloat16 if on else torch.float32)
