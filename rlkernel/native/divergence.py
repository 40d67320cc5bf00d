"""``divergence`` over the compiled extension's kernels for CPUs."""

from typing import Any

from torch import Tensor

from rlkernel.calls.divergence import DivergenceCall, DivergenceResults
from rlkernel.native import kernels, tensor_reasons
from rlkernel.native._rows import dense_like, rows_of


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    logits, teacher_logits = tensors
    reasons = tensor_reasons("logits", logits) or tensor_reasons("teacher_logits", teacher_logits)
    return reasons or ([] if logits.device.type == "cpu" else ["the kernel is one for CPUs"])


def forward(call: DivergenceCall) -> DivergenceResults:
    results = DivergenceResults.empty(call)
    forward_into(call, results)
    return results


def forward_into(call: DivergenceCall, results: DivergenceResults) -> None:
    kernels(call.logits.device).divergence_forward(**_pair(call), **results._asdict())


def backward(call: DivergenceCall, results: DivergenceResults, grad: Tensor) -> Tensor:
    out = call.logits if call.inplace_backward else dense_like(call.logits)
    into = rows_of(out)
    gradient_into(call, results, grad, into)
    return out if into.data_ptr() == out.data_ptr() else out.copy_(into.view(out.shape))


def gradient_into(call: DivergenceCall, results: DivergenceResults, grad: Tensor, out: Tensor) -> None:
    """The gradient of the logits, to ``out`` of their dtype, which may be either of the two logits."""
    statistics = results._asdict()
    del statistics["divergence"], statistics["entropy"]
    kernels(out.device).divergence_backward(**_pair(call), grad=grad, **statistics, out=out)


def _pair(call: DivergenceCall) -> dict[str, Any]:
    return {
        "logits": rows_of(call.logits),
        "teacher_logits": rows_of(call.teacher_logits),
        "mask": call.mask,
        "beta": call.beta,
        "temperature": call.temperature,
    }
