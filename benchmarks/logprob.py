"""``rlkernel.logprob`` from logits against PyTorch, TRL, verl, Liger and compiled PyTorch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("N", "V")
INPUTS = {"ignored": 0.0}  # not every peer knows ignored rows, and all must do the same work
OPTIONS: dict[str, Any] = {"temperature": 0.8, "return_entropy": True}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("logits",)

QUICK = [
    Case({"N": 128, "V": 32768}, "float32", OPTIONS),
    Case({"N": 128, "V": 32768}, "bfloat16", OPTIONS),
]
PRESETS = {
    # odd sizes: more than one vector and a tail, small enough for Triton's interpreter
    "tiny": [Case({"N": 3, "V": 1030}, "float32", o) for o in (OPTIONS, {"temperature": 1.0})],
    # against TRL's two functions with entropy; and logprobs alone, as for old or reference logprobs
    "logits-cpu": [
        Case({"N": 4096, "V": 32768}, dtype, {"temperature": 1.0, "return_entropy": entropy})
        for dtype in ("float32", "bfloat16")
        for entropy in (True, False)
    ],
    # 2.3 GiB of logits, the shape of TRL's issue 7244
    "logits-gpu": [Case({"N": 8192, "V": 151936}, "bfloat16", {"temperature": 1.0, "return_entropy": True})],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("logprobs", "entropy") if case.options.get("return_entropy") else ("logprobs",)


def row_elements(case: Case) -> int:
    return case.sizes["V"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read the logits once, N V b; backward: read them again and write as large a gradient, 2 N V b.
    # Target ids (8 N) and the row statistics (5 x 4 N) are left out: V is in the tens of thousands.
    return (3 if backward else 1) * case.sizes["N"] * case.sizes["V"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # an exponential per element, hidden behind the reads on any machine of interest


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    return _naive


def _naive(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    # What one writes by hand: whole tensors, fp32 softmax.
    z = inputs["logits"].to(torch.promote_types(case.torch_dtype, torch.float32)) / case.options.get(
        "temperature", 1.0
    )
    logp = z.log_softmax(-1)
    result = {"logprobs": logp.gather(-1, inputs["target_ids"][:, None])[:, 0], "lse": z.logsumexp(-1)}
    if case.options.get("return_entropy"):
        result["entropy"] = -(logp.exp() * logp).sum(-1)
    return result


def _compiled() -> Call:
    compiled = torch.compile(_naive_tensors)

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        entropy = bool(case.options.get("return_entropy"))
        logprobs, h = compiled(
            inputs["logits"], inputs["target_ids"], case.options.get("temperature", 1.0), entropy
        )
        return {"logprobs": logprobs} | ({} if h is None else {"entropy": h})

    return call


def _naive_tensors(
    logits: Tensor, target_ids: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logp = (logits.float() / temperature).log_softmax(-1)
    return logp.gather(-1, target_ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1) if entropy else None


def _trl() -> Call:
    utils = _peers.module("trl.trainer.utils")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        # GRPOTrainer's own sequence: divide once, then its two functions on [B, L, V]
        temperature = case.options.get("temperature", 1.0)
        logits = inputs["logits"][None]
        logits = logits / temperature if temperature != 1.0 else logits
        result = {"logprobs": utils.selective_log_softmax(logits, inputs["target_ids"][None])[0]}
        if case.options.get("return_entropy"):
            result["entropy"] = utils.entropy_from_logits(logits)[0]
        return result

    return call


def _verl() -> Call:
    functional = _peers.verl("utils.torch_functional")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        # verl divides in place in its actor; the gradient's input must survive, so out of place here
        temperature = case.options.get("temperature", 1.0)
        logits = inputs["logits"] / temperature if temperature != 1.0 else inputs["logits"]
        result = {
            "logprobs": functional.logprobs_from_logits(logits, inputs["target_ids"], inplace_backward=False)
        }
        if case.options.get("return_entropy"):
            result["entropy"] = functional.entropy_from_logits(logits)
        return result

    return call


def _liger() -> Call:
    grpo = _peers.module("liger_kernel.transformers.grpo_loss")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if inputs["logits"].device.type == "cpu":
            raise NotImplementedError("fused_selective_log_softmax is a Triton kernel without a CPU path")
        if inputs["logits"].requires_grad:
            raise NotImplementedError("fused_selective_log_softmax has no gradient")
        # it takes [B, L + 1, V] and leaves the last position out
        logits = torch.cat([inputs["logits"], inputs["logits"][-1:]])[None]
        logprobs = grpo.fused_selective_log_softmax(
            logits, inputs["target_ids"][None], case.options["temperature"]
        )
        return {"logprobs": logprobs[0]}

    return call


PEERS = (
    Peer("torch", _torch),
    Peer("trl", _trl, cpu_note="its torch path; its Triton path needs a GPU"),
    Peer("verl", _verl),
    Peer("liger", _liger),
    Peer("torch.compile", _compiled, on_request=True),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl"))


def test_logprob(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "logprob", case, backward, name)
