"""Divergence of a student from a teacher, from hidden states and both lm_heads, without the logits."""

from types import ModuleType

import torch
from torch import Tensor

from rlkernel import dispatch
from rlkernel.calls.divergence import DivergenceOutput
from rlkernel.calls.linear_divergence import LinearDivergenceCall, LinearDivergenceResults
from rlkernel.calls.linear_logprob import Head, LinearGrads
from rlkernel.opaque import Op
from rlkernel.ops import _validate, _vocab_parallel
from rlkernel.ops._typed import typed
from rlkernel.ops.linear_logprob import checked_head
from rlkernel.runtime import tracing
from rlkernel.runtime.modes import without_autocast


@typed
def linear_divergence(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    *,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    beta: float = 0.5,
    mask: Tensor | None = None,
    temperature: float = 1.0,
    logit_scale: float = 1.0,
    teacher_logit_scale: float = 1.0,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    return_entropy: bool = False,
) -> DivergenceOutput:
    """Divergence of ``softmax(logits / T)`` from a teacher's distribution, row by row, from hidden states and
    lm_heads, without ever holding the ``[N, V]`` logits of either.

    Equal to ``divergence(z, z_t, beta=beta, mask=mask, temperature=temperature)`` with
    ``z = softcap * tanh(u / softcap)`` (``z = u`` without a softcap), ``u = (hidden @ weight.T + bias) *
    logit_scale``, and ``z_t`` likewise of the teacher: forward KL for ``beta`` 0, reverse KL for 1, Jensen
    and Shannon's in between.  Differentiable in ``hidden``, ``weight`` and ``bias``.

    The logits, in fp32, exist some rows at a time in a workspace whose size is a setting
    (``rlkernel.workspace.set_limit``) and does not depend on N: forward takes as many whole rows of both as
    it holds, one at least.  Backward computes them again unless all of them were there, ``2 N H V``
    operations for the student and as many of the teacher's size, and two such products more for the
    gradients; the weight's is summed in fp32.  With a frozen head (neither weight nor bias requires a
    gradient) forward already computes the direction of the hidden gradient: two GEMMs of the student and one
    of the teacher in all.  Rows that the mask leaves out cost nothing, nor do rows in backward whose upstream
    gradient is exactly 0.

    The same call gives the same bits (run-to-run), with and without gradients.

    Args:
        hidden: [..., H] of the student: fp16, bf16, fp32 or fp64.
        weight: [V, H], its lm_head; under autocast both are used in autocast's dtype, else in the wider of
            the two dtypes.
        teacher_hidden: [..., K] of any width, of the same tokens; must not require a gradient.  fp64 beside
            fp64 alone.
        teacher_weight: [V, K], of the same vocabulary.  It gets no gradient, nor does ``teacher_bias``.
        bias, teacher_bias: [V] or None.
        beta: in [0, 1].
        mask: [...], bool or numbers: rows at 0 are not read, and give 0 and a gradient of exactly 0.
        temperature: > 0, of both.
        logit_scale, teacher_logit_scale: factor of the logits before the softcap (Cohere, Granite).
        softcap, teacher_softcap: bound of the logits > 0 (Gemma's ``final_logit_softcapping``), or None.
        return_entropy: also compute the entropy of the student; it has no gradient.

    Weights and biases may be DTensors, as FSDP2 splits them: they are gathered, and a gradient is the mean
    over its ranks.

    Returns:
        DivergenceOutput of [...] tensors in nats, fp32 (fp64 for fp64 input).

    Raises:
        ValueError: an argument is off; says which, what it must be and what it is.

    Follows ``ChunkedDivergenceFunction`` of TRL's ``DistillationTrainer``, of Agarwal et al. (arXiv
    2306.13649).

    Examples:
        >>> student, lm_head = torch.randn(3, 16), torch.randn(100, 16)
        >>> teacher, teacher_lm_head = torch.randn(3, 32), torch.randn(100, 32)
        >>> out = rlkernel.linear_divergence(student, lm_head, teacher, teacher_lm_head, beta=1.0)
        >>> out.divergence.shape
        torch.Size([3])
        >>> rlkernel.linear_divergence(student, lm_head, student, lm_head).divergence
        tensor([0., 0., 0.])
    """
    weight, bias = _gathered("", weight, bias)
    teacher_weight, teacher_bias = _gathered("teacher_", teacher_weight, teacher_bias)
    own, other = (
        checked_head(
            states, head, bias=b, temperature=1.0, logit_scale=scale, softcap=cap, ignore_index=-1,
            logits_dtype=torch.float32, prefix=prefix,
        )
        for prefix, states, head, b, scale, cap in (
            ("", hidden, weight, bias, logit_scale, softcap),
            ("teacher_", teacher_hidden, teacher_weight, teacher_bias, teacher_logit_scale, teacher_softcap),
        )
    )  # fmt: skip
    _match(hidden, weight, teacher_hidden, teacher_weight)
    _same_width(own, other)
    beta = _validate.fraction("beta", beta)
    temperature = _validate.one_temperature(temperature, own.compute_dtype)
    kept = _validate.mask(mask, "the rows of hidden", hidden[..., 0])
    rows, learns = hidden.shape[:-1], torch.is_grad_enabled()
    trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    call = LinearDivergenceCall(
        hidden.reshape(-1, hidden.shape[-1]), weight, bias,
        teacher_hidden.reshape(-1, teacher_hidden.shape[-1]), teacher_weight.detach(),
        None if teacher_bias is None else teacher_bias.detach(),
        None if kept is None else kept.contiguous().view(-1), beta, temperature,
        own.logit_scale, own.softcap, own.compute_dtype,
        other.logit_scale, other.softcap, other.compute_dtype, return_entropy,
        keep=learns and trained and not tracing.is_on(),
        need_direction=learns and hidden.requires_grad and not trained,
    )  # fmt: skip
    divergence, entropy = op(call)
    return DivergenceOutput(divergence.view(rows), None if entropy is None else entropy.view(rows))


def _gathered(prefix: str, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A whole lm_head and its bias."""
    weight, bias, group, start = _vocab_parallel.local_head(weight, bias, None, None, prefix)
    if _vocab_parallel.named(group, start)[0] is not None:
        want = "must not be split over the vocabulary by tensor parallelism"
        raise ValueError(f"{prefix}weight {want}, got a shard")
    return weight, bias


def _match(hidden: Tensor, weight: Tensor, teacher_hidden: Tensor, teacher_weight: Tensor) -> None:
    rows, vocab = tuple(hidden.shape[:-1]), weight.shape[0]
    if teacher_hidden.shape[:-1] != rows:
        want = f"[{', '.join(map(str, (*rows, 'K')))}], the rows of hidden"
        raise ValueError(f"teacher_hidden must be {want}, got {tuple(teacher_hidden.shape)}")
    _validate.same_device("teacher_hidden", teacher_hidden, "hidden", hidden.device)
    _validate.without_gradient("teacher_hidden", teacher_hidden)
    if teacher_weight.shape[0] != vocab:
        want = f"[{vocab}, K], of the vocabulary of weight"
        raise ValueError(f"teacher_weight must be {want}, got {tuple(teacher_weight.shape)}")


def _same_width(own: Head, other: Head) -> None:
    if (own.compute_dtype == torch.float64) != (other.compute_dtype == torch.float64):
        want, got = _validate.name(own.compute_dtype), _validate.name(other.compute_dtype)
        raise ValueError(f"teacher_hidden must be float64 beside float64 alone, got {got} beside {want}")


def _pick(call: LinearDivergenceCall) -> ModuleType:
    tensors = call.hidden, call.weight, call.teacher_hidden, call.teacher_weight
    dtypes = call.compute_dtype, call.teacher_compute_dtype
    return dispatch.pick("linear_divergence", *tensors, compute_dtypes=dtypes)


def _forward(impl: ModuleType, call: LinearDivergenceCall) -> LinearDivergenceResults:
    with without_autocast(call.hidden.device):
        results: LinearDivergenceResults = impl.forward(call)
    return results


def _backward(
    impl: ModuleType,
    call: LinearDivergenceCall,
    results: LinearDivergenceResults,
    grads: tuple[Tensor | None, ...],
) -> LinearGrads:
    grad = grads[0]
    assert grad is not None
    with without_autocast(call.hidden.device):
        found: LinearGrads = impl.backward(call, results, _validate.dense(grad, results.row_max.dtype))
    return found


op = Op(
    "linear_divergence",
    LinearDivergenceCall,
    LinearDivergenceResults,
    outputs=2,
    pick=_pick,
    forward=_forward,
    backward=_backward,
    like=LinearDivergenceResults.empty,
    gradients=("hidden", "weight", "bias"),
    differentiable=("divergence",),
    saves=(
        "hidden", "weight", "bias", "teacher_hidden", "teacher_weight", "teacher_bias", "mask", "row_max",
        "sum_exp", "teacher_max", "teacher_sum_exp", "student_part", "direction",
    ),
)  # fmt: skip
