"""Rows that keep some tokens of the vocabulary: ragged supports, and what they mean in plain PyTorch."""

import torch


def supports(target_ids, vocab, sizes, seed=0):
    """CSR supports of ``sizes`` tokens (0: the row is whole), each with its row's target, in random order."""
    g = torch.Generator().manual_seed(seed)
    rows = []
    for r, target in enumerate(target_ids.reshape(-1).tolist()):
        size = min(sizes[r % len(sizes)], vocab)
        ids = torch.randperm(vocab, generator=g)[:size]
        if size and target >= 0 and target not in ids:
            ids[torch.randint(size, (1,), generator=g)] = target
        rows.append(ids)
    offsets = torch.tensor([0, *(len(x) for x in rows)]).cumsum(0)
    ids = torch.cat(rows) if rows else torch.zeros(0, dtype=torch.int64)
    device = target_ids.device
    return {"support_ids": ids.to(torch.int32).to(device), "support_offsets": offsets.to(device)}


def mask_of(shape, support_ids, support_offsets):
    """Which tokens [..., V] each row keeps."""
    kept = torch.zeros(shape, dtype=torch.bool)
    offsets = support_offsets.tolist()
    for row, begin, end in zip(kept.view(-1, shape[-1]), offsets[:-1], offsets[1:], strict=True):
        row[support_ids[begin:end].long().cpu()] = True
        if end <= begin:
            row.fill_(True)
    return kept.to(support_ids.device)


def masked(logits, target_ids, temperature=1.0, ignore_index=-100, return_entropy=False, **support):
    """``logprobs, entropy, lse`` by ``log_softmax`` of logits that are -inf outside the support."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32))
    z = z / (temperature[..., None] if isinstance(temperature, torch.Tensor) else temperature)
    kept = mask_of(logits.shape, **support)
    rows = target_ids != ignore_index
    z = torch.where(rows[..., None], z.masked_fill(~kept, -torch.inf), 0)
    logp = z.log_softmax(-1)
    index = torch.where(rows, target_ids, 0)[..., None]
    inside = kept.gather(-1, index)[..., 0] & (logp.gather(-1, index)[..., 0] > -torch.inf)
    safe = torch.where(inside[..., None], logp.gather(-1, index), 0)[..., 0]
    logprobs = torch.where(inside, safe, -torch.inf)
    p = logp.exp()
    entropy = -torch.where(p == 0, 0, p * torch.where(p == 0, 0, logp)).sum(-1)
    zero = torch.zeros((), dtype=z.dtype)
    outputs = (torch.where(rows, x, zero) for x in (logprobs, entropy, z.logsumexp(-1)))
    logprobs, entropy, lse = outputs
    return logprobs, entropy if return_entropy else None, lse
