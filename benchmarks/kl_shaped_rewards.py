"""``rlkernel.kl_shaped_rewards`` against plain PyTorch and verl."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "L")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"kl_estimator": "k3"}
SHARED: tuple[str, ...] = ()
GRADIENTS: tuple[str, ...] = ()  # advantages are constants of the losses

QUICK = [Case({"B": 64, "L": 4096}, "float32", OPTIONS)]
PRESETS = {
    "tiny": [Case({"B": 3, "L": 103}, "float32", {"kl_estimator": k}, note=k) for k in ("k3", "k1", "k2")],
    "advantages-cpu": QUICK,
    "advantages-gpu": [Case({"B": 256, "L": 16384}, "float32", OPTIONS)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()  # none is differentiated


def row_elements(case: Case) -> int:
    return case.sizes["L"]


def bytes_moved(case: Case, backward: bool) -> int:
    # two logprobs of b bytes and a mask of 1 are read, the rewards written
    return case.sizes["B"] * case.sizes["L"] * (3 * case.itemsize + 1)


def flops(case: Case, backward: bool) -> int:
    return 0  # a few per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _paid(inputs: dict[str, Any]) -> Tensor:
    """The reward of each sequence at its last token that counts."""
    rewards, mask = inputs["rewards"], inputs["mask"]
    last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
    paid = torch.zeros(mask.shape, dtype=rewards.dtype, device=rewards.device)
    return paid.scatter(1, last[:, None], rewards[:, None])


def _torch() -> Call:
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        d = inputs["ref_logprobs"] - inputs["logprobs"]
        kl = d.exp() - d - 1
        return {"out": (_paid(inputs) - inputs["beta"] * kl) * inputs["mask"]}

    return call


def _verl() -> Call:
    core_algos = _peers.verl_core_algos()

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        kl = core_algos.kl_penalty(
            inputs["logprobs"], inputs["ref_logprobs"], case.options.get("kl_estimator", "k1")
        )
        return {"out": (_paid(inputs) - inputs["beta"] * kl) * inputs["mask"]}

    return call


PEERS = (Peer("torch", _torch), Peer("verl", _verl))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "verl"))


def test_kl_shaped_rewards(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "kl_shaped_rewards", case, backward, name)
