"""What the test files of policy_loss share: running it, and judging the result by fp64."""

import torch
from accuracy import check
from backends import running

import rlkernel

# what a loss type cannot do without
NEEDS = {"dro": {"dro_beta": 0.7}, "clip_cov": {"cov_ratio": 0.1, "clip_cov_lb": 0.05}, "kl_cov": {"cov_ratio": 0.1}}


def run(backend, inputs, upstream=1.0, **options):
    """Loss, metrics and the gradients of logprobs and entropy."""
    inputs = dict(inputs)
    leaves = []
    for name in ("logprobs", "entropy"):
        if name in inputs:
            inputs[name] = inputs[name].detach().clone().requires_grad_()
            leaves.append(inputs[name])
    with running(backend):
        out = rlkernel.policy_loss(**inputs, **options)
        grads = torch.autograd.grad(out.loss * upstream, leaves, allow_unused=True)
    return out.loss.detach(), out.metrics, *grads


def to(inputs, dtype):
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}


def check_against_fp64(backend, inputs, **options):
    truth = run("reference", to(inputs, torch.float64), **options)
    torchs = run("reference", inputs, **options)
    ours = run(backend, inputs, **options)
    # sums cancel: their digits are those of their terms
    terms = (truth[2].abs() * (1 + inputs["logprobs"].abs())).sum().item()
    sizes = {"loss": max(terms, 1e-3), "grad": 8 * truth[2].abs().max().item(), "metrics": 1.0}
    for name, a, b, c in zip(("loss", "metrics", "grad", "grad_entropy"), ours, torchs, truth, strict=False):
        if c is None:
            assert a is None
            continue
        assert a.dtype == torch.float32
        check(name, a, b, c, magnitude=sizes.get(name, 0.0))
    return truth
