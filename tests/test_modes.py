"""A mode of torch that is not entered changes nothing; where it would, it is entered."""

from types import SimpleNamespace

import pytest
import torch
from differentiable import OPS, leaves

import rlkernel
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


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("op", OPS)
def test_the_reference_has_its_values_where_torch_leaves_autograd_out(op):
    """In inference mode, of its tensors, and in a node of a compiled graph."""
    loss, given = OPS[op][0], [x.detach() for x in leaves(op)]
    with rlkernel.use_backend("reference"):
        want = loss(*given)
        with torch.inference_mode():
            assert torch.equal(loss(*given), want)
            assert torch.equal(loss(*[x.clone() for x in given]), want)
        torch._dynamo.reset()
        compiled = torch.compile(loss, backend="aot_eager")
        mine, theirs = leaves(op), leaves(op)
        assert torch.equal(compiled(*theirs), loss(*mine))
        compiled(*theirs).backward()
        loss(*mine).backward()
    assert all(torch.equal(x.grad, y.grad) for x, y in zip(mine, theirs, strict=True))
