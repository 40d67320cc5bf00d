"""``rlkernel.running_normalize`` against plain PyTorch and the arithmetic of TRL's former RunningMoments."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "L")
INPUTS: dict[str, Any] = {"masked": 0.0}  # TRL's moments know no mask, and all must do the same work
OPTIONS: dict[str, Any] = {}
SHARED: tuple[str, ...] = ("state",)
GRADIENTS: tuple[str, ...] = ()  # advantages are constants of the losses
WHOLE = True  # every result depends on every row

QUICK = [Case({"B": 64, "L": 1024}, "float32")]
PRESETS = {
    "tiny": [Case({"B": 3, "L": 103}, "float32")],
    "advantages-cpu": [Case({"B": 1, "L": 1024}, "float32"), Case({"B": 64, "L": 4096}, "float32")],
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
        chosen = inputs["x"][inputs["mask"]]
        count, mean, squares = inputs["state"].tolist()
        n = chosen.numel()
        var, own = torch.var_mean(chosen, correction=0)
        delta, total = own - mean, count + n
        squares = squares + var * n + delta.square() * (count * n / total)
        mean = mean + delta * n / total
        out = (inputs["x"] - mean) / (squares / (total - 1) + 1e-8).sqrt()
        made = {"dtype": torch.float64, "device": inputs["state"].device}
        state = torch.stack([torch.as_tensor(v, **made) for v in (total, mean, squares)])
        return {"normalized": torch.where(inputs["mask"], out, 0), "state": state}

    return call


def _trl() -> Call:
    # TRL 1.16 has no RunningMoments any more; this is its update, without a mask, then the scaling of scores
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        x = inputs["x"]
        if not bool(inputs["mask"].all()):
            raise NotImplementedError("its moments have no mask")
        count, mean, squares = inputs["state"].tolist()
        n = x.numel()
        xs_var, xs_mean = torch.var_mean(x, unbiased=False)
        delta, total = xs_mean - mean, count + n
        var = (squares + xs_var * n + delta**2 * count * n / total) / total
        std = (var * total / (total - 1)).float().sqrt()
        return {"normalized": (x - (mean + delta * n / total)) / (std + 1e-8)}

    return call


PEERS = (Peer("torch", _torch), Peer("trl", _trl))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl"))


def test_running_normalize(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "running_normalize", case, backward, name)
