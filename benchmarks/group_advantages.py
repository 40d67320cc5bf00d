"""``rlkernel.group_advantages`` against plain PyTorch, TRL's expressions and verl."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers
from rlkernel.calls.group_advantages import ESTIMATORS

DIMS = ("G", "S")
INPUTS: dict[str, Any] = {}
OPTIONS: dict[str, Any] = {"estimator": "grpo"}
SHARED: tuple[str, ...] = ()
GRADIENTS: tuple[str, ...] = ()  # advantages are constants of the losses

WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
QUICK = [Case({"G": 128, "S": 8}, "float32", OPTIONS)]
PRESETS = {
    "tiny": [
        Case({"G": 3, "S": 5}, "float32", {"estimator": name}, note=name, inputs={"estimator": name})
        for name in ESTIMATORS
    ],
    "advantages-cpu": [
        Case({"G": 128, "S": 8}, "float32", {"estimator": name}, note=name, inputs={"estimator": name})
        for name in ESTIMATORS
    ],
    "advantages-gpu": [Case({"G": 1024, "S": 16}, "float32", OPTIONS)],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ()  # none is differentiated


def row_elements(case: Case) -> int:
    return case.sizes["S"]


def bytes_moved(case: Case, backward: bool) -> int:
    # rewards of b bytes are read, advantages written
    return 2 * case.sizes["G"] * case.sizes["S"] * case.itemsize


def flops(case: Case, backward: bool) -> int:
    return 0  # a few per element, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    return _naive


def _naive(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
    r = inputs["rewards"]
    deviation, n = r - r.mean(1, keepdim=True), r.shape[1]
    estimator = case.options.get("estimator", "grpo")
    if estimator == "grpo":
        return {"out": deviation / (r.std(1, keepdim=True) + 1e-4)}
    if estimator == "rloo":
        return {"out": deviation * n / (n - 1)}
    if estimator == "grpo_loo":
        others = r[:, None].expand(-1, n, -1)[:, ~torch.eye(n, dtype=torch.bool, device=r.device)]
        others = others.view(-1, n, n - 1)
        std = others.std(2)
        return {"out": (r - others.mean(2)) / torch.where(std == 0, 1, std + 1e-4)}
    if estimator == "maxrl":
        return {"out": deviation / (r.mean(1, keepdim=True) + 1e-4)}
    if estimator == "grpo_passk":
        top = r.topk(2, 1)
        lead = (top.values[:, :1] - top.values[:, 1:]) / (r.std(1, keepdim=True) + 1e-4)
        return {"out": torch.zeros_like(r).scatter(1, top.indices[:, :1], lead)}
    if estimator == "opo":
        lengths = inputs["lengths"]
        return {"out": r - (lengths * r).sum(1, keepdim=True) / lengths.sum(1, keepdim=True)}
    if estimator == "remax":
        return {"out": r - inputs["baselines"]}
    if estimator in WHITENED:
        if estimator == "gdpo":
            deviation = deviation / (r.std(1, keepdim=True) + 1e-4)
        x = r if estimator == "reinforce_plus_plus" else deviation
        return {"out": (x - x.mean()) * (x.var() + 1e-8).rsqrt()}
    return {"out": deviation}


def _trl() -> Call:
    # the lines of GRPOTrainer and RLOOTrainer from rewards_per_func to advantages, with TRL's own nanstd
    nanstd = _peers.module("trl.trainer.utils").nanstd

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        estimator, size = case.options.get("estimator", "grpo"), inputs["rewards"].shape[1]
        if estimator not in ("grpo", "dr_grpo", "rloo"):
            raise NotImplementedError(f"TRL has no {estimator}")
        per_func = inputs["rewards"].reshape(-1, 1)
        unscorable = torch.isnan(per_func).all(dim=1)
        rewards = (per_func * torch.ones(1, device=per_func.device).unsqueeze(0)).nansum(dim=1)
        rewards[unscorable] = torch.nan
        grouped = rewards.view(-1, size)
        if estimator == "rloo":
            counts = (~torch.isnan(grouped)).sum(dim=1, keepdim=True)
            baselines = (torch.nansum(grouped, dim=1, keepdim=True) - grouped) / (counts - 1)
            advantages = rewards - baselines.view(-1)
        else:
            mean = torch.nanmean(grouped, dim=1).repeat_interleave(size, dim=0)
            std = nanstd(grouped, dim=1).repeat_interleave(size, dim=0)  # also where it only logs it
            advantages = rewards - mean
            if estimator == "grpo":
                advantages = advantages / (std + 1e-4)
        return {"out": torch.nan_to_num(advantages, nan=0.0).view(inputs["rewards"].shape)}

    return call


def _verl() -> Call:
    core_algos = _peers.verl_core_algos()
    names = {
        "grpo": "compute_grpo_vectorized_outcome_advantage",  # not its Python loop
        "dr_grpo": "compute_grpo_vectorized_outcome_advantage",
        "rloo": "compute_rloo_vectorized_outcome_advantage",
        "grpo_passk": "compute_grpo_passk_outcome_advantage",
    }

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        r, estimator = inputs["rewards"], case.options.get("estimator", "grpo")
        if estimator not in names:
            raise NotImplementedError(f"verl has no {estimator}")
        ids = torch.arange(len(r)).repeat_interleave(r.shape[1]).numpy()
        scores = r.reshape(-1, 1).clone()  # summed over tokens by verl, then written over
        scaled = {"norm_adv_by_std_in_grpo": False} if estimator == "dr_grpo" else {}
        config: dict[str, Any] = {"config": {}} if estimator == "grpo_passk" else {}
        function = getattr(core_algos, names[estimator])
        advantages, _ = function(scores, torch.ones_like(scores), ids, epsilon=1e-4, **scaled, **config)
        return {"out": advantages.view(r.shape)}

    return call


PEERS = (Peer("torch", _torch), Peer("trl", _trl), Peer("verl", _verl))


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "trl", "verl"))


def test_group_advantages(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "group_advantages", case, backward, name)
