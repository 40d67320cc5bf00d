"""``rlkernel.swiglu`` against PyTorch's activation and product, and Liger's kernel."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("N", "I")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED = ()
GRADIENTS = ("gate", "up")

PACKED: dict[str, Any] = {"inputs": {"packed": True}, "gradients": ("gate",), "note": "packed"}
QUICK = [Case({"N": 512, "I": 3072}, dtype) for dtype in ("float32", "bfloat16")]
PRESETS = {
    "tiny": [
        Case({"N": 35, "I": 37}, "float32"),
        Case({"N": 3, "I": 131}, "float32", {"activation": "gelu"}, note="gelu"),
        Case({"N": 3, "I": 131}, "float32", {"activation": "gelu_tanh"}, **PACKED),
    ],
    "swiglu-cpu": [
        *(Case({"N": n, "I": 3072}, dtype) for dtype in ("float32", "bfloat16") for n in (1, 16, 512)),
        Case({"N": 512, "I": 3072}, "bfloat16", **PACKED),
        Case({"N": 512, "I": 3072}, "bfloat16", {"activation": "gelu_tanh"}, note="gelu_tanh"),
    ],
    "swiglu-gpu": [Case({"N": n, "I": 14336}, "bfloat16") for n in (1, 64, 8192)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("out",)


def upstream_shape(case: Case) -> tuple[int, ...]:
    return case.sizes["N"], case.sizes["I"]


def row_elements(case: Case) -> int:
    return 2 * case.sizes["I"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read gate and up, write the product, 3 N I b; backward: read both and the gradient, write two,
    # 5 N I b more
    return (8 if backward else 3) * case.sizes["N"] * case.sizes["I"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # some twenty per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        gate, up = (inputs["gate"], inputs["up"]) if "up" in inputs else inputs["gate"].chunk(2, -1)
        activation = case.options.get("activation", "silu")
        if activation == "silu":
            return {"out": F.silu(gate) * up}
        return {"out": F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up}

    return call


def _liger() -> Call:
    function = _peers.module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if not inputs["gate"].is_cuda:
            raise NotImplementedError("LigerSiLUMulFunction is a Triton kernel without a CPU path")
        if "up" not in inputs or case.options:
            raise NotImplementedError("it takes two tensors, and SiLU")
        return {"out": function.apply(inputs["gate"], inputs["up"])}

    return call


PEERS = (Peer("torch", _torch), Peer("liger", _liger))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch"))


def test_swiglu(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "swiglu", case, backward, name)
