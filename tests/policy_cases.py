"""What the test files of policy_loss share: running it, and judging the result by fp64."""

import torch
from accuracy import check
from backends import running

import rlkernel

# what a loss type cannot do without
NEEDS = {
    "dro": {"dro_beta": 0.7},
    "clip_cov": {"cov_ratio": 0.1, "clip_cov_lb": 0.05},
    "kl_cov": {"cov_ratio": 0.1},
}


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


_expected = {}  # the same for every backend, and most of the time of a test


def expected(inputs, options):
    """The results in fp64, and those of PyTorch in the inputs' dtype."""
    tensors = [
        (k, v.dtype, tuple(v.shape), v.cpu().contiguous().numpy().tobytes()) for k, v in inputs.items()
    ]
    key = hash((tuple(tensors), repr(sorted(options.items(), key=str))))
    if key not in _expected:
        truth = run("reference", to(inputs, torch.float64), **options)
        _expected[key] = truth, run("reference", inputs, **options)
    return _expected[key]


def check_against_fp64(backend, inputs, **options):
    truth, torchs = expected(inputs, options)
    ours = run(backend, inputs, **options)
    # sums cancel: their digits are those of their terms
    mask = inputs["mask"]
    logprobs = torch.where(mask & ~inputs["logprobs"].isneginf(), inputs["logprobs"], 0).abs()
    terms = (truth[2].abs() * (1 + logprobs)).sum().item()
    advantages = inputs["advantages"]
    advantages = advantages if advantages.shape == mask.shape else advantages[..., None]
    tokens, sequences = mask.sum(), mask.any(-1).sum()  # of a packed batch one: never too many
    mode = options.get("loss_agg_mode", "token-mean")
    divisor = {"token-sum": torch.ones(()), "seq-mean-token-sum": sequences}.get(mode, tokens)
    usual = (torch.where(mask, advantages, 0).abs().sum() / divisor.clamp(min=1).to(mask.device)).item()
    largest = truth[2].abs().max().item() if truth[2].numel() else 0.0
    sizes = {"loss": max(terms, usual), "grad": 8 * largest, "metrics": 1.0}
    for name, a, b, c in zip(("loss", "metrics", "grad", "grad_entropy"), ours, torchs, truth, strict=False):
        if c is None:
            assert a is None
            continue
        assert a.dtype == torch.float32
        check(name, a, b, c, magnitude=sizes.get(name, 0.0))
    return truth
