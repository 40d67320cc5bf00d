"""What ``linear_divergence`` means, in plain PyTorch, with both logits in memory."""

import torch
from torch import Tensor

from rlkernel.calls.linear_divergence import LinearDivergenceCall, LinearDivergenceResults
from rlkernel.calls.linear_logprob import Head, LinearGrads
from rlkernel.reference import divergence
from rlkernel.reference import unsupported as unsupported
from rlkernel.reference.linear_logprob import _logits, _widened


def forward(call: LinearDivergenceCall) -> LinearDivergenceResults:
    own, other = call.heads
    logits, _ = _logits(_widened(call.hidden, own), _widened(call.weight, own), own)
    rows = divergence.forward(call.of_logits(logits, _of_teacher(call, other), call.mask))
    results = LinearDivergenceResults(*rows)
    if call.need_direction:
        of_hidden = call._replace(needs=(True, False, False))
        results = results._replace(
            direction=backward(of_hidden, results, torch.ones_like(rows.divergence)).hidden
        )
    return results


def backward(call: LinearDivergenceCall, results: LinearDivergenceResults, grad: Tensor) -> LinearGrads:
    """Gradients of hidden, weight and bias, each in its dtype and only where ``needs`` says so."""
    own, other = call.heads
    wanted = grad != 0 if call.mask is None else call.mask & (grad != 0)
    # of a row that has no gradient 0: a product with it would spread its NaN over the weight's
    h, w = torch.where(wanted[:, None], _widened(call.hidden, own), 0), _widened(call.weight, own)
    logits, u = _logits(h, w, own)
    found = divergence.backward(
        call.of_logits(logits, _of_teacher(call, other), wanted), results.of_rows, grad
    )
    if own.softcap is not None:
        found = torch.where(found == 0, 0, found * (1 - torch.tanh(u / own.softcap) ** 2))
    found = found * own.logit_scale
    return LinearGrads(
        (found @ w).to(call.hidden.dtype) if call.needs[0] else None,
        (found.T @ h).to(call.weight.dtype) if call.needs[1] else None,
        found.sum(0).to(call.bias.dtype) if call.needs[2] and call.bias is not None else None,
    )


def _of_teacher(call: LinearDivergenceCall, head: Head) -> Tensor:
    return _logits(_widened(call.teacher_hidden, head), _widened(call.teacher_weight, head), head)[0]


def make_inputs(
    tokens: int,
    hidden_size: int,
    vocab: int,
    *,
    teacher_size: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    apart: float = 0.5,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.linear_divergence``: logits of standard deviation 3, and a teacher
    whose logits differ by ``apart`` if it has the student's size, else by what two models' do."""
    g = torch.Generator(device).manual_seed(seed)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float32, device=device)

    hidden, weight = noise(tokens, hidden_size), noise(vocab, hidden_size) * (3 / hidden_size**0.5)
    if teacher_size is None or teacher_size == hidden_size:
        teacher, head = hidden + apart / 3 * noise(tokens, hidden_size), weight
    else:
        teacher, head = noise(tokens, teacher_size), noise(vocab, teacher_size) * (3 / teacher_size**0.5)
    names = "hidden", "weight", "teacher_hidden", "teacher_weight"
    made = zip(names, (hidden, weight, teacher, head.clone()), strict=True)
    return {name: x.to(dtype) for name, x in made}
