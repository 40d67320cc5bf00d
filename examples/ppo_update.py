"""A whole PPO update - shaped rewards, advantages, both losses, backward - captured once and replayed.

    python examples/ppo_update.py [--batch 64] [--length 1024] [--updates 10]

On a GPU the update is one CUDA graph: no launch waits for Python, and nothing is read back. Without one the
same code runs eagerly. Beside it stands the update as one writes it in plain PyTorch, for time and for the
deviation of its gradients.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import rlkernel
from rlkernel import POLICY_METRICS, VALUE_METRICS

BETA, GAMMA, LAMBDA, EPSILON, CLIP_VALUE, VALUE_COEF = 0.02, 1.0, 0.95, 0.2, 0.2, 0.5


def make_batch(batch: int, length: int, device: torch.device, seed: int = 0) -> dict[str, Tensor]:
    """What a rollout leaves behind: one reward per answer, numbers per token, and the mask of the answers."""
    g = torch.Generator().manual_seed(seed)

    def noise(*size: int) -> Tensor:
        return torch.randn(*size, generator=g)

    old = -noise(batch, length).abs()
    lengths = torch.randint(length // 4, length + 1, (batch, 1), generator=g)
    tensors = {
        "rewards": noise(batch),
        "old_logprobs": old,
        "ref_logprobs": old + 0.05 * noise(batch, length),
        "old_values": noise(batch, length),
        "mask": torch.arange(length) < lengths,
    }
    # where the optimiser has moved to since: the two that get a gradient
    tensors["logprobs"] = old + 0.1 * noise(batch, length)
    tensors["values"] = tensors["old_values"] + 0.1 * noise(batch, length)
    return {name: x.to(device) for name, x in tensors.items()}


def update(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Loss, the gradients of logprobs and values, and both losses' metrics."""
    mask, old = batch["mask"], batch["old_logprobs"]
    rewards = rlkernel.kl_shaped_rewards(batch["rewards"], old, batch["ref_logprobs"], mask, beta=BETA)
    advantages, returns = rlkernel.gae(
        rewards, batch["old_values"], mask, gamma=GAMMA, lam=LAMBDA, whiten=True
    )
    policy = rlkernel.policy_loss(batch["logprobs"], old, advantages, mask, loss_type="ppo", epsilon=EPSILON)
    value = rlkernel.value_loss(
        batch["values"], returns, mask, old_values=batch["old_values"], cliprange_value=CLIP_VALUE
    )
    loss = policy.loss + VALUE_COEF * value.loss
    grads = torch.autograd.grad(loss, [batch["logprobs"], batch["values"]])
    return loss.detach(), *grads, policy.metrics, value.metrics


def plain_update(batch: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The same in plain PyTorch, as trainers write it; the oracle in fp64."""
    mask, old, old_values = batch["mask"], batch["old_logprobs"], batch["old_values"]
    count, last = mask.sum(), mask.sum(1) - 1
    rewards = -BETA * torch.where(mask, old - batch["ref_logprobs"], 0)
    rewards[torch.arange(len(last), device=last.device), last] += batch["rewards"]
    advantages, carried = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(mask.shape[1])):
        after = old_values[:, t + 1] * mask[:, t + 1] if t + 1 < mask.shape[1] else 0.0
        delta = rewards[:, t] + GAMMA * after - old_values[:, t]
        carried = torch.where(mask[:, t], delta + GAMMA * LAMBDA * carried, 0)
        advantages[:, t] = carried
    returns = advantages + old_values
    mean = (advantages * mask).sum() / count
    variance = ((advantages - mean) ** 2 * mask).sum() / (count - 1)
    advantages = (advantages - mean) * torch.rsqrt(variance + 1e-8) * mask
    ratio = (batch["logprobs"] - old).exp()
    surrogate = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - EPSILON, 1 + EPSILON))
    clipped = old_values + (batch["values"] - old_values).clamp(-CLIP_VALUE, CLIP_VALUE)
    errors = torch.max((batch["values"] - returns) ** 2, (clipped - returns) ** 2) / 2
    loss = ((surrogate + VALUE_COEF * errors) * mask).sum() / count
    return loss.detach(), *torch.autograd.grad(loss, [batch["logprobs"], batch["values"]])


def captured(batch: dict[str, Tensor]) -> tuple[Callable[[], object], tuple[Tensor, ...]]:
    """The update as one CUDA graph over the memory of ``batch``: its replay, and where its results lie."""
    rlkernel.warm_up(lambda: update(batch))  # compiles and loads what has to be before a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = update(batch)
    return graph.replay, results


def milliseconds(call: Callable[[], object], device: torch.device, times: int) -> float:
    """The median of ``times`` calls after one that does not count."""
    taken = []
    for _ in range(times + 1):
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(1000 * (time.perf_counter() - began))
    return statistics.median(taken[1:])


def main(arguments: list[str] | None = None) -> None:
    """Run updates on new rollouts, and print what they found and how long they took."""
    parser = argparse.ArgumentParser(description="A PPO update in one CUDA graph; eagerly without a GPU.")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--updates", type=int, default=10)
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if type(value) is int and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be 1 or more, got {value}")
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    batch = make_batch(options.batch, options.length, device)
    for name in ("logprobs", "values"):
        batch[name].requires_grad_()
    replay, results = captured(batch) if on_gpu else (lambda: update(batch), ())
    fresh = make_batch(options.batch, options.length, device, seed=1)
    with torch.no_grad():  # a graph reads the same memory every time: the next rollout is copied there
        for name, x in batch.items():
            x.copy_(fresh[name])
    ran = replay()
    loss, *grads, policy, value = results if on_gpu else ran  # type: ignore[misc, has-type]

    exact = {k: x.detach().double() if x.is_floating_point() else x for k, x in batch.items()}
    for name in ("logprobs", "values"):
        exact[name].requires_grad_()
    truth, plain = plain_update(exact), plain_update(batch)
    print(
        f"{'one CUDA graph' if on_gpu else 'eager, no GPU here'}; {options.batch} x {options.length} tokens"
    )
    print(f"loss {float(loss):.7f}, in fp64 {float(truth[0]):.7f}")
    for name, ours, torchs, true in zip(("logprobs", "values"), grads, plain[1:], truth[1:], strict=True):
        scale = true.abs().max()
        print(
            f"gradient of {name}: {(ours - true).abs().max() / scale:.1e} of its largest away from fp64,"
            f" plain PyTorch {(torchs - true).abs().max() / scale:.1e}"
        )
    for names, metrics in ((POLICY_METRICS, policy), (VALUE_METRICS, value)):
        print(", ".join(f"{n} {x:.4g}" for n, x in zip(names, metrics.tolist(), strict=True)))
    ours = milliseconds(replay, device, options.updates)
    theirs = milliseconds(lambda: plain_update(batch), device, min(options.updates, 3))
    print(f"update: {ours:.2f} ms; plain PyTorch {theirs:.1f} ms, {theirs / ours:.0f} times as long")


if __name__ == "__main__":
    main()
