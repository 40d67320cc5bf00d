"""``rlkernel.layer_norm`` against PyTorch's own function."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("N", "H")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED = ("weight", "bias")
GRADIENTS = ("x", "weight", "bias")

QUICK = [Case({"N": 512, "H": 1024}, dtype) for dtype in ("float32", "bfloat16")]
PRESETS = {
    "tiny": [Case({"N": 35, "H": 37}, "float32"), Case({"N": 3, "H": 131}, "float32")],
    "norms-cpu": [
        Case({"N": n, "H": 1024}, dtype) for dtype in ("float32", "bfloat16") for n in (1, 16, 512)
    ],
    "norms-gpu": [Case({"N": n, "H": 4096}, "bfloat16") for n in (1, 64, 8192)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("out",)


def upstream_shape(case: Case) -> tuple[int, ...]:
    return case.sizes["N"], case.sizes["H"]


def row_elements(case: Case) -> int:
    return case.sizes["H"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read x, write normed, 2 N H b; backward: read x and the gradient, write that of x, 3 N H b more
    return (5 if backward else 2) * case.sizes["N"] * case.sizes["H"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # a few per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        x, weight, bias = inputs["x"], inputs["weight"], inputs["bias"]
        return {"out": F.layer_norm(x, weight.shape, weight, bias)}

    return call


PEERS = (Peer("torch", _torch),)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch"))


def test_layer_norm(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "layer_norm", case, backward, name)
