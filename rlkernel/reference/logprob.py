"""What ``logprob`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.calls.sampling import MASS_ONE, Sampling, SamplingCall
from rlkernel.reference import sampling
from rlkernel.reference import unsupported as unsupported


def forward(call: LogprobCall) -> LogprobResults:
    if call.support_ids is not None:
        return _supported(call)
    logits, target_ids = call.logits, call.target_ids
    kept = target_ids != call.ignore_index
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    row_max = y.amax(-1)
    t = _column(call.temperature)
    shifted = torch.where(y == -torch.inf, -torch.inf, y - row_max[..., None]) / t
    exps = shifted.exp()
    log_sum = exps.sum(-1).log()
    inside = (target_ids >= 0) & (target_ids < y.shape[-1])
    at_target = shifted.gather(-1, torch.where(inside, target_ids, 0)[..., None])[..., 0]
    logprobs = torch.where(inside, at_target - log_sum, torch.nan)
    lse = row_max / (t[..., 0] if isinstance(t, Tensor) else t) + log_sum
    entropy = None
    if call.return_entropy:
        entropy = log_sum - (torch.where(exps == 0, 0, exps * shifted).sum(-1) / exps.sum(-1))
        entropy = torch.where(kept, entropy, 0)
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    log_sum = torch.where(inside, log_sum, torch.nan)
    logprobs, lse, row_max, log_sum = (torch.where(kept, x, 0) for x in (logprobs, lse, row_max, log_sum))
    return LogprobResults(logprobs, entropy, lse, row_max, log_sum)


def backward(call: LogprobCall, results: LogprobResults, grads: RowGrads) -> tuple[Tensor]:
    """The gradient of the logits, in their dtype; of gathered ones in that of the statistics."""
    if call.gathered:
        grad, _, used = _support_gradient(call, results, grads)
        assert results.values is not None
        return (torch.zeros_like(results.values, dtype=grad.dtype).masked_scatter_(used, grad),)
    logits, target_ids = call.logits, call.target_ids
    kept = target_ids != call.ignore_index
    if call.support_offsets is not None:
        kept &= (call.support_offsets.diff() == 0).view(kept.shape)
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    t = _column(call.temperature)
    shifted = torch.where(y == -torch.inf, -torch.inf, y - results.row_max[..., None]) / t
    logp = shifted - results.log_sum[..., None]
    grad = _gradient(grads, logp, target_ids, results.entropy) / t
    grad = torch.where(kept[..., None], grad, 0).to(logits.dtype)
    if call.support_ids is not None:
        at_support, place, _ = _support_gradient(call, results, grads)
        if len(at_support):
            grad[place] = at_support.to(grad.dtype)
    return (logits.copy_(grad) if call.inplace_backward else grad,)


def _supported(call: LogprobCall) -> LogprobResults:
    """Of rows of which ``support_ids[support_offsets[r] : support_offsets[r + 1]]`` alone count.

    Whole rows have the statistics of ``sampling``.  A target outside its row's support gives -inf.
    """
    logits, target_ids, ids, offsets = call.logits, call.target_ids, call.support_ids, call.support_offsets
    assert ids is not None and offsets is not None
    n, shape = target_ids.numel(), target_ids.shape
    row = _row_of(offsets, ids.numel())
    used = (row >= 0) & (row < n)
    values = logits if call.gathered else logits.new_zeros(ids.shape)
    if not call.gathered and used.any():
        index = torch.unravel_index(row[used], shape) if shape else ()
        place = *index, ids[used].long()
        values[used] = logits[place]
    row, y = row[used], values[used].to(torch.promote_types(logits.dtype, torch.float32))
    t = _per_row(call.temperature, y, n)
    row_max = y.new_full((n,), -torch.inf).scatter_reduce(0, row, y, "amax")
    scaled = torch.where(y == -torch.inf, -torch.inf, y - row_max[row]) / t[row]
    mass = (scaled.exp().double() * MASS_ONE).round().to(torch.int64)
    total = mass.new_zeros(n).index_add_(0, row, mass).double() / MASS_ONE
    log_sum = total.log()
    at_target = y.new_full((n,), -torch.inf)
    is_target = ids[used] == target_ids.reshape(-1)[row]
    at_target[row[is_target]] = scaled[is_target]
    columns = [at_target.double() - log_sum, row_max.double() / t + log_sum, row_max, log_sum]
    if call.return_entropy:
        weighted = torch.where(mass == 0, 0, mass * scaled.double()) / MASS_ONE
        columns.append(log_sum - total.new_zeros(n).index_add_(0, row, weighted) / total)
    sound = row_max.isfinite()
    kept = (offsets[1:] > offsets[:-1]) & (target_ids.reshape(-1) != call.ignore_index)
    columns = [torch.where(kept, torch.where(sound, x, torch.nan), 0).to(y.dtype) for x in columns]
    logprobs, lse, row_max, log_sum, *entropy = (x.view(shape) for x in columns)
    some = LogprobResults(
        logprobs, entropy[0] if call.return_entropy else None, lse, row_max, log_sum, values
    )
    return some if call.gathered else _with_whole_rows(some, call)


def _support_gradient(
    call: LogprobCall, results: LogprobResults, grads: RowGrads
) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
    """The gradient at the supports of the rows that count, the place of each in the logits, and which entries
    of the supports these are.  A target of probability 0 has no gradient."""
    target_ids, ids, offsets = call.target_ids, call.support_ids, call.support_offsets
    values, row_max = results.values, results.row_max
    assert ids is not None and offsets is not None and values is not None
    n = target_ids.numel()
    row = _row_of(offsets, ids.numel())
    used = (row >= 0) & (row < n)
    used &= (target_ids.reshape(-1) != call.ignore_index)[row.clamp(0, n - 1)] if n else used
    row, ids, y = row[used], ids[used].long(), values[used].to(row_max.dtype)
    t = _per_row(call.temperature, y, n)
    logprob, m, log_s = (x.reshape(-1)[row] for x in (results.logprobs, row_max, results.log_sum))
    g_logprob, g_entropy, g_lse = (None if g is None else g.reshape(-1)[row] for g in grads)
    logp = torch.where(y == -torch.inf, -torch.inf, y - m) / t[row] - log_s
    p, grad = logp.exp(), torch.zeros_like(y)
    if g_logprob is not None:
        is_target = ids == target_ids.reshape(-1)[row]
        grad = g_logprob * torch.where(is_target, -torch.expm1(logp), -p)
        grad = torch.where(logprob == -torch.inf, 0, grad)
    if g_lse is not None:
        grad = grad + g_lse * p
    if g_entropy is not None:
        assert results.entropy is not None
        grad = grad - g_entropy * torch.where(p == 0, 0, p * (logp + results.entropy.reshape(-1)[row]))
    index = torch.unravel_index(row, target_ids.shape) if target_ids.shape else ()
    return grad / t[row], (*index, ids), used


def _row_of(offsets: Tensor, entries: int) -> Tensor:
    """The row of each entry; -1 and the number of rows for those outside all of them."""
    return torch.searchsorted(offsets, torch.arange(entries, device=offsets.device), right=True) - 1


def _with_whole_rows(some: LogprobResults, call: LogprobCall) -> LogprobResults:
    """``some``, and in the rows without a support what ``sampling`` says of the target."""
    assert call.support_offsets is not None
    ids, vocab = call.target_ids.reshape(-1), call.logits.shape[-1]
    whole = (call.support_offsets.diff() == 0) & (ids != call.ignore_index)
    if not whole.any():
        return some
    t = call.temperature.reshape(-1) if isinstance(call.temperature, Tensor) else call.temperature
    request = Sampling(temperature=t, token_ids=ids, entropy=call.return_entropy, softmax=True)
    got = sampling.forward(SamplingCall(call.logits.reshape(-1, vocab), None, request))
    assert got.row_max is not None and got.log_sum is not None
    inverse = 1 / t.double() if isinstance(t, Tensor) else 1 / t
    lse = (got.row_max.double() * inverse + got.log_sum.double()).to(got.row_max.dtype)
    # a target outside the vocabulary makes the whole gradient row NaN through log_sum
    log_sum = torch.where((ids >= 0) & (ids < vocab), got.log_sum, torch.nan)
    new = got.tempered_logprobs, got.entropy, lse, got.row_max, log_sum
    merged = (
        None if x is None or old is None else torch.where(whole, x, old.reshape(-1)).view(old.shape)
        for x, old in zip(new, some, strict=False)
    )
    return some._replace(**dict(zip(some._fields, merged, strict=False)))  # type: ignore[arg-type]


def _per_row(temperature: float | Tensor, like: Tensor, rows: int) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.reshape(-1)
    return like.new_full((rows,), temperature)


def _gradient(grads: RowGrads, logp: Tensor, target_ids: Tensor, entropy: Tensor | None) -> Tensor:
    p = logp.exp()
    grad = torch.zeros_like(p)
    if grads.logprobs is not None:
        inside = (target_ids >= 0) & (target_ids < p.shape[-1])
        index = torch.where(inside, target_ids, 0)[..., None]
        onehot = torch.zeros_like(p).scatter_(-1, index, inside[..., None].to(p.dtype))
        # 1 - p loses all digits as p -> 1
        grad = grads.logprobs[..., None] * torch.where(onehot == 1, -torch.expm1(logp), -p)
    if grads.lse is not None:
        grad = grad + grads.lse[..., None] * p
    if grads.entropy is not None:
        assert entropy is not None
        grad = grad - grads.entropy[..., None] * torch.where(p == 0, 0, p * (logp + entropy[..., None]))
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
    logits = torch.randn(shape, generator=g, dtype=torch.float32, device=device) * scale
    flat = logits.reshape(-1, shape[-1])
    # Gumbel-max in slices of rows, so that inputs of benchmark size do not need twice their memory
    targets = [(x - torch.empty_like(x).exponential_(generator=g).log_()).argmax(-1) for x in flat.split(256)]
    target_ids = torch.cat(targets) if targets else torch.zeros(0, dtype=torch.int64, device=device)
    drop = torch.rand(target_ids.shape, generator=g, dtype=torch.float32, device=device) < ignored
    target_ids = torch.where(drop, -100, target_ids).reshape(shape[:-1])
    return {"logits": logits.to(dtype), "target_ids": target_ids}
