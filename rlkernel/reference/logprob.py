"""What ``logprob`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

from typing import Any

import torch
from torch import Tensor

Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    return []


def forward(
    logits: Tensor, target_ids: Tensor, temperature: float | Tensor, ignore_index: int, return_entropy: bool
) -> Stats:
    """``(logprobs, entropy, lse, row_max, log_sum)``, where ``lse = row_max / T + log_sum``.

    The last two are what backward needs: ``exp(z - lse)`` loses digits when the logits share a large offset,
    while ``exp((y - row_max) / T - log_sum)`` does not.
    """
    kept = target_ids != ignore_index
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    row_max = y.amax(-1)
    t = _column(temperature)
    shifted = torch.where(y == -torch.inf, -torch.inf, y - row_max[..., None]) / t
    exps = shifted.exp()
    log_sum = exps.sum(-1).log()
    inside = (target_ids >= 0) & (target_ids < y.shape[-1])
    at_target = shifted.gather(-1, torch.where(inside, target_ids, 0)[..., None])[..., 0]
    logprobs = torch.where(inside, at_target - log_sum, torch.nan)
    lse = row_max / (t[..., 0] if isinstance(t, Tensor) else t) + log_sum
    entropy = None
    if return_entropy:
        entropy = log_sum - (torch.where(exps == 0, 0, exps * shifted).sum(-1) / exps.sum(-1))
        entropy = torch.where(kept, entropy, 0)
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    log_sum = torch.where(inside, log_sum, torch.nan)
    zeroed = (torch.where(kept, x, 0) for x in (logprobs, lse, row_max, log_sum))
    logprobs, lse, row_max, log_sum = zeroed
    return logprobs, entropy, lse, row_max, log_sum


def backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    inplace: bool,
) -> Tensor:
    """The gradient of the logits, in their dtype; ``inplace`` writes it over them."""
    kept = (target_ids != ignore_index)[..., None]
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    t = _column(temperature)
    logp = torch.where(y == -torch.inf, -torch.inf, y - row_max[..., None]) / t - log_sum[..., None]
    grad = _gradient(grad_logprobs, grad_entropy, grad_lse, logp, target_ids, entropy) / t
    grad = torch.where(kept, grad, 0).to(logits.dtype)
    return logits.copy_(grad) if inplace else grad


def _gradient(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    logp: Tensor,
    target_ids: Tensor,
    entropy: Tensor | None,
) -> Tensor:
    p = logp.exp()
    grad = torch.zeros_like(p)
    if grad_logprobs is not None:
        inside = (target_ids >= 0) & (target_ids < p.shape[-1])
        index = torch.where(inside, target_ids, 0)[..., None]
        onehot = torch.zeros_like(p).scatter_(-1, index, 1)
        # 1 - p loses all digits as p -> 1
        grad = grad_logprobs[..., None] * torch.where(onehot == 1, -torch.expm1(logp), -p)
    if grad_lse is not None:
        grad = grad + grad_lse[..., None] * p
    if grad_entropy is not None:
        assert entropy is not None
        grad = grad - grad_entropy[..., None] * torch.where(p == 0, 0, p * (logp + entropy[..., None]))
    return grad


def _column(temperature: float | Tensor) -> float | Tensor:
    return temperature[..., None] if isinstance(temperature, Tensor) else temperature


def make_inputs(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float = 4.0,
    ignored: float = 0.1,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.logprob`` for logits of ``shape`` ``[..., V]``: a share of ``ignored``
    rows, targets drawn from the distribution itself as a rollout draws them."""
    g = torch.Generator(device).manual_seed(seed)
    logits = torch.randn(shape, generator=g, device=device) * scale
    flat = logits.reshape(-1, shape[-1])
    # Gumbel-max in slices of rows, so that inputs of benchmark size do not need twice their memory
    targets = [(x - torch.empty_like(x).exponential_(generator=g).log_()).argmax(-1) for x in flat.split(256)]
    target_ids = torch.cat(targets) if targets else torch.zeros(0, dtype=torch.int64, device=device)
    drop = torch.rand(target_ids.shape, generator=g, device=device) < ignored
    target_ids = torch.where(drop, -100, target_ids).reshape(shape[:-1])
    return {"logits": logits.to(dtype), "target_ids": target_ids}
