"""``rlkernel.whiten`` against plain PyTorch and verl."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "L")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ()
GRADIENTS: tuple[str, ...] = ()  # advantages are constants of the losses
WHOLE = True  # every result depends on every row

QUICK = [Case({"B": 64, "L": 4096}, "float32")]
PRESETS = {
    "tiny": [Case({"B": 3, "L": 103}, "float32")],
    "advantages-cpu": QUICK,
    "advantages-gpu": [Case({"B": 256, "L": 16384}, "float32")],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()  # none is differentiated


def row_elements(case: Case) -> int:
    return case.sizes["L"]


def bytes_moved(case: Case, backward: bool) -> int:
    # x of b bytes and a mask of 1 are read twice (moments, result), and the result written
    return case.sizes["B"] * case.sizes["L"] * (3 * case.itemsize + 2)


def flops(case: Case, backward: bool) -> int:
    return 0  # a few per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        x, mask = inputs["x"], inputs["mask"]
        chosen = x[mask]
        return {"out": torch.where(mask, (x - chosen.mean()) * (chosen.var() + 1e-8).rsqrt(), 0)}

    return call


def _verl() -> Call:
    functional = _peers.verl_core_algos().verl_F

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        mask = inputs["mask"].to(inputs["x"].dtype)
        return {"out": functional.masked_whiten(inputs["x"], mask) * mask}

    return call


PEERS = (Peer("torch", _torch), Peer("verl", _verl))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "verl"))


def test_whiten(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "whiten", case, backward, name)
