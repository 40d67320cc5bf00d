"""``rlkernel.linear_policy_loss`` against the same in two ops, PyTorch, TRL, Liger and the bare GEMMs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import rlkernel
from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers
from rlkernel.benchmarks.policy_loss import trl_loss

DIMS = ("B", "L", "H", "V")
# Every row counts and hardly one is clipped, for all must do the same work; Liger takes no advantages of
# tokens; the loss is a sum that does not cancel, so its error is worth a look.
INPUTS: dict[str, Any] = {"full": True, "drift": 0.05, "per_token": False, "mean_advantage": 1.0}
OPTIONS: dict[str, Any] = {}
SHARED = ("weight",)
GRADIENTS = ("hidden", "weight")
SCALARS = ("loss",)

_TINY = {"B": 2, "L": 3, "H": 24, "V": 130}
_CPU = {"B": 8, "L": 512, "H": 1024, "V": 32768}
QUICK = [Case({"B": 2, "L": 64, "H": 256, "V": 4096}, "float32", OPTIONS)]
PRESETS = {
    "tiny": [
        Case(_TINY, "float32", OPTIONS),
        Case(_TINY, "float32", {"importance_sampling_level": "sequence"}, "sequence"),
        Case(_TINY, "float32", OPTIONS, "frozen head", ("hidden",)),
    ],
    "linear-policy-cpu": [
        Case(_CPU, "float32", OPTIONS),
        Case(_CPU, "float32", {"importance_sampling_level": "sequence"}, "sequence"),
        Case(_CPU, "float32", OPTIONS, "frozen head", ("hidden",)),
    ],
    "linear-policy-gpu": [
        Case({"B": 8, "L": 1024, "H": 4096, "V": 128256}, "bfloat16", OPTIONS, workspace=4 * 2**30),
        Case({"B": 8, "L": 1024, "H": 4096, "V": 128256}, "bfloat16", OPTIONS, "default workspace"),
    ],
}  # fmt: skip


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("loss",)


def row_elements(case: Case) -> int:
    return case.sizes["L"] * case.sizes["V"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read hidden, N H b, and weight, V H b; with gradients: write both of these too.
    rows = case.sizes["B"] * case.sizes["L"]
    return (2 if backward else 1) * (rows + case.sizes["V"]) * case.sizes["H"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    # One GEMM is 2 N H V operations: the logits; and for each gradient that is wanted another one.
    rows = case.sizes["B"] * case.sizes["L"]
    return (1 + (len(case.gradients) if backward else 0)) * 2 * rows * case.sizes["H"] * case.sizes["V"]


def gemm(case: Case) -> tuple[int, int, int] | None:
    rows = case.sizes["B"] * case.sizes["L"]
    return min(rows, 2048), min(case.sizes["V"], 16384), case.sizes["H"]


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        inputs = dict(inputs)
        hidden, weight, ids = (inputs.pop(name) for name in ("hidden", "weight", "target_ids"))
        z = (hidden @ weight.T).to(torch.promote_types(case.torch_dtype, torch.float32))
        logprobs = z.log_softmax(-1).gather(-1, ids[..., None])[..., 0]
        with rlkernel.use_backend("reference"):
            out = rlkernel.policy_loss(logprobs, **inputs, **case.options)
        return out._asdict() | {"logprobs": logprobs}

    return call


def _two_ops() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        inputs = dict(inputs)
        hidden, weight, ids = (inputs.pop(name) for name in ("hidden", "weight", "target_ids"))
        logprobs = rlkernel.linear_logprob(hidden, weight, ids).logprobs
        loss = rlkernel.policy_loss(logprobs, **inputs, **case.options).loss
        return {"loss": loss, "logprobs": logprobs}

    return call


def _trl() -> Call:
    trainer = _peers.module("trl.trainer.grpo_trainer").GRPOTrainer
    function = _peers.module("trl.kernels.chunked_logprob").ChunkedLogProbFunction
    chunk = _peers.module("trl.trainer.utils")._CHUNKED_LOGPROB_CHUNK_SIZE

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        hidden, ids = inputs["hidden"], inputs["target_ids"]
        flat = hidden.reshape(-1, hidden.shape[-1])
        result = function.apply(flat, inputs["weight"], None, ids.reshape(-1), 1.0, chunk, None, 1.0, ())
        logprobs = result[0].view(ids.shape)
        level = case.options.get("importance_sampling_level", "token")
        loss = trl_loss(
            trainer, inputs | {"logprobs": logprobs}, loss_type="dapo", importance_sampling_level=level
        )
        return {"loss": loss, "logprobs": logprobs}

    return call


def _liger() -> Call:
    liger = _peers.module("liger_kernel.chunked_loss").LigerFusedLinearGRPOLoss

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        level = case.options.get("importance_sampling_level", "token")
        loss = liger(
            beta=0.0, compiled=False, use_ref_model=False, loss_type="dapo", importance_sampling_level=level
        )
        mask = inputs["mask"].to(inputs["old_logprobs"].dtype)
        arguments = (inputs["hidden"], inputs["weight"], inputs["target_ids"], mask, inputs["advantages"])
        return {"loss": loss(*arguments, old_per_token_logps=inputs["old_logprobs"])[0]}

    return call


def _gemms(inputs: dict[str, Any], case: Case, backward: bool) -> Callable[[], None]:
    """The GEMMs of ``flops`` and nothing else, on whole matrices that are already there."""
    hidden, weight = inputs["hidden"].reshape(-1, case.sizes["H"]), inputs["weight"]
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)

    def run() -> None:
        torch.mm(hidden, weight.T, out=logits)
        if backward and "hidden" in case.gradients:
            torch.mm(logits, weight, out=grad_hidden)
        if backward and "weight" in case.gradients:
            torch.mm(logits.T, hidden, out=grad_weight)

    return run


PEERS = (
    Peer("torch", _torch),
    Peer("two ops", _two_ops),
    Peer("trl", _trl, cpu_note="its torch path, which takes several fp32 tiles; its Triton path needs a GPU"),
    Peer("liger", _liger),
    Peer("bare GEMMs", _torch, bare=_gemms),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "two ops", "trl", "liger"))


def test_linear_policy_loss(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "linear_policy_loss", case, backward, name)
