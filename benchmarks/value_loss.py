"""``rlkernel.value_loss`` against PyTorch, verl's ``compute_value_loss`` and compiled PyTorch."""

from typing import Any

import torch
from torch import Tensor

from rlkernel.bench.cases import Call, Case, Peer
from rlkernel.benchmarks import _peers

DIMS = ("B", "L")
INPUTS = {"clipped": True}
OPTIONS: dict[str, Any] = {"cliprange_value": 0.2}
SHARED: tuple[str, ...] = ()
GRADIENTS = ("values",)
SCALARS = ("loss",)

QUICK = [Case({"B": 64, "L": 4096}, "float32", OPTIONS)]
PRESETS = {
    # odd sizes: more than one chunk and a tail
    "tiny": [
        Case({"B": 3, "L": 2051}, "float32", {**OPTIONS, "loss_agg_mode": mode}, mode)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    ],
    "losses-cpu": [
        Case({"B": 64, "L": 4096}, "float32", {**OPTIONS, "loss_agg_mode": mode}, mode)
        for mode in ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
    ],
}


def OUTPUTS(case: Case) -> tuple[str, ...]:
    return ("loss",)


def row_elements(case: Case) -> int:
    return case.sizes["L"]


def bytes_moved(case: Case, backward: bool) -> int:
    # forward: read values, returns and old values, 3 B L b, and the mask, B L. For backward it also writes
    # each token's derivative in fp32, 4 B L, which backward reads, 4 B L, to write the gradient, B L b.
    tokens = case.sizes["B"] * case.sizes["L"]
    return tokens * (3 * case.itemsize + 1 + (8 + case.itemsize if backward else 0))


def flops(case: Case, backward: bool) -> int:
    return 0  # some twenty operations per token, hidden behind the reads


def gemm(case: Case) -> tuple[int, int, int] | None:
    return None


def _torch() -> Call:
    return lambda inputs, case: dict(
        zip(("loss", "metrics"), _by_hand(**inputs, **case.options), strict=True)
    )


def _by_hand(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    old_values: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    # What one writes by hand, with the same metrics: whole tensors in fp32.
    wide = torch.promote_types(values.dtype, torch.float32)
    v, target, old = values.to(wide), returns.to(wide), old_values.to(wide)
    first = (v - target) ** 2
    second = (torch.clamp(v, old - cliprange_value, old + cliprange_value) - target) ** 2
    losses = torch.where(mask, 0.5 * torch.max(first, second), 0)
    count = mask.sum()
    if loss_agg_mode == "token-mean":
        loss = losses.sum() / count
    else:
        rows = losses.sum(-1)
        counts = mask.sum(-1)
        rows = rows / counts.clamp(min=1) if loss_agg_mode == "seq-mean-token-mean" else rows
        loss = rows.sum() / (counts > 0).sum()

    def moments(x: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.where(mask, x, 0).sum() / count
        return mean, torch.where(mask, (x - mean) ** 2, 0).sum() / count

    with torch.no_grad():
        return_mean, return_variance = moments(target)
        error_mean, error_variance = moments(target - v)
        metrics = [
            count,
            (mask & ~losses.isfinite()).sum(),
            (mask & (second > first)).sum() / count,
            torch.where(mask, v, 0).sum() / count,
            return_mean,
            return_variance,
            error_mean,
            error_variance,
            1 - error_variance / return_variance,
        ]
        return loss, torch.stack(metrics)


def _compiled() -> Call:
    compiled = torch.compile(_by_hand)
    return lambda inputs, case: dict(
        zip(("loss", "metrics"), compiled(**inputs, **case.options), strict=True)
    )


def _verl() -> Call:
    core = _peers.verl_core_algos()

    def call(inputs: dict[str, Any], case: Case) -> dict[str, Tensor]:
        loss, _ = core.compute_value_loss(
            inputs["values"], inputs["returns"], inputs["old_values"], inputs["mask"],
            case.options["cliprange_value"], case.options.get("loss_agg_mode", "token-mean"),
        )  # fmt: skip
        return {"loss": loss}

    return call


PEERS = (
    Peer("torch", _torch),
    Peer("verl", _verl),
    Peer("torch.compile", _compiled, on_request=True),
)


def pytest_generate_tests(metafunc: Any) -> None:
    _peers.parametrize(metafunc, QUICK, ("rlkernel", "torch", "verl"))


def test_value_loss(benchmark: Any, case: Case, backward: bool, name: str) -> None:
    _peers.pytest_benchmark(benchmark, "value_loss", case, backward, name)
