"""What the test files of value_loss share: running it, and judging the result by fp64."""

from functools import partial

import torch
from accuracy import check
from backends import running

import rlkernel
from rlkernel import VALUE_METRICS
from rlkernel.reference import value_loss as reference

CLIP = {"cliprange_value": 0.2}
make_inputs = partial(reference.make_inputs, clipped=True)


def run(backend, inputs, upstream=1.3, **options):
    """Loss, metrics and the gradient of the values, on one backend."""
    values = inputs["values"].detach().clone(memory_format=torch.preserve_format).requires_grad_()
    options.setdefault("loss_scale_factor", 9.0)
    with running(backend):
        out = rlkernel.value_loss(**inputs | {"values": values}, **options)
        (grad,) = torch.autograd.grad(out.loss * upstream, values)
    return out.loss.detach(), out.metrics, grad


def metric(metrics, name):
    return metrics[VALUE_METRICS.index(name)]


def double(inputs):
    return {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}


def check_against_fp64(backend, inputs, **options):
    truth, torchs, ours = (
        run(b, x, **options)
        for b, x in (("reference", double(inputs)), ("reference", inputs), (backend, inputs))
    )
    assert ours[0].dtype == ours[1].dtype == torch.float32 and ours[2].dtype == inputs["values"].dtype
    check("loss", ours[0], torchs[0], truth[0])
    check("grad", ours[2], torchs[2], truth[2])
    largest = truth[1][3:].nan_to_num(0, 0, 0).abs().max().item()
    for name, a, b, c in zip(VALUE_METRICS, ours[1], torchs[1], truth[1], strict=True):
        counts = name in ("tokens", "nonfinite")
        assert not counts or a == c, name
        check(name, a, b, c, magnitude=max(1, largest))
