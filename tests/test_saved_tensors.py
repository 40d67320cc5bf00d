"""Hooks for saved tensors hand back the values that were saved, in whatever memory: no gradient shows it."""

import contextlib

import backends
import differentiable
import pytest
import torch
from differentiable import OPS
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import rlkernel
from rlkernel.ops.swiglu import op as swiglu


def columns_first(x):
    return x.mT.contiguous().mT if x.dim() > 1 else x.clone()


def every_third(x):
    wide = x.new_zeros(*x.shape, 3)
    if x.is_floating_point():
        wide.fill_(torch.nan)
    return wide[..., 1].copy_(x)


def rows_apart(x):
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)[..., :-3].copy_(x) if x.dim() else x.clone()


def behind_one(x):
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def negated(x):
    return torch._neg_view(-x) if x.is_floating_point() else x.clone()


def imaginary(x):
    """As torch gives the imaginary part of what was conjugated: with another stride, and negated."""
    if x.dtype not in (torch.float32, torch.float64):
        return x.clone()
    return torch.complex(torch.zeros_like(x), -x).conj().imag


def parameter(x):
    return torch.nn.Parameter(x.clone(), requires_grad=x.is_floating_point())


WAYS = [columns_first, every_third, rows_apart, behind_one, negated, imaginary, parameter]
CASES = [pytest.param(op, *pair.values, marks=pair.marks, id=f"{op}-{pair.id}") for op in OPS
         for pair in backends.of(differentiable.name_of(op)) if pair.values[1] == "cpu"]  # fmt: skip


def gradients(op, hooks=None, loss=None):
    arguments = differentiable.leaves(op)
    with hooks or contextlib.nullcontext():
        total = (loss or OPS[op][0])(*arguments)
    return dict(zip(OPS[op][1], torch.autograd.grad(total, arguments), strict=True))


def assert_near(name, got, want):
    """A library's products may differ in the last place with the address."""
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text: f"{name}: {text}")


def assert_same(way, got, want):
    for name, g in got.items():
        assert_near(f"{name}, {way}", g, want[name])


@pytest.mark.parametrize("op,backend,device", CASES)
def test_saved_tensors_in_other_memory(op, backend, device):
    with backends.running(backend):
        want = gradients(op)
        for way in WAYS:
            assert_same(way.__name__, gradients(op, saved_tensors_hooks(torch.clone, way)), want)
        assert_same("on the CPU", gradients(op, save_on_cpu()), want)


@pytest.mark.parametrize("op", OPS)
def test_hooks_of_one_node(op):
    """They are told after forward."""
    arguments = differentiable.leaves(op)
    loss = OPS[op][0](*arguments)
    found, nodes = 0, [loss.grad_fn]
    for node in nodes:
        nodes += [f for f, _ in node.next_functions if f is not None and f not in nodes]
        both = (getattr(node, name, ()) for name in ("_raw_saved_tensors", "saved_tensors"))
        for saved, x in zip(*both, strict=True):
            if x is not None:
                saved.register_hooks(torch.clone, every_third)
                found += 1
    assert found
    got = dict(zip(OPS[op][1], torch.autograd.grad(loss, arguments), strict=True))
    assert_same("every third", got, gradients(op))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_of_a_compiled_graph(op, compiler):
    compiled = torch.compile(OPS[op][0], backend=compiler)
    want = gradients(op, loss=compiled)
    for way in WAYS:
        got = gradients(op, saved_tensors_hooks(torch.clone, way), compiled)
        assert_same(way.__name__, got, want)
    torch._dynamo.reset()  # no other test gets what was compiled for these


def test_a_view_is_not_copied(monkeypatch):
    """What has the strides that forward saw is read where it is, dense or not."""
    seen = []
    backward = swiglu.backward
    monkeypatch.setattr(swiglu, "backward", lambda *given: seen.append(given[1]) or backward(*given))
    gate, up = (x.requires_grad_() for x in torch.randn(4, 12).split(6, -1))
    rlkernel.swiglu(gate, up).sum().backward()
    assert [x.data_ptr() for x in (seen[0].gate, seen[0].up)] == [gate.data_ptr(), up.data_ptr()]
