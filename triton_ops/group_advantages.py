"""``group_advantages`` over Triton: one launch, two where the batch scales, two more where it is whitened."""

from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from rlkernel.triton_ops import whiten
from rlkernel.triton_ops._device import device_reasons
from rlkernel.triton_ops.group_advantages_kernels import BLOCK, batch_kernel, group_kernel
from rlkernel.triton_ops.whiten_kernels import CHUNK, Moment

KINDS = {
    "dr_grpo": "deviation", "reinforce_plus_plus_baseline": "deviation", "grpo": "deviation", "rloo": "rloo",
    "opo": "opo", "maxrl": "maxrl", "grpo_passk": "passk", "gdpo": "gdpo", "reinforce_plus_plus": "total",
    "remax": "total", "grpo_loo": "loo",
}  # fmt: skip
SCALED = ("grpo", "grpo_passk", "gdpo")
WHITENED = ("gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def unsupported(*tensors: Tensor, **options: Any) -> list[str]:
    reasons = device_reasons(tensors[0])
    return reasons + (
        ["rewards must be at most fp32, got float64"] if tensors[0].dtype == torch.float64 else []
    )


def forward(
    rewards: Tensor,
    mask: Tensor | None,
    group_ids: Tensor | None,
    group_size: int,
    group_offsets: Tensor | None,
    reward_weights: Tensor | None,
    baselines: Tensor | None,
    lengths: Tensor | None,
    estimator: str,
    scale_rewards: str,
    unbiased: bool,
    eps: float,
    singletons: str,
    batch_eps: float,
    batch_eps_in: str,
) -> Tensor:
    n, columns = rewards.shape
    device = rewards.device
    order = ends = batch = wide = counts = None
    groups = triton.cdiv(n, group_size) if group_offsets is None else len(group_offsets) - 1
    if group_ids is not None:
        ids, order = group_ids.sort(stable=True)
        ends = torch.searchsorted(ids, ids, right=True)
        groups = n
    weights, start, sizes = (_float(x) for x in (reward_weights, baselines, lengths))
    kind, scale = KINDS[estimator], scale_rewards if estimator in SCALED else "none"
    kept = None if mask is None else mask.view(torch.uint8)
    out = torch.empty(n, dtype=torch.float32, device=device)
    if not n:
        return out
    if estimator in WHITENED:
        wide = torch.empty(n, dtype=torch.float64, device=device)
        counts = torch.empty(n, dtype=torch.bool, device=device)
    threads = 32 if torch.version.hip is None else 64  # a place is one thread's
    with torch.cuda.device_of(rewards):
        if scale == "batch":
            slots = triton.cdiv(n, CHUNK) * (columns if kind == "gdpo" else 1)
            batch = torch.empty(slots, len(Moment), dtype=torch.float64, device=device)
            batch_kernel[(slots,)](
                rewards, kept, n, columns, weights, batch, WEIGHTED=kind != "gdpo", CHUNK=CHUNK, num_warps=8,
                enable_fp_fusion=False,
            )  # fmt: skip
        if groups:
            group_kernel[(groups,)](
                rewards, kept, n, columns, weights, start, sizes, order, ends, group_offsets, group_size, eps,
                batch, out if wide is None else None, wide,
                None if counts is None else counts.view(torch.uint8),
                KIND=kind, SCALE=scale, UNBIASED=unbiased, REWARD_SINGLETONS=singletons == "reward",
                BLOCK=BLOCK, CHUNK=CHUNK, num_warps=BLOCK // threads, enable_fp_fusion=False,
            )  # fmt: skip
    if wide is not None:
        whiten.run(wide, counts, sizes, True, unbiased, batch_eps, batch_eps_in, out)
    return out


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.to(torch.float32).contiguous()


def aot_cases() -> dict[str, Callable[[], object]]:
    """Calls on small CPU tensors, whose kernels the tests compile for every GPU and do not launch."""
    one, three = torch.zeros(12, 1), torch.zeros(12, 3)
    ids, offsets = torch.arange(12), torch.tensor([0, 5, 12])
    weights, each = torch.ones(3), torch.ones(12)

    def case(
        estimator: str, rewards: Tensor = one, size: int = 4, scale: str = "group", **more: Any
    ) -> Callable[[], object]:
        given: dict[str, Any] = dict.fromkeys(
            ("mask", "group_ids", "group_offsets", "reward_weights", "baselines", "lengths")
        )
        options = {"unbiased": True, "eps": 1e-4, "singletons": "reward", "batch_eps": 1e-8}
        return lambda: forward(
            rewards=rewards, group_size=size, estimator=estimator, scale_rewards=scale, batch_eps_in="std",
            **given | options | more,
        )  # fmt: skip

    return {
        "grpo": case("grpo"),
        "grpo ids mask": case("grpo", group_ids=ids, mask=one == 0),
        "grpo offsets batch": case("grpo", scale="batch", group_offsets=offsets),
        "dr_grpo": case("dr_grpo", scale="none"),
        "rloo weighted": case("rloo", three, reward_weights=weights, mask=three == 0),
        "opo": case("opo", lengths=each),
        "maxrl": case("maxrl"),
        "grpo_loo": case("grpo_loo", group_ids=ids, mask=one == 0),
        "grpo_passk": case("grpo_passk"),
        "gdpo": case("gdpo", three, reward_weights=weights, mask=three == 0, lengths=each),
        "gdpo batch": case("gdpo", three, scale="batch", reward_weights=weights),
        "remax": case("remax", baselines=each),
    }
