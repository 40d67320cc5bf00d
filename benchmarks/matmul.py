"""``rlkernel.matmul`` against torch's product, whose bits depend on the number of rows."""

from typing import Any

from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("M", "K", "N")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED = ("b",)
GRADIENTS = ("a", "b")

ROWS = (1, 4, 16, 64, 256, 1024, 4096)


def _layer(rows: int, inner: int, columns: int, dtype: str = "float32") -> Case:
    return Case({"M": rows, "K": inner, "N": columns}, dtype)


QUICK = [_layer(256, 1024, 1024), _layer(256, 1024, 1024, "bfloat16")]
PRESETS = {
    "tiny": [_layer(5, 70, 9), _layer(5, 70, 9, "bfloat16")],
    # the layers of Qwen3-0.6B: attention's output, and up of the MLP
    "matmul-cpu": [_layer(m, 1024, n) for n in (1024, 3072) for m in ROWS],
    "matmul-cpu-bf16": [_layer(m, 1024, n, "bfloat16") for n in (1024, 3072) for m in ROWS],
    "matmul-gpu": [_layer(m, 4096, n, "bfloat16") for n in (4096, 12288) for m in ROWS],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("out",)


def upstream_shape(case: Case) -> tuple[int, int]:
    return case.sizes["M"], case.sizes["N"]


def row_elements(case: Case) -> int:
    return case.sizes["N"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward reads M K and K N elements and writes M N; backward reads M N and both again, and writes both
    m, k, n = case.sizes.values()
    return (m * k + k * n + m * n) * (3 if backward else 1) * case.itemsize


def flops(case: Case, backward: bool) -> int:
    # a product is 2 M K N operations, and so is each of the two gradients
    m, k, n = case.sizes.values()
    return (1 + (len(case.gradients) if backward else 0)) * 2 * m * k * n


def gemm(case: Case) -> tuple[int, int, int] | None:
    m, k, n = case.sizes.values()
    return m, n, k


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        return {"out": inputs["a"] @ inputs["b"]}

    return call


PEERS = (Peer("torch", _torch),)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch"))


def test_matmul(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "matmul", case, backward, name)
