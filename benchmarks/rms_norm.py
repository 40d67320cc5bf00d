"""``rlkernel.rms_norm`` against the module of transformers, PyTorch's own function and compiled PyTorch."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("N", "H")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED = ("weight",)
GRADIENTS = ("x", "weight")
EPS = 1e-6

QUICK = [Case({"N": 512, "H": 1024}, dtype) for dtype in ("float32", "bfloat16")]
RESIDUAL: dict[str, Any] = {"note": "residual", "inputs": {"residual": True}}
RESIDUAL["gradients"] = ("x", "residual", "weight")
PRESETS = {
    "tiny": [Case({"N": 35, "H": 37}, "float32"), Case({"N": 3, "H": 131}, "float32", **RESIDUAL)],
    "norms-cpu": [
        *(Case({"N": n, "H": 1024}, dtype) for dtype in ("float32", "bfloat16") for n in (1, 16, 512)),
        *(Case({"N": 512, "H": 4096}, dtype, **RESIDUAL) for dtype in ("float32", "bfloat16")),
        Case({"N": 8192, "H": 128}, "bfloat16", note="per head"),
    ],
    "norms-gpu": [Case({"N": n, "H": 4096}, "bfloat16", **RESIDUAL) for n in (1, 64, 8192)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("normed", "summed") if case.inputs.get("residual") else ("out",)


def upstream_shape(case: Case) -> tuple[int, ...]:
    return case.sizes["N"], case.sizes["H"]


def row_elements(case: Case) -> int:
    return case.sizes["H"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read x, write normed, 2 N H b; with a residual read it, write the sum, 2 N H b more. Backward:
    # read h and the gradient, write that of x, 3 N H b; with a residual read the gradient of the sum as well.
    tensors = 4 if case.inputs.get("residual") else 2
    if backward:
        tensors += 4 if case.inputs.get("residual") else 3
    return tensors * case.sizes["N"] * case.sizes["H"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # a few per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _with_residual(norm: Any) -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if "residual" not in inputs:
            return {"out": norm(inputs["x"], inputs["weight"])}
        summed = inputs["x"] + inputs["residual"]
        return {"normed": norm(summed, inputs["weight"]), "summed": summed}

    return call


def _torch() -> Call:
    return _with_residual(lambda x, weight: F.rms_norm(x, weight.shape, weight, EPS))


def _transformers() -> Call:
    llama = _peers.module("transformers.models.llama.modeling_llama")
    norms: dict[int, Any] = {}

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        length = weight.numel()
        module = norms.setdefault(length, llama.LlamaRMSNorm(length, EPS))
        return torch.func.functional_call(module, {"weight": weight}, x)

    return _with_residual(norm)


def _by_hand(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def _compiled() -> Call:
    return _with_residual(torch.compile(_by_hand))


PEERS = (
    Peer("torch", _torch),
    Peer("transformers", _transformers),
    Peer("torch.compile", _compiled, on_request=True),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "transformers"))


def test_rms_norm(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "rms_norm", case, backward, name)
