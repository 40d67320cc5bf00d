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
        divergence = _expected(q, log_q - log_p)
    elif beta == 1:
        divergence = student_part = _expected(p, log_p - log_q)
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


def _ahead_of_mixture(log_p: Tensor, log_q: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """``log p - log m`` and ``log q - log m`` with ``m = (1 - beta) p + beta q``.

    The larger of p and q is taken out of m: what is left is 1 where they are equal.
    """
    ahead = log_q - log_p
    behind = -ahead.abs()
    share = torch.full_like(ahead, beta).masked_fill_(ahead > 0, 1 - beta)  # of the smaller one
    less = share * torch.expm1(behind)
    rest = torch.full_like(ahead, 1 - beta).masked_fill_(ahead > 0, beta) + share * behind.exp()
    near = -torch.where(less > -0.5, torch.log1p(less), rest.log())
    return torch.where(ahead > 0, behind + near, near), torch.where(ahead > 0, near, behind + near)


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
