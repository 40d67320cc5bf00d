"""``prefix_shared_attention`` from torch's CPU flash kernels: each segment on itself, then on those above.

They have no softcap and one head dim: calls that need more are products over tiles of rows.
Partial results are merged by their log-sum-exps.  Backward makes the same calls with the merged output and
the whole row's log-sum-exp: the probabilities are the whole row's, and nothing differentiates the merge.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlkernel.calls.prefix_shared_attention import (
    AttentionCall,
    AttentionGrads,
    AttentionResults,
    AttentionRule,
    OutGrads,
)
from rlkernel.native.prefix_shared_attention import kernels, products
from rlkernel.native.prefix_shared_attention.plan import BITWISE_TILE, TILE, Batch, plan
from rlkernel.native.prefix_shared_attention.products import Dense
from rlkernel.prefix.layout import Run

_VECTOR = 16  # elements of the widest one

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def forward(call: AttentionCall) -> AttentionResults:
    q, k, v, layout, rule, sinks, _ = call
    q, k, v = map(_rows_apart, (q, k, v))
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=dtype, device=q.device)
    calls = plan(layout, rule.window, rule.bitwise)
    heads, kv_heads = q.shape[1], k.shape[1]
    q4, out4 = (x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (q, out))  # [Hkv, r, T, D]
    k4, v4 = (x.transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for x in (k, v))
    lse3 = lse.unflatten(0, (kv_heads, -1))
    mask = _band(calls.most_above, rule, q.dtype)
    for batch in calls.batches:
        qs, ks, vs = _rows(q4, batch), _keys(k4, batch), _keys(v4, batch)
        o, norm = _attend(Dense(qs, ks, vs, _mask_of(mask, batch, calls.most_above), rule))
        if sinks is not None and rule.bitwise:
            _add_sinks(o, norm, sinks)  # here, where shapes are fixed: exp's bits depend on a row's place
        out[batch.to] = _unpadded(o, batch)
        lse[:, batch.to] = _unpadded(norm[..., None], batch).squeeze(2).T
    for rows, keys, causal in calls.blocks:
        part, seen = slice(*rows), slice(*keys)
        o, norm = _attend(Dense(q4[:, :, part], k4[:, :, seen], v4[:, :, seen], causal, rule))
        if causal:
            out4[:, :, part] = o
            lse3[:, :, part] = norm
        else:
            _merge(out4[:, :, part], lse3[:, :, part], o, norm)
    if sinks is not None and not rule.bitwise:
        _add_sinks(out4, lse3, sinks)
    return AttentionResults(out, lse)


def backward(call: AttentionCall, results: AttentionResults, grads: OutGrads) -> AttentionGrads:
    q, k, v, layout, rule, *_ = call
    (out, lse), grad_out = results, _rows_apart(grads.out)
    q, k, v = map(_rows_apart, (q, k, v))
    rule = rule._replace(bitwise=False)
    calls = plan(layout, rule.window, rule.bitwise)
    heads, kv_heads = q.shape[1], k.shape[1]
    dtype = lse.dtype
    dq = torch.empty(q.shape, dtype=dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    grad4, q4, out4, dq4 = (
        x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3) for x in (grad_out, q, out, dq)
    )
    k4, v4 = (x.transpose(0, 1)[:, None].expand(-1, heads // kv_heads, -1, -1) for x in (k, v))
    lse3 = lse.unflatten(0, (kv_heads, -1))
    mask = _band(calls.most_above, rule, dtype)
    for batch in calls.batches:
        grad, qs, outs, norm = (_rows(x, batch) for x in (grad4, q4, out4, lse3[..., None]))
        if isinstance(batch.take, Tensor):  # padding gives nothing
            real = torch.zeros(batch.n * batch.size, dtype=torch.bool, device="cpu").index_fill_(
                0, batch.take, True
            )
            grad = torch.where(real.view(-1, 1, batch.size, 1).repeat(kv_heads, 1, 1, 1), grad, 0)
        seen_by = _mask_of(mask, batch, calls.most_above)
        dense = Dense(qs, _keys(k4, batch), _keys(v4, batch), seen_by, rule)
        dqs, dks, dvs = _attend_backward(dense, outs, norm.squeeze(3), grad, dtype)
        dq[batch.to] = _unpadded(dqs, batch)
        for to, found in ((dk, dks), (dv, dvs)):
            flat = found.unflatten(0, (kv_heads, -1)).flatten(1, 2).transpose(0, 1)  # [n * M, Hkv, D]
            if batch.above:
                for at, (a, b) in batch.runs:
                    to[a:b] += flat[at : at + b - a]
            else:
                to[batch.to] += flat[batch.take]
    for rows, keys, causal in calls.blocks:
        part, seen = slice(*rows), slice(*keys)
        dense = Dense(q4[:, :, part], k4[:, :, seen], v4[:, :, seen], causal, rule)
        dqs, dks, dvs = _attend_backward(dense, out4[:, :, part], lse3[:, :, part], grad4[:, :, part], dtype)
        if causal:
            dq4[:, :, part] = dqs
        else:
            dq4[:, :, part] += dqs
        dk[seen] += dks.transpose(0, 1)
        dv[seen] += dvs.transpose(0, 1)
    return AttentionGrads(dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype))


def _rows_apart(x: Tensor) -> Tensor:
    """[T, H, D] whose rows share no memory, as those of an expanded tensor do: torch has no library's product
    of such rows, but a loop of its own, which takes nine times as long and rounds in another order."""
    return x if x.stride(0) >= x.shape[2] or len(x) < 2 else x.contiguous()


def _attend(dense: Dense) -> tuple[Tensor, Tensor]:
    """The rows' part of the output, [B, r, N, Dv], and its lse [B, r, N]."""
    q, k, v, mask, rule = dense
    if rule.softcap or q.shape[3] != v.shape[3]:
        return products.forward(dense)
    if mask is False:
        k, v, mask = _in_vectors(k, v)
    if isinstance(mask, Tensor):
        return _flash(q, k, v, 0.0, False, attn_mask=mask, scale=rule.scale)
    return _flash(q, k, v, 0.0, mask, scale=rule.scale)


def _in_vectors(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | bool]:
    """Keys and values [B, r, M, D] with up to 15 more that no row sees, and the mask that says so.

    With rows of scores that are no whole vectors the kernel takes a sixth longer, for bf16 a third; and the
    prompt is the odd one, its last token standing elsewhere.  Zeros, not the keys behind: those may be NaN.
    """
    m, short = k.shape[2], -k.shape[2] % _VECTOR
    if not short:
        return k, v, False
    k, v = (pad(x[:, :1], (0, 0, 0, short)).expand(-1, x.shape[1], -1, -1) for x in (k, v))
    mask = k.new_zeros(1, 1, 1, m + short)
    mask[..., m:] = -math.inf
    return k, v, mask


def _attend_backward(
    dense: Dense, out: Tensor, lse: Tensor, grad: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [B, r, N, D], and of k and v [B, M, D], summed over the r heads that read them."""
    q, k, v, mask, rule = dense
    # in half precision the kernel would add up dk and dv in it, and fp16 is twenty times slower than fp32
    r = q.shape[1]
    k, v = (x[:, :1].to(dtype).expand(-1, r, -1, -1) for x in (k, v))
    grad, q, out = (x.to(dtype) for x in (grad, q, out))
    if rule.softcap or q.shape[3] != v.shape[3]:
        return products.backward(Dense(q, k, v, mask, rule), out, lse, grad)
    causal, attn_mask = (False, mask) if isinstance(mask, Tensor) else (mask, None)
    dq, dk, dv = _flash_backward(grad, q, k, v, out, lse, 0.0, causal, attn_mask=attn_mask, scale=rule.scale)
    return (dq, dk[:, 0], dv[:, 0]) if r == 1 else (dq, dk.sum(1), dv.sum(1))


def _merge(out: Tensor, lse: Tensor, part: Tensor, norm: Tensor) -> None:
    """Combine, in place, what rows [Hkv, r, N, D] have of some keys with what they have of others."""
    if lse.dtype == torch.float64:
        both = torch.logaddexp(lse, norm)
        out.mul_(torch.exp(lse - both)[..., None]).add_(part * torch.exp(norm - both)[..., None])
        lse.copy_(both)
        return
    norm = norm.contiguous()
    for h in range(len(out)):  # the r heads of one have one stride in torch's result, all Hq have not
        kernels.attention_merge(out[h].transpose(0, 1), lse[h], part[h].transpose(0, 1), norm[h])


def _add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """In place: [B, r, N, D] and [B, r, N], B being the K/V heads, take in the sinks [Hq]."""
    both = torch.logaddexp(lse, sinks.to(lse.dtype).view(len(lse), -1, 1))
    out.mul_(torch.exp(lse - both)[..., None])
    lse.copy_(both)


def _band(above: int, rule: AttentionRule, dtype: torch.dtype) -> Tensor | None:
    """0 where a tile's row sees a key, -inf elsewhere, if the first row has ``above`` keys before it."""
    if not rule.window and not rule.bitwise:
        return None
    size = BITWISE_TILE if rule.bitwise else TILE
    back = torch.arange(size, device="cpu")[:, None] + above - torch.arange(above + size, device="cpu")
    seen = (back >= 0) & (back < (rule.window or above + size))
    return torch.zeros(back.shape, dtype=dtype, device="cpu").masked_fill_(~seen, -math.inf)


def _mask_of(band: Tensor | None, batch: Batch, most: int) -> Tensor | bool:
    if band is None:
        return True
    return band[: batch.size, most - batch.above : most + batch.size]


def _rows(x: Tensor, batch: Batch) -> Tensor:
    """[Hkv, r, T, D] -> [Hkv * n, r, N, D]"""
    return _taken(x, batch.rows, batch.size, batch.n)


def _keys(x: Tensor, batch: Batch) -> Tensor:
    """[Hkv, r, T, D], the r heads being one -> [Hkv * n, r, M, D]"""
    return _taken(x[:, :1], batch.keys, batch.above + batch.size, batch.n).expand(-1, x.shape[1], -1, -1)


def _taken(x: Tensor, rows: list[Run] | Tensor, size: int, n: int) -> Tensor:
    """Fresh, contiguous memory whatever the rows: torch's products may have other bits elsewhere."""
    x = x.transpose(1, 2)
    if isinstance(rows, Tensor):
        return x[:, rows].unflatten(1, (n, size)).flatten(0, 1).transpose(1, 2)
    parts = [x[:, a:b] for a, b in rows]
    if short := size - sum(b - a for a, b in rows):
        parts.append(parts[-1][:, -1:].expand(-1, short, -1, -1))
    return torch.cat(parts, 1).transpose(1, 2)


def _unpadded(x: Tensor, batch: Batch) -> Tensor:
    """[Hkv * n, r, N, D] -> [rows, Hq, D]"""
    x = x.transpose(1, 2).unflatten(0, (-1, batch.n)).flatten(1, 2)  # [Hkv, n * N, r, D]
    return x[:, batch.take].transpose(0, 1).flatten(1, 2)
