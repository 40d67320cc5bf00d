"""What ``logprob`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import math
from typing import Any

import torch
from torch import Tensor

from rlkernel.reference import sampling
from rlkernel.types import Sampling

Stats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor]
SupportStats = tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor]
MASS_ONE = 2.0**40  # the integer mass of a token as likely as the likeliest, as in sampling


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


def support_forward(
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    return_entropy: bool,
    support_ids: Tensor,
    support_offsets: Tensor,
    gathered: bool,
) -> SupportStats:
    """``forward`` of rows of which ``support_ids[support_offsets[r] : support_offsets[r + 1]]`` alone count.

    A row without a support is whole, and has the statistics of ``sampling``.  Last comes what backward needs
    of the logits: those at the support, [nnz].  ``gathered``: ``logits`` are these already, and whole rows
    give 0.  A target outside its row's support gives -inf.
    """
    n, shape = target_ids.numel(), target_ids.shape
    row = _row_of(support_offsets, support_ids.numel())
    used = (row >= 0) & (row < n)
    values = logits if gathered else logits.new_zeros(support_ids.shape)
    if not gathered and used.any():
        index = torch.unravel_index(row[used], shape) if shape else ()
        place = *index, support_ids[used].long()
        values[used] = logits[place]
    row, y = row[used], values[used].to(torch.promote_types(logits.dtype, torch.float32))
    t = _per_row(temperature, y, n)
    row_max = y.new_full((n,), -torch.inf).scatter_reduce(0, row, y, "amax")
    scaled = torch.where(y == -torch.inf, -torch.inf, y - row_max[row]) / t[row]
    mass = (scaled.exp().double() * MASS_ONE).round().to(torch.int64)
    total = mass.new_zeros(n).index_add_(0, row, mass).double() / MASS_ONE
    log_sum = total.log()
    at_target = y.new_full((n,), -torch.inf)
    is_target = support_ids[used] == target_ids.reshape(-1)[row]
    at_target[row[is_target]] = scaled[is_target]
    columns = [at_target.double() - log_sum, row_max.double() / t + log_sum, row_max, log_sum]
    if return_entropy:
        weighted = torch.where(mass == 0, 0, mass * scaled.double()) / MASS_ONE
        columns.append(log_sum - total.new_zeros(n).index_add_(0, row, weighted) / total)
    sound = row_max.isfinite()
    kept = (support_offsets[1:] > support_offsets[:-1]) & (target_ids.reshape(-1) != ignore_index)
    columns = [torch.where(kept, torch.where(sound, x, torch.nan), 0).to(y.dtype) for x in columns]
    logprobs, lse, row_max, log_sum, *entropy = (x.view(shape) for x in columns)
    stats = logprobs, entropy[0] if return_entropy else None, lse, row_max, log_sum
    if not gathered:
        stats = _with_whole_rows(stats, logits, target_ids, temperature, ignore_index, support_offsets)
    return *stats, values


def support_backward(
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    grad_lse: Tensor | None,
    values: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    support_ids: Tensor,
    support_offsets: Tensor,
    logprobs: Tensor,
    entropy: Tensor | None,
    row_max: Tensor,
    log_sum: Tensor,
    out: Tensor | None,
) -> Tensor:
    """The gradient at the support of each row, written to ``out`` [..., V], which holds 0 in these rows; as
    [nnz] where ``out`` is None.  A target of probability 0 has no gradient."""
    n = target_ids.numel()
    row = _row_of(support_offsets, support_ids.numel())
    used = (row >= 0) & (row < n)
    used &= (target_ids.reshape(-1) != ignore_index)[row.clamp(0, n - 1)] if n else used
    row, ids, y = row[used], support_ids[used].long(), values[used].to(row_max.dtype)
    t = _per_row(temperature, y, n)
    logprob, m, log_s = (x.reshape(-1)[row] for x in (logprobs, row_max, log_sum))
    grads = (None if g is None else g.reshape(-1)[row] for g in (grad_logprobs, grad_entropy, grad_lse))
    g_logprob, g_entropy, g_lse = grads
    logp = torch.where(y == -torch.inf, -torch.inf, y - m) / t[row] - log_s
    p, grad = logp.exp(), torch.zeros_like(y)
    if g_logprob is not None:
        is_target = ids == target_ids.reshape(-1)[row]
        grad = g_logprob * torch.where(is_target, -torch.expm1(logp), -p)
        grad = torch.where(logprob == -torch.inf, 0, grad)
    if g_lse is not None:
        grad = grad + g_lse * p
    if g_entropy is not None:
        assert entropy is not None
        grad = grad - g_entropy * torch.where(p == 0, 0, p * (logp + entropy.reshape(-1)[row]))
    grad = grad / t[row]
    if out is None:
        return torch.zeros_like(values, dtype=row_max.dtype).masked_scatter_(used, grad)
    if len(row):
        index = torch.unravel_index(row, target_ids.shape) if target_ids.shape else ()
        place = *index, ids
        out[place] = grad.to(out.dtype)
    return out


def _row_of(offsets: Tensor, entries: int) -> Tensor:
    """The row of each entry; -1 and the number of rows for those outside all of them."""
    return torch.searchsorted(offsets, torch.arange(entries, device=offsets.device), right=True) - 1


def _with_whole_rows(
    stats: Stats,
    logits: Tensor,
    target_ids: Tensor,
    temperature: float | Tensor,
    ignore_index: int,
    support_offsets: Tensor,
) -> Stats:
    """``stats``, and in the rows without a support what ``sampling`` says of the target."""
    ids, vocab = target_ids.reshape(-1), logits.shape[-1]
    whole = (support_offsets.diff() == 0) & (ids != ignore_index)
    if not whole.any():
        return stats
    t = temperature.reshape(-1) if isinstance(temperature, Tensor) else temperature
    sampling_rule = Sampling(
        temperature=t, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=math.inf, seeds=None, positions=None,
        token_ids=ids, token_bitmask=None, skip=None, order="sequential", gumbel=False, raw=False,
        entropy=stats[1] is not None, rank=False, support=0,
    )  # fmt: skip
    got = sampling.forward(logits.reshape(-1, vocab), None, sampling_rule)
    inverse = 1 / t.double() if isinstance(t, Tensor) else 1 / t
    lse = (got.row_max.double() * inverse + got.log_sum.double()).to(got.row_max.dtype)
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    log_sum = torch.where((ids >= 0) & (ids < vocab), got.log_sum, torch.nan)
    logprobs, entropy, *others = stats

    def merged(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(whole, new, old.reshape(-1)).view(target_ids.shape)

    return (
        merged(got.tempered_logprobs, logprobs),
        None if entropy is None or got.entropy is None else merged(got.entropy, entropy),
        *map(merged, (lse, got.row_max, log_sum), others),
    )  # type: ignore[return-value]


def _per_row(temperature: float | Tensor, like: Tensor, rows: int) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.reshape(-1)
    return like.new_full((rows,), temperature)


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
