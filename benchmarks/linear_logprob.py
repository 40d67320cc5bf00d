"""``rlkernel.linear_logprob`` from hidden states against PyTorch, TRL, Liger, verl and the bare GEMMs."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("N", "H", "V")
INPUTS = {"ignored": 0.0}  # not every peer knows ignored rows, and all must do the same work
OPTIONS: dict[str, Any] = {"temperature": 0.8}
ENTROPY: dict[str, Any] = {"temperature": 0.8, "return_entropy": True}
SHARED = ("weight", "bias")
GRADIENTS = ("hidden", "weight")


def _group(size: int, scale: int) -> Case:
    """One prompt's group of completions, 512 tokens each, on an 8B model's head; every length ``scale`` times
    smaller, so everything that takes memory is ``scale**2`` times smaller, and so is the workspace: with what
    each row takes beside it, a quarter of a GiB is the whole."""
    sizes = {"N": size * 512 // scale, "H": 4096 // scale, "V": 128256 // scale}
    limit = max(224 * 2**20 // scale**2, 2**20)
    return Case(
        sizes,
        "bfloat16",
        OPTIONS,
        f"group {size}",
        suites=("memory",),
        workspace=limit,
        scale=scale,
        axis=("group size", size),
    )


def _length(tokens: int) -> Case:
    """A head that one workspace of 8 MiB cuts in tiles already at the smallest N."""
    return Case(
        {"N": tokens, "H": 256, "V": 4096},
        "float32",
        OPTIONS,
        suites=("memory",),
        workspace=8 * 2**20,
        axis=("tokens", tokens),
    )


GROUPS = (64, 128, 256)
QUICK = [
    Case({"N": 128, "H": 256, "V": 8192}, "float32", ENTROPY),
    Case({"N": 128, "H": 256, "V": 8192}, "bfloat16", ENTROPY),
    # in fp32, which a CPU without matrix units multiplies faster
    *(_group(size, scale=16).replace(peers=("torch", "trl"), dtype="float32") for size in GROUPS),
]
PRESETS = {
    "tiny": [
        Case({"N": 3, "H": 24, "V": 1030}, "float32", ENTROPY),
        Case({"N": 3, "H": 24, "V": 1030}, "float32", OPTIONS),
        Case({"N": 3, "H": 24, "V": 1030}, "float32", OPTIONS, "frozen head", gradients=("hidden",)),
    ],
    # the case of the research notes: how far logits rounded to bf16 take a logprob
    "accuracy": [Case({"N": 8192, "H": 512, "V": 16384}, "bfloat16", ENTROPY, suites=("parity",))],
    "linear-cpu": [
        Case({"N": 4096, "H": 1024, "V": 32768}, "float32", OPTIONS),
        Case({"N": 4096, "H": 1024, "V": 32768}, "float32", ENTROPY),
        Case({"N": 4096, "H": 1024, "V": 32768}, "float32", OPTIONS, "frozen head", gradients=("hidden",)),
    ],
    "linear-gpu": [
        Case({"N": 8192, "H": 4096, "V": 128256}, "bfloat16", OPTIONS),
        Case({"N": 8192, "H": 4096, "V": 128256}, "bfloat16", {**OPTIONS, "algorithm": "fused"}, "fused"),
    ],
    "linear-gpu-more": [
        Case({"N": 8192, "H": 4096, "V": 128256}, "bfloat16", ENTROPY),
        Case({"N": 8192, "H": 4096, "V": 128256}, "bfloat16", OPTIONS, "frozen head", gradients=("hidden",)),
        # where the workspace holds all logits until backward
        Case({"N": 8192, "H": 4096, "V": 128256}, "bfloat16", OPTIONS, "6 GiB", workspace=6 * 2**30),
    ],
    **{f"group-{scale}": [_group(size, scale) for size in GROUPS] for scale in (1, 2, 4, 8, 16)},
    "lengths": [_length(tokens) for tokens in (1024, 16384, 65536)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("logprobs", "entropy") if case.options.get("return_entropy") else ("logprobs",)


def row_elements(case: Case) -> int:
    return case.sizes["V"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read hidden, N H b, and weight, V H b; with gradients: write both of these too.
    n, h, v = case.sizes.values()
    return (2 if backward else 1) * (n * h + v * h) * case.itemsize


def flops(case: Case, backward: bool) -> int:
    # One GEMM is 2 N H V operations: the logits; and for each gradient that is wanted another one. Logits
    # that the workspace has no room to keep are computed once more, which no floor counts.
    n, h, v = case.sizes.values()
    return (1 + (len(case.gradients) if backward else 0)) * 2 * n * h * v


def gemm(case: Case) -> tuple[int, int, int] | None:
    # the case's own product, cut where a larger one is no faster
    n, h, v = case.sizes.values()
    return min(n, 2048), min(v, 16384), h


def _torch() -> Call:
    return _naive


def _naive(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    # What one writes by hand: logits in the dtype of the model, softmax in fp32.
    logits = inputs["hidden"] @ inputs["weight"].T
    z = logits.to(torch.promote_types(case.torch_dtype, torch.float32)) / case.options.get("temperature", 1.0)
    logp = z.log_softmax(-1)
    result = {"logprobs": logp.gather(-1, inputs["target_ids"][:, None])[:, 0], "lse": z.logsumexp(-1)}
    if case.options.get("return_entropy"):
        result["entropy"] = -(logp.exp() * logp).sum(-1)
    return result


def _trl() -> Call:
    function = _peers.module("trl.kernels.chunked_logprob")
    utils = _peers.module("trl.trainer.utils")

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        outputs = ("entropy",) if case.options.get("return_entropy") else ()
        temperature = case.options.get("temperature", 1.0)
        chunk = utils._CHUNKED_LOGPROB_CHUNK_SIZE // case.scale
        result = function.ChunkedLogProbFunction.apply(
            inputs["hidden"],
            inputs["weight"],
            None,
            inputs["target_ids"],
            temperature,
            chunk,
            None,
            1.0,
            outputs,
        )
        return {"logprobs": result[0]} | ({"entropy": result[1]} if outputs else {})

    return call


def _liger() -> Call:
    function = _peers.module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyFunction

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        entropy = bool(case.options.get("return_entropy"))
        result = function.apply(
            inputs["hidden"],
            inputs["weight"],
            inputs["target_ids"],
            case.options.get("temperature", 1.0),
            return_entropy=entropy,
        )
        return {"logprobs": -result[0], "entropy": result[1]} if entropy else {"logprobs": -result}

    return call


def _verl() -> Call:
    # the file needs torch alone, the package around it ray and more
    function = _peers.file("verl", "utils/experimental/torch_functional.py").FusedLinearForPPOFunction

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        temperature, chunk = (
            case.options.get("temperature", 1.0),
            512 // case.scale,
        )  # 512 is FusedLinearForPPO's default
        logprobs, entropy = function.apply(
            inputs["hidden"], inputs["weight"], inputs["target_ids"], temperature, chunk
        )
        return {"logprobs": logprobs} | ({"entropy": entropy} if case.options.get("return_entropy") else {})

    return call


def _linear_cross_entropy() -> Call:
    if not hasattr(F, "linear_cross_entropy"):
        raise ImportError(f"torch {torch.__version__} has no F.linear_cross_entropy")
    chunked = torch.nn.LinearCrossEntropyOptions()

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if case.options.get("return_entropy"):
            raise NotImplementedError("F.linear_cross_entropy has no entropy")
        hidden = inputs["hidden"] / case.options.get("temperature", 1.0)  # it has no temperature either
        nll = F.linear_cross_entropy(
            hidden, inputs["weight"], inputs["target_ids"], reduction="none", options=chunked
        )
        return {"logprobs": -nll}

    return call


def _compiled() -> Call:
    compiled = torch.compile(_naive_tensors)

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        entropy, temperature = bool(case.options.get("return_entropy")), case.options.get("temperature", 1.0)
        logprobs, h = compiled(inputs["hidden"], inputs["weight"], inputs["target_ids"], temperature, entropy)
        return {"logprobs": logprobs} | ({} if h is None else {"entropy": h})

    return call


def _naive_tensors(
    hidden: Tensor, weight: Tensor, target_ids: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    logp = ((hidden @ weight.T).float() / temperature).log_softmax(-1)
    return logp.gather(-1, target_ids[:, None])[:, 0], -(logp.exp() * logp).sum(-1) if entropy else None


def _gemms(inputs: dict[str, Any], case: Case, backward: bool) -> Callable[[], None]:
    """The GEMMs of ``flops`` and nothing else, on whole matrices that are already there."""
    hidden, weight = inputs["hidden"], inputs["weight"]
    logits = hidden.new_empty(hidden.shape[0], weight.shape[0])
    grad_hidden, grad_weight = torch.empty_like(hidden), torch.empty_like(weight)
    frozen = "weight" not in case.gradients

    def forward() -> None:
        torch.mm(hidden, weight.T, out=logits)

    def forward_backward() -> None:
        forward()
        if not frozen:
            torch.mm(logits.T, hidden, out=grad_weight)
        torch.mm(logits, weight, out=grad_hidden)

    return forward_backward if backward else forward


def _shrink_trl(scale: int) -> AbstractContextManager[None]:
    return _peers.shrunk("trl.kernels.chunked_logprob", "TOKEN_CHUNK_SIZE", scale)


def _shrink_liger(scale: int) -> AbstractContextManager[None]:
    return _peers.shrunk("liger_kernel.ops.fused_linear_scaled_cross_entropy", "_FALLBACK_CHUNK_SIZE", scale)


_TRL_NOTE = "its torch path, which takes several fp32 tiles; its Triton path, with one tile, needs a GPU"
_LIGER_NOTE = "its torch fallback; its fused kernel needs a GPU"

PEERS = (
    Peer("torch", _torch),
    Peer("trl", _trl, shrink=_shrink_trl, cpu_note=_TRL_NOTE),
    Peer("liger", _liger, shrink=_shrink_liger, cpu_note=_LIGER_NOTE),
    Peer("verl", _verl),
    Peer("F.linear_ce", _linear_cross_entropy),
    Peer("torch.compile", _compiled, on_request=True),
    Peer("bare GEMMs", _torch, bare=_gemms),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK[:2], ("rlkernel", "torch", "trl", "liger"))


def test_linear_logprob(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "linear_logprob", case, backward, name)
