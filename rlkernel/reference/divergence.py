"""What ``divergence`` means, in plain PyTorch; in fp64 it is the truth that backends are measured against."""

import math

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
        divergence = _kl(q, p, log_q - log_p)
    elif beta == 1:
        divergence = _kl(p, q, log_p - log_q)
        student_part = _expected(p, log_p - log_q)  # off by what all the logarithms are that it is taken from
    else:
        of_student, of_teacher = _ahead_of_mixture(log_p, log_q, beta)
        student_part = _expected(p, of_student)
        divergence = (1 - beta) * student_part + beta * _expected(q, of_teacher)
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
        weight = 1.0 if beta == 1 else 1 - beta
        ahead = log_p - log_q if beta == 1 else _ahead_of_mixture(log_p, log_q, beta)[0]
        # where p is 0 the difference may be infinite, and is worth nothing
        of_row = weight * p * (torch.where(p == 0, 0, ahead) - results.student_part[..., None])
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


def _expected(weight: Tensor, x: Tensor) -> Tensor:
    return torch.where(weight == 0, 0, weight * x).sum(-1)


def _kl(weight: Tensor, other: Tensor, ahead: Tensor) -> Tensor:
    """KL(weight || other), with ``ahead = log weight - log other``.

    A small one is the sum of ``weight * ahead + (other - weight)``, as both add up to 1: none of these is
    below 0, and a small one has its digits.  Without what is added, the sum is a difference of large numbers.
    """
    plain = _expected(weight, ahead)
    series = torch.zeros_like(ahead)  # (exp(-ahead) - 1 + ahead) / ahead^2 for a small one
    for k in range(20, 1, -1):
        series = series * -ahead + 1 / math.factorial(k)
    far = torch.where(weight == 0, 0, weight * ahead) + (other - weight)
    near = torch.where(ahead.abs() < 1, weight * ahead**2 * series, far).sum(-1)
    return torch.where(plain < 1 / 16, near, plain)


def _ahead_of_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``log p - log m`` and ``log q - log m`` with ``m = (1 - beta) p + beta q``.

    The larger of m's two parts is taken out of it: what p, or q, is ahead is then no difference, and keeps
    its digits where it is small, as it is of equal rows and of a beta near 0 or 1.
    """
    ahead = log_q - log_p
    of_teacher = ahead > math.log1p(-beta) - math.log(beta)  # whose part is then the larger
    apart = torch.where(of_teacher, -ahead, ahead)
    share = torch.full_like(ahead, beta).masked_fill_(of_teacher, 1 - beta)  # of the smaller one
    larger = torch.full_like(ahead, 1 - beta).masked_fill_(of_teacher, beta)
    no_more = apart.clamp(max=0.99 * math.log(torch.finfo(ahead.dtype).max))
    less = share * torch.expm1(no_more)
    near = -torch.where(less > -0.5, torch.log1p(less), (larger + share * no_more.exp()).log())
    return torch.where(of_teacher, near + apart, near), torch.where(of_teacher, near, near + apart)


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
