"""``rlkernel.gae`` against the Python loops of TRL's PPOTrainer and of verl."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "L")
INPUTS: dict[str, Any] = {"masked": 0.0}  # TRL's loop knows no mask, and all must do the same work
OPTIONS: dict[str, Any] = {"gamma": 1.0, "lam": 0.95}
SHARED: tuple[str, ...] = ()
GRADIENTS: tuple[str, ...] = ()  # advantages are constants of the losses

QUICK = [Case({"B": 32, "L": 512}, "float32", OPTIONS)]  # the peers walk in Python
PRESETS = {
    "tiny": [Case({"B": 3, "L": 103}, "float32", o) for o in (OPTIONS, {"gamma": 0.9, "lam": 1.0})],
    "advantages-cpu": [Case({"B": 64, "L": 4096}, "float32", OPTIONS)],
    "advantages-gpu": [Case({"B": 256, "L": 16384}, "float32", OPTIONS)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()  # none is differentiated


def row_elements(case: Case) -> int:
    return case.sizes["L"]


def bytes_moved(case: Case, backward: bool) -> int:
    # rewards and values of b bytes and a mask of 1 are read, advantages and returns written: 17 bytes in fp32
    return case.sizes["B"] * case.sizes["L"] * (4 * case.itemsize + 1)


def flops(case: Case, backward: bool) -> int:
    return 0  # a few per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    return _loop


def _loop(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    # TRL's loop with verl's mask, by selection: NaN under the mask stays there
    rewards, values, mask = inputs["rewards"], inputs["values"], inputs["mask"]
    gamma, lam = case.options.get("gamma", 1.0), case.options.get("lam", 0.95)
    carry = next_values = torch.zeros_like(rewards[:, 0])
    reverse = []
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        carry = torch.where(mask[:, t], delta + gamma * lam * carry, carry)
        next_values = torch.where(mask[:, t], values[:, t], next_values)
        reverse.append(carry)
    advantages = torch.stack(reverse[::-1], 1)
    return {"advantages": advantages * mask, "returns": (advantages + values) * mask}


def _trl() -> Call:
    # TRL 1.16 has no PPOTrainer any more; this is the body of its loop
    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        rewards, values = inputs["rewards"], inputs["values"]
        gamma, lam = case.options.get("gamma", 1.0), case.options.get("lam", 0.95)
        lastgaelam: Any = 0
        advantages_reversed = []
        for t in reversed(range(rewards.shape[1])):
            nextvalues = values[:, t + 1] if t < rewards.shape[1] - 1 else 0.0
            delta = rewards[:, t] + gamma * nextvalues - values[:, t]
            lastgaelam = delta + gamma * lam * lastgaelam
            advantages_reversed.append(lastgaelam)
        advantages = torch.stack(advantages_reversed[::-1], dim=1)
        return {"advantages": advantages, "returns": advantages + values}

    return call


def _verl() -> Call:
    core_algos = _peers.verl_core_algos()

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        mask = inputs["mask"].to(inputs["values"].dtype)
        gamma, lam = case.options.get("gamma", 1.0), case.options.get("lam", 0.95)
        _, returns = core_algos.compute_gae_advantage_return(
            inputs["rewards"], inputs["values"], mask, gamma, lam
        )
        return {"returns": returns * mask}  # its advantages are whitened, with no way around

    return call


PEERS = (Peer("torch", _torch), Peer("trl", _trl), Peer("verl", _verl))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl", "verl"))


def test_gae(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "gae", case, backward, name)
