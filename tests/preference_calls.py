"""How the tests of preference_loss call it, and what they compare."""

import torch
from accuracy import check, check_rounded_once
from backends import running

import rlkernel
from rlkernel.calls.preference_loss import PREFERENCE_METRICS
from rlkernel.ops.preference_loss import rule as names

OUTPUTS = ("loss", "metrics", "chosen_rewards", "rejected_rewards", "logps", "running_delta", "grad")


def run(backend, inputs, upstream=1.0, **options):
    """The outputs and the gradient of logprobs."""
    inputs = dict(inputs)
    inputs["logprobs"] = inputs["logprobs"].detach().clone().requires_grad_()
    with running(backend):
        out = rlkernel.preference_loss(**inputs, **options)
        (grad,) = torch.autograd.grad(out.loss * upstream, inputs["logprobs"])
    return out.loss.detach(), *out[1:], grad


def to(inputs, dtype):
    return {
        k: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v
        for k, v in inputs.items()
    }


def arguments(loss_type, inputs):
    """Inputs and options with which a loss type can be called."""
    options = {"loss_type": loss_type}
    device, rows = inputs["logprobs"].device, len(inputs["logprobs"])
    if loss_type in names.UNPAIRED:
        inputs = inputs | {"labels": torch.arange(rows, device=device) % 3 == 0}
        options |= {"desirable_weight": 1.3, "undesirable_weight": 0.8}
    if loss_type == "kto":
        options["kl"] = 0.7
    if loss_type in names.REFERENCE_FREE:
        inputs = inputs | {"ref_logprobs": None}
    if loss_type in names.SMOOTHED:
        options["label_smoothing"] = 0.1
    return inputs, options


def check_against_fp64(backend, inputs, **options):
    truth = run("reference", to(inputs, torch.float64), **options)
    torchs = run("reference", inputs, **options)
    ours = run(backend, inputs, **options)
    size = truth[1][PREFERENCE_METRICS.index("preference_loss")].abs().item() + 1e-3
    for name, a, b, c in zip(OUTPUTS, ours, torchs, truth, strict=True):
        if c is None:
            assert a is None
            continue
        assert a.dtype == torch.float32
        check(name, a, b, c, magnitude=size if name == "loss" else 0.0)
        if name == "logps":
            check_rounded_once(name, a, c)
