"""Engines in bf16 and fp16, two ranks over gloo: scores against logits, losses scaled and steps skipped."""

import math

import torch
import zero_engines

STEPS = 5
KINDS = ("zero2-bf16", "zero2-fp16dynamic", "zero3-bf16", "zero3-tied-fp16")


def _train(rank, kind, scored):
    """Losses, gradients and the scale of each step, the weights behind them, and which steps were skipped."""
    from deepspeed.utils import safe_get_full_grad

    from rlkernel.integrations import deepspeed as adapter

    engine = zero_engines.engine(kind)
    # too much for a gradient under the first scale, and for any
    times = {0: 64 if "dynamic" in kind else 1, 3: math.inf}
    g, losses, grads, scales, skipped = torch.Generator().manual_seed(3 + rank), [], [], [], []
    for step in range(STEPS):
        ids = torch.randint(3, zero_engines.VOCAB, (2, 17), generator=g)
        if scored:
            logprobs, entropy = adapter.score(engine, ids, temperature=0.8, return_entropy=True)
        else:
            logp = (engine(ids).logits[:, :-1].float() / 0.8).log_softmax(-1)
            logprobs = logp.gather(-1, ids[:, 1:, None])[..., 0]
            entropy = -(logp.exp() * logp).sum(-1)
        weights = torch.linspace(-1, 1, logprobs.numel()).view_as(logprobs)
        loss = (logprobs * weights).mean() + 0.1 * entropy.mean()
        engine.backward(loss * times.get(step, 1))
        found = [safe_get_full_grad(p) for p in engine.module.parameters()]
        before = engine.skipped_steps
        engine.step()
        skipped.append(engine.skipped_steps > before)
        scales.append(float(engine.optimizer.loss_scale))
        losses.append(loss.detach())
        grads += [] if skipped[-1] else [x.float().clone() for x in found]
    return torch.stack(losses), grads, zero_engines.weights(engine), scales, skipped


def job(rank, kind):
    return [_train(rank, kind, scored) for scored in (False, True)]


def _apart(found, stock):
    """The largest difference, in roundings of the largest entry, of tensors in pairs."""
    return max(float((x - y).abs().max() / y.abs().max()) for x, y in zip(found, stock, strict=True))


def check(kind, reports):
    """Within some roundings of the dtype, and the same steps skipped."""
    eps = torch.finfo(zero_engines.dtype(kind)).eps
    for stock, scored in reports:
        losses, grads, weights, scales, skipped = stock
        assert scored[3:] == (scales, skipped), kind
        assert skipped == ["dynamic" in kind, False, False, True, False], kind
        for name, x, y, most in (
            ("losses", [scored[0]], [losses], 1),
            ("gradients", scored[1], grads, 8),
            ("weights", scored[2], weights, 2),
        ):
            apart = _apart(x, y) / eps
            assert 0 < apart <= most, f"{kind}: {name} differ by {apart} roundings"
