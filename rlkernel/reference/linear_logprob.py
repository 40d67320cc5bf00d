"""What ``linear_logprob`` means, in plain PyTorch, with the logits in memory."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.calls.linear_logprob import (
    STATISTICS,
    Head,
    LinearGrads,
    LinearLogprobCall,
    LinearLogprobResults,
)
from rlkernel.calls.logprob import LogprobCall, LogprobResults, RowGrads
from rlkernel.reference import logprob


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    if options.get("algorithm") == "fused":
        return ["algorithm 'fused' is a Triton kernel"]
    return []


def forward(call: LinearLogprobCall) -> LinearLogprobResults:
    target_ids, head = call.target_ids, call.head
    logits, _ = _logits(*_operands(call), head)
    row = LogprobCall(logits, target_ids, head.temperature, head.ignore_index, call.return_entropy)
    statistics = _statistics(logits, call) if call.statistics else {}
    results = LinearLogprobResults.of(logprob.forward(row), **statistics)
    if call.need_direction:
        ones = RowGrads(torch.ones_like(results.logprobs))
        direction = backward(call._replace(needs=(True, False, False)), results, ones).hidden
        results = results._replace(direction=direction)
    return results


def _statistics(logits: Tensor, call: LinearLogprobCall) -> dict[str, Tensor | None]:
    t = call.temperature[:, None] if isinstance(call.temperature, Tensor) else call.temperature
    z, kept = logits / t, call.target_ids != call.ignore_index
    mean = torch.where(kept, z.mean(-1), 0)
    inside = torch.where(kept, call.target_ids, 0)[:, None]
    top = kept & (logits.gather(-1, inside)[:, 0] >= logits.amax(-1))
    squares = torch.where(kept, (2 * z.log_softmax(-1)).logsumexp(-1), 0)
    low, high = (torch.where(kept, x, 0) for x in (z.amin(-1), z.amax(-1)))
    found: dict[str, Tensor] = dict(zip((*STATISTICS,), (mean, top, squares, low, high), strict=True))
    return {name: found[name] for name in call.statistics}


def backward(call: LinearLogprobCall, results: LinearLogprobResults, grads: RowGrads) -> LinearGrads:
    """Gradients of hidden, weight and bias, each in its dtype and only where ``needs`` says so."""
    hidden, weight, target_ids, head = call.hidden, call.weight, call.target_ids, call.head
    h, w = _operands(call)
    logits, u = _logits(h, w, head)
    row = LogprobCall(logits, target_ids, head.temperature, head.ignore_index, call.return_entropy)
    stats = LogprobResults.for_backward(results.entropy, results.row_max, results.log_sum)
    (grad,) = logprob.backward(row, stats, grads)
    if head.softcap is not None:
        grad = torch.where(grad == 0, 0, grad * (1 - torch.tanh(u / head.softcap) ** 2))
    grad = grad * head.logit_scale
    need_hidden, need_weight, need_bias = call.needs
    return LinearGrads(
        (grad @ w).to(hidden.dtype) if need_hidden else None,
        (grad.T @ h).to(weight.dtype) if need_weight else None,
        grad.sum(0).to(head.bias.dtype) if need_bias and head.bias is not None else None,
    )


def _operands(call: LinearLogprobCall) -> tuple[Tensor, Tensor]:
    """What is multiplied: hidden and weight in the product's dtype, or the numbers that FP8 stands for.

    Of a row that is ignored 0: a product with the gradient 0 would spread its NaN over the weight's."""
    h = torch.where((call.target_ids == call.ignore_index)[:, None], 0, _widened(call.hidden, call.head))
    if call.weight_scale is None:
        return h, _widened(call.weight, call.head)
    w = call.weight.to(h.dtype) * _spread(call.weight_scale, call.weight_block, call.weight.shape)
    return (_rounded_to_fp8(h, call), w) if call.input_scheme else (h, _widened(w, call.head))


def _widened(x: Tensor, head: Head) -> Tensor:
    """With the values that the product's dtype has."""
    return x.to(head.compute_dtype).to(torch.promote_types(head.compute_dtype, torch.float32))


def _spread(scale: Tensor, block: tuple[int, ...], shape: torch.Size) -> Tensor:
    """The scale of each element, of those of the blocks."""
    place = [torch.arange(size, device=scale.device) // b for size, b in zip(shape, block, strict=True)]
    return scale[place[0][:, None], place[1]]


def _rounded_to_fp8(hidden: Tensor, call: LinearLogprobCall) -> Tensor:
    """The nearest numbers that FP8 and a scale stand for.

    What is rounded follows from single bits, so this is computed in fp32 whatever the dtype, as engines do.
    """
    dtype, scheme, x = call.weight.dtype, call.input_scheme, hidden.to(torch.float32)
    # at 240, the largest number of e4m3fnuz, engines found models to lose accuracy
    largest = x.new_tensor(224.0 if dtype == torch.float8_e4m3fnuz else 448.0)
    if scheme == "static":
        assert call.input_scale is not None
        scale = call.input_scale.expand(x.shape)
        quotient = x * (1 / call.input_scale)
    else:
        size = call.input_group
        groups = torch.nn.functional.pad(x, (0, -x.shape[1] % size)).unflatten(1, (-1, size))
        top = groups.abs().amax(-1)
        if scheme == "token":
            scale = (top / largest).clamp(min=1 / (512 * largest))
        else:
            scale = top.clamp(min=1e-10) / largest
        if scheme == "group_ue8m0":  # the next power of two
            mantissa, exponent = torch.frexp(scale.clamp(min=1e-10))
            scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        scale = scale.repeat_interleave(size, 1)[:, : x.shape[1]]
        quotient = x / scale
    codes = quotient.clamp(-largest, largest).to(dtype)
    return codes.to(hidden.dtype) * scale.to(hidden.dtype)


def _logits(h: Tensor, w: Tensor, head: Head) -> tuple[Tensor, Tensor]:
    """The logits and what they are before the softcap."""
    wide = h.dtype
    u = h @ w.T
    if wide == torch.float32:
        u = u.to(head.logits_dtype).to(wide)
    if head.bias is not None:
        u = u + head.bias.to(wide)
    u = u * head.logit_scale
    return (head.softcap * torch.tanh(u / head.softcap) if head.softcap is not None else u), u


def make_inputs(
    tokens: int,
    hidden_size: int,
    vocab: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    scale: float = 3.0,
    ignored: float = 0.1,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.linear_logprob``: logits of standard deviation ``scale``, a share of
    ``ignored`` rows, and targets drawn from the distribution itself as a rollout draws them."""
    g = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, hidden_size, generator=g, dtype=torch.float32, device=device).to(dtype)
    weight = torch.empty(vocab, hidden_size, device=device, dtype=dtype)
    for rows in weight.split(8192):  # no fp32 copy of a large head
        rows.copy_(
            torch.randn(rows.shape, generator=g, dtype=torch.float32, device=device)
            * (scale / hidden_size**0.5)
        )
    target_ids = torch.empty(tokens, dtype=torch.int64, device=device)
    for h, ids in zip(hidden.split(64), target_ids.split(64), strict=True):
        logits = (h @ weight.T).float()
        ids.copy_((logits - torch.empty_like(logits).exponential_(generator=g).log_()).argmax(-1))
    drop = torch.rand(tokens, generator=g, dtype=torch.float32, device=device) < ignored
    return {"hidden": hidden, "weight": weight, "target_ids": torch.where(drop, -100, target_ids)}
