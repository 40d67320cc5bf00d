"""Divergence of a student's distribution from a teacher's, token by token: what distillation minimises."""

from types import ModuleType

import torch
from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceOutput, DivergenceResults
from rlkernel.opaque import Op
from rlkernel.ops import _validate
from rlkernel.ops._typed import typed


@typed
def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    *,
    beta: float = 0.5,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    return_entropy: bool = False,
    inplace_backward: bool = False,
) -> DivergenceOutput:
    """Divergence of ``softmax(logits / T)`` from a teacher's distribution, row by row, without a temporary
    of the logits' size.

    Equal to, with ``p = softmax(logits / T)``, ``q = softmax(teacher_logits / T)`` and, between them,
    ``m = (1 - beta) p + beta q``,

        beta = 0:      KL(q || p) = sum(q * (log q - log p))                       forward
        beta = 1:      KL(p || q) = sum(p * (log p - log q))                       reverse
        0 < beta < 1:  beta KL(q || m) + (1 - beta) KL(p || m)                     Jensen and Shannon's

    in nats.  Differentiable in ``logits``; the gradient is, times that of the divergence and ``1 / T``,

        beta = 0: p - q;   beta = 1: p (log p - log q - KL(p || q));
        else: (1 - beta) p (log p - log m - KL(p || m)).

    A token that has no probability adds nothing where the other distribution has some: -inf in the logits of
    a filter or of padding of the vocabulary is right as it is.  Where the first of KL's distributions has
    some and the second has none, the divergence is infinite, as it should be.

    A row's bits depend on that row alone: not on the other rows, their number, the memory layout or the
    number of threads (batch-invariant); the same call gives the same bits (run-to-run), gradients included.

    Args:
        logits: [..., V] of the student: fp16, bf16, fp32 or fp64, any strides on the leading dimensions.
        teacher_logits: [..., V], of any width, but fp64 beside fp64 alone; must not require a gradient.
        beta: in [0, 1].
        mask: [...], bool or numbers: rows at 0 are not read, and give 0 and a gradient of exactly 0.
        temperature: > 0, of both.
        return_entropy: also compute the entropy of p; it has no gradient.
        inplace_backward: let backward write the gradient over ``logits``, which saves a tensor of their
            size.  A second backward through the same graph then raises.

    Returns:
        DivergenceOutput of [...] tensors, fp32 (fp64 for fp64 logits).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows ``generalized_jsd_loss`` of TRL's ``GKDTrainer`` before its sum, of Agarwal et al. (arXiv
    2306.13649); ``F.kl_div`` gives NaN for tokens without probability.

    Examples:
        >>> student, teacher = torch.tensor([[2.0, 1.0, 0.0]]), torch.tensor([[0.0, 1.0, 2.0]])
        >>> rlkernel.divergence(student, teacher, beta=1.0).divergence
        tensor([1.1504])
        >>> rlkernel.divergence(student, student, beta=0.5).divergence
        tensor([0.])
    """
    _validate.floating("logits", logits)
    if logits.dim() == 0 or logits.shape[-1] == 0:
        raise ValueError(f"logits must be [..., V] with V >= 1, got {tuple(logits.shape)}")
    _validate.floating("teacher_logits", teacher_logits)
    _validate.like("teacher_logits", teacher_logits, "logits", logits)
    _validate.without_gradient("teacher_logits", teacher_logits)
    if (logits.dtype == torch.float64) != (teacher_logits.dtype == torch.float64):
        want, got = _validate.name(logits.dtype), _validate.name(teacher_logits.dtype)
        raise ValueError(f"teacher_logits must be float64 beside float64 alone, got {got} beside {want}")
    beta = _validate.fraction("beta", beta)
    temperature = _validate.one_temperature(temperature, logits.dtype)
    if inplace_backward:
        _validate.apart("logits", logits, "inplace_backward=True")
    kept = _validate.mask(mask, "the rows of logits", logits[..., 0])
    kept = None if kept is None else kept.contiguous()
    logits, teacher_logits = (_validate.rows(x, x.dtype) for x in (logits, teacher_logits))
    options = beta, temperature, return_entropy, inplace_backward
    return DivergenceOutput(*op(DivergenceCall(logits, teacher_logits, kept, *options)))


def _forward(impl: ModuleType, call: DivergenceCall) -> DivergenceResults:
    results: DivergenceResults = impl.forward(call)
    return results


def _backward(
    impl: ModuleType, call: DivergenceCall, results: DivergenceResults, grads: tuple[Tensor | None, ...]
) -> tuple[Tensor]:
    grad = grads[0]
    assert grad is not None
    return (impl.backward(call, results, _validate.dense(grad, results.row_max.dtype)),)


op = Op(
    "divergence",
    DivergenceCall,
    DivergenceResults,
    outputs=2,
    pick=("logits", "teacher_logits"),
    forward=_forward,
    backward=_backward,
    like=DivergenceResults.empty,
    gradients=("logits",),
    differentiable=("divergence",),
    saves=(
        "logits", "teacher_logits", "mask", "row_max", "sum_exp", "teacher_max", "teacher_sum_exp",
        "student_part",
    ),
    overwrites="logits",
    in_node={"inplace_backward": False},
)  # fmt: skip
