"""What ``divergence`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults
from rlkernel.reference import unsupported as unsupported


def forward(call: DivergenceCall) -> DivergenceResults:
    beta = call.beta
    row_max, sum_exp, log_p = _log_softmax(call.logits, call.temperature)
    teacher_max, teacher_sum_exp, log_q = _log_softmax(call.teacher_logits, call.temperature)
    p, q = log_p.exp(), log_q.exp()
    student_part = None
    if beta == 0:
        divergence = _expected(q, log_q, log_p)
    elif beta == 1:
        divergence = student_part = _expected(p, log_p, log_q)
    else:
        log_m = _log_mixture(p, q, beta)
        student_part = _expected(p, log_p, log_m)
        divergence = (1 - beta) * student_part + beta * _expected(q, log_q, log_m)
    entropy = -torch.where(p == 0, 0, p * log_p).sum(-1) if call.return_entropy else None

    def kept(x: Tensor | None) -> Tensor | None:
        return x if x is None or call.mask is None else torch.where(call.mask, x, 0)

    return DivergenceResults(
        *map(kept, (divergence, entropy, row_max, sum_exp, teacher_max, teacher_sum_exp, student_part))  # type: ignore[arg-type]
    )


def backward(call: DivergenceCall, results: DivergenceResults, grad: Tensor) -> Tensor:
    """The gradient of the logits, in their dtype."""
    beta, t = call.beta, call.temperature
    log_p = _again(call.logits, t, results.row_max, results.sum_exp)
    log_q = _again(call.teacher_logits, t, results.teacher_max, results.teacher_sum_exp)
    p, q = log_p.exp(), log_q.exp()
    if beta == 0:
        of_row = p - q
    else:
        assert results.student_part is not None
        other = log_q if beta == 1 else _log_mixture(p, q, beta)
        weight = 1.0 if beta == 1 else 1 - beta
        # where p is 0 the difference may be infinite, and is worth nothing
        beside = torch.where(p == 0, 0, log_p - other) - results.student_part[..., None]
        of_row = weight * p * beside
        of_row = torch.where(results.student_part.isfinite()[..., None], of_row, torch.nan)
    wanted = grad != 0 if call.mask is None else call.mask & (grad != 0)
    found = torch.where(wanted[..., None], of_row * (grad[..., None] / t), 0).to(call.logits.dtype)
    return call.logits.copy_(found) if call.inplace_backward else found


def _log_softmax(logits: Tensor, t: float) -> tuple[Tensor, Tensor, Tensor]:
    """The maximum, the sum of exponentials beside it, and the log-probabilities."""
    y = logits.to(torch.promote_types(logits.dtype, torch.float32))
    row_max = y.amax(-1)
    sum_exp = torch.where(y == -torch.inf, -torch.inf, (y - row_max[..., None]) / t).exp().sum(-1)
    return row_max, sum_exp, _again(logits, t, row_max, sum_exp)


def _again(logits: Tensor, t: float, row_max: Tensor, sum_exp: Tensor) -> Tensor:
    y = logits.to(row_max.dtype)
    shifted = torch.where(y == -torch.inf, -torch.inf, (y - row_max[..., None]) / t)
    return shifted - sum_exp.log()[..., None]


def _expected(weight: Tensor, log_weight: Tensor, other: Tensor) -> Tensor:
    return torch.where(weight == 0, 0, weight * (log_weight - other)).sum(-1)


def _log_mixture(p: Tensor, q: Tensor, beta: float) -> Tensor:
    """Where it is 0, and so is p or q, 0: what stands beside it is worth nothing."""
    m = (1 - beta) * p + beta * q
    return torch.where(m == 0, 0, m).log().where(m != 0, 0)


def make_inputs(
    n: int,
    vocab: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 0,
    apart: float = 0.5,
) -> dict[str, Tensor]:
    """Keyword arguments of ``rlkernel.divergence``: logits of a student, and of a teacher beside it."""
    g = torch.Generator(device).manual_seed(seed)
    noise = torch.randn(2, n, vocab, generator=g, dtype=torch.float32, device=device)
    logits = 3 * noise[0]
    return {"logits": logits.to(dtype), "teacher_logits": (logits + apart * noise[1]).to(dtype)}
