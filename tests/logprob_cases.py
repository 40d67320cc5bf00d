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
    leaf = logits.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with running(backend):
        out = rlkernel.logprob(leaf, target_ids, **options)
        return out, None if upstream is None else gradient(out, leaf, upstream)


def gradient(out, leaf, upstream):
    used = [(o, g) for o, g in zip(out, upstream, strict=True) if o is not None and g is not None]
    # a product with an output of -inf would be NaN: the gradients are handed over as they are
    outputs, grads = zip(*((o, g.to(o.dtype)) for o, g in used), strict=True)
    return torch.autograd.grad(outputs, leaf, grads)[0]


def eager_and_compiled(backend, logits, target_ids, temperature, **support):
    """The gradient of the logits each way."""
    upstream = upstream_like(target_ids)

    def loss(x, ids, t):
        out = rlkernel.logprob(x * 2, ids, temperature=t, return_entropy=True, **support)
        return sum((o * g).sum() for o, g in zip(out, upstream, strict=True))

    grads = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
        leaf = logits.clone().requires_grad_()
        with rlkernel.use_backend(backend):
            function(leaf, target_ids, temperature).backward()
        grads.append(leaf.grad)
    return grads


def in_place(backend, logits, target_ids, upstream, **support):
    """The gradient of a backward in place, whether it lies where the logits were, and the loss once more."""
    leaf = logits.clone().requires_grad_()
    copied = leaf * 1
    seen = []
    copied.register_hook(lambda grad: seen.append(grad.data_ptr()))
    with running(backend):
        out = rlkernel.logprob(copied, target_ids, return_entropy=True, inplace_backward=True, **support)
        loss = sum((o * g).sum() for o, g in zip(out, upstream, strict=True))
        loss.backward(retain_graph=True)
    return leaf.grad, seen == [copied.data_ptr()], loss


def upstream_like(target_ids, seed=3):
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(target_ids.shape, generator=g).to(target_ids.device) for _ in range(3)]


def check_against_fp64(backend, logits, target_ids, upstream=None, magnitude=0.0, **options):
    """Outputs and gradient within the budget; PyTorch's own error is the reference's in fp32.

    ``magnitude``: of the numbers whose last digit the gradient depends on.
    """
    wide = {k: v.double() if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    truth, true_grad = run("reference", logits.double(), target_ids, upstream, **wide)
    torchs, torch_grad = run("reference", logits, target_ids, upstream, **options)
    again = backend == "reference"  # against itself: what is judged are dtypes, and that nothing is NaN
    ours, grad = (torchs, torch_grad) if again else run(backend, logits, target_ids, upstream, **options)
    judge((ours, grad), (torchs, torch_grad), (truth, true_grad), logits.dtype, magnitude)


def judge(ours, torchs, truth, dtype, magnitude=0.0):
    """Outputs and gradient of each: ours within the budget that PyTorch's error sets."""
    for name, a, b, c in zip(ours[0]._fields, ours[0], torchs[0], truth[0], strict=True):
        if a is not None:
            assert a.dtype == torch.float32
            check(name, a, b, c, magnitude=1)
    if ours[1] is not None:
        assert ours[1].dtype == dtype
        check("grad", ours[1], torchs[1], truth[1], magnitude=magnitude)
