"""verl's policy losses, those of its registry among them, and its value loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rlkernel.calls.value_loss import VALUE_METRICS
from rlkernel.integrations._replacing import (
    Arguments,
    Table,
    differing,
    finite,
    misplaced,
    replacement,
    require_same,
    unsuitable,
)
from rlkernel.integrations.verl import aggregation, contract, policy_losses
from rlkernel.integrations.verl.policy_losses import LOSSES, Loss, Metrics
from rlkernel.integrations.verl.verl_patch import VerlPatch
from rlkernel.ops.policy_loss import policy_loss
from rlkernel.ops.value_loss import value_loss

REGISTRY = "POLICY_LOSS_REGISTRY"
VALUE_LOSS = "compute_value_loss"


def plan(patch: VerlPatch) -> None:
    """Add what is replaced to a patch: verl's functions, and their entries in its registry."""
    import verl.trainer.ppo.core_algos as core

    for loss in LOSSES:
        with patch.planning(loss.function):
            original = contract.checked(core, loss.function)
            new = _policy_loss(loss, original, patch)
            patch.replace_everywhere("verl", loss.function, new, expected=original)
            if loss.mode is not None:
                table = vars(core)[REGISTRY]
                require_same(table, loss.mode, original)
                owner = Table(f"{core.__name__}.{REGISTRY}", table)
                patch.replace(owner, loss.mode, new, expected=original)
    with patch.planning(VALUE_LOSS):
        original = contract.checked(core, VALUE_LOSS)
        new = replacement(patch, original, "value_loss", _unable_value_loss, _value_loss)
        patch.replace_everywhere("verl", VALUE_LOSS, new, expected=original)


def _policy_loss(loss: Loss, original: Callable[..., Any], patch: VerlPatch) -> Callable[..., Any]:
    def unable(given: Arguments) -> str | None:
        if given["config"] is None:
            return "there is no config"
        tensors = {"log_prob": given["log_prob"], "advantages": given["advantages"]}
        if loss.old is not None:
            tensors[loss.old] = given[loss.old]
        if (weights := given["rollout_is_weights"]) is not None:
            if loss.weighed is None:
                return "there are rollout_is_weights"
            tensors["rollout_is_weights"] = weights
        if reason := _unable(given["response_mask"], tensors) or policy_losses.unable(loss, given["config"]):
            return reason
        return None if loss.of_all else aggregation.unable(*_aggregated(loss, given))

    def run(given: Arguments) -> tuple[Tensor, Metrics]:
        advantages, mask, options = given["advantages"], given["response_mask"], loss.options(given["config"])
        if given["rollout_is_weights"] is not None:
            assert loss.weighed is not None
            advantages = loss.weighed(given)
        old = None if loss.old is None else given[loss.old]
        summed = aggregation.options(*_aggregated(loss, given))
        out = policy_loss(given["log_prob"], old, advantages, mask, **options, **summed)
        if not loss.metrics:
            return out.loss, {}
        values = out.metrics.tolist()  # one synchronisation, where verl has one for each
        metrics = policy_losses.sums(values, loss.metrics)
        if loss.further is not None:
            metrics |= loss.further(given, options, policy_losses.sums(values, {"tokens": ("tokens",)}))
        return out.loss, metrics

    return replacement(patch, original, "policy_loss", unable, run)


def _aggregated(loss: Loss, given: Arguments) -> tuple[Any, dict[str, Any]]:
    """The mode, and what is known of the whole batch."""
    mode = loss.aggregation or given["loss_agg_mode"]
    if loss.of_all:
        return mode, {"global_batch_size": len(given["response_mask"])}
    return mode, given["config"].global_batch_info


def _unable(mask: Any, tensors: dict[str, Any]) -> str | None:
    if reason := unsuitable(**tensors) or misplaced(response_mask=mask):
        return reason
    return differing(**tensors, response_mask=mask)


def _unable_value_loss(given: Arguments) -> str | None:
    tensors = {name: given[name] for name in ("vpreds", "returns", "values")}
    if reason := _unable(given["response_mask"], tensors):
        return reason
    clip = given["cliprange_value"]
    if not finite(clip) or not clip >= 0:
        return "cliprange_value is no number >= 0"
    return aggregation.unable(given["loss_agg_mode"], _of_batch(given))


def _value_loss(given: Arguments) -> tuple[Tensor, Tensor]:
    out = value_loss(
        given["vpreds"], given["returns"], given["response_mask"], old_values=given["values"],
        cliprange_value=given["cliprange_value"],
        **aggregation.options(given["loss_agg_mode"], _of_batch(given)),
    )  # fmt: skip
    return out.loss, out.metrics[VALUE_METRICS.index("clip_fraction")]


def _of_batch(given: Arguments) -> dict[str, Any]:
    return {name: given[name] for name in aggregation.OF_BATCH}
