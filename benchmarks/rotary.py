"""``rlkernel.rotary`` against transformers' function, vLLM's formula and Liger's kernel."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "T", "H", "D")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {}
SHARED = ()
GRADIENTS = ("q", "k")

QUICK = [Case({"B": 1, "T": 512, "H": 16, "D": 128}, dtype) for dtype in ("float32", "bfloat16")]
PRESETS = {
    "tiny": [
        Case({"B": 2, "T": 5, "H": 4, "D": 10}, "float32"),
        Case({"B": 1, "T": 7, "H": 2, "D": 16}, "float32", {"rounding": "after_sum"}, note="rounded once"),
    ],
    "rotary-cpu": [
        Case({"B": 1, "T": t, "H": 16, "D": 128}, dtype)
        for dtype in ("float32", "bfloat16")
        for t in (1, 16, 512)
    ],
    "rotary-gpu": [Case({"B": 1, "T": t, "H": 32, "D": 128}, "bfloat16") for t in (1, 64, 8192)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("q", "k")


def upstream_shape(case: Case) -> tuple[int, ...]:
    return tuple(case.sizes[letter] for letter in "BHTD")


def row_elements(case: Case) -> int:
    return 2 * case.sizes["H"] * case.sizes["D"]


def bytes_moved(case: Case, backward: bool) -> int:
    # each way: read and write q and k, 4 B T H D b; cos and sin are of one head's size
    return (4 if backward else 2) * case.sizes["B"] * case.sizes["T"] * row_elements(case) * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # three per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _transformers() -> Call:
    function = _peers.module("transformers.models.llama.modeling_llama").apply_rotary_pos_emb

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        return dict(zip("qk", function(**inputs), strict=True))

    return call


def _torch() -> Call:
    """vLLM's ``forward_native``, over tokens first as it stands there."""

    def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        half = case.sizes["D"] // 2
        cos, sin = (inputs[name][..., :half].unsqueeze(1) for name in ("cos", "sin"))
        return {name: turned(inputs[name], cos, sin) for name in "qk"}

    return call


def _liger() -> Call:
    function = _peers.module("liger_kernel.ops.rope").LigerRopeFunction

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        if not inputs["q"].is_cuda:
            raise NotImplementedError("LigerRopeFunction is a Triton kernel without a CPU path")
        # it writes over what it is given
        found = function.apply(inputs["q"].clone(), inputs["k"].clone(), inputs["cos"], inputs["sin"])
        return dict(zip("qk", found, strict=True))

    return call


PEERS = (Peer("torch", _torch), Peer("transformers", _transformers), Peer("liger", _liger))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "transformers"))


def test_rotary(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "rotary", case, backward, name)
