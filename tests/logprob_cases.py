"""What the test files of logprob share: running it, and judging the result by fp64."""

import pytest
import torch
from accuracy import check
from backends import running

import rlkernel

DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"]
)


def run(backend, logits, target_ids, upstream=None, **options):
    """Outputs and the gradient of the logits, on one backend."""
    logits = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with running(backend):
        out = rlkernel.logprob(logits, target_ids, **options)
        if upstream is None:
            return out, None
        used = [(o, g) for o, g in zip(out, upstream, strict=True) if o is not None and g is not None]
        loss = sum((o * g.to(o.dtype)).sum() for o, g in used)
        (grad,) = torch.autograd.grad(loss, logits)
    return out, grad


def upstream_like(target_ids, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(target_ids.shape, generator=g).to(target_ids.device) for _ in range(3)]


def check_against_fp64(backend, logits, target_ids, upstream=None, **options):
    """Outputs and gradient within the budget; PyTorch's own error is the reference's in fp32."""
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    truth, true_grad = run("reference", logits.double(), target_ids, upstream, **wide)
    torchs, torch_grad = run("reference", logits, target_ids, upstream, **options)
    ours, grad = run(backend, logits, target_ids, upstream, **options)
    for name, a, b, c in zip(ours._fields, ours, torchs, truth, strict=True):
        if a is not None:
            assert a.dtype == torch.float32
            check(name, a, b, c, magnitude=1)
    if grad is not None:
        assert grad.dtype == logits.dtype
        check("grad", grad, torch_grad, true_grad)
