"""The output layer of a model that is given labels: losses of its hidden states, without logits.

A model calls its output layer, and hands what that returns to ``compute_language_model_loss``.  Meanwhile
the layer returns the hidden states that it was called with, and the loss is made of those: what happens in
between and around, pipeline stages, predictions of several tokens and hooks, stays Megatron's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from rlkernel.integrations._replacing import NARROW, misplaced, shown, unsuitable
from rlkernel.integrations._shards import UNKNOWN, equal_shard, registered, targets_in
from rlkernel.integrations.megatron import contract
from rlkernel.integrations.megatron.megatron_patch import MegatronPatch
from rlkernel.ops.linear_logprob import linear_logprob

LOSS = "compute_language_model_loss"
MODELS = {  # of each class, its module, and the method that calls the output layer
    "GPTModel": ("megatron.core.models.gpt.gpt_model", "_postprocess"),
    "MambaModel": ("megatron.core.models.mamba.mamba_model", "forward"),
}


class Unmultiplied(NamedTuple):
    """What an output layer was called with, in the place of the logits that it would have made."""

    layer: Any
    group: ProcessGroup  # the ranks that share out the layer's vocabulary
    hidden: Tensor  # [L, B, H], or under sequence parallelism the rank's part of the L rows
    weight: Tensor
    logits: Callable[[], Tensor]  # makes them after all

    def loss(self, ids: Tensor) -> Tensor:
        """Of each token, [L, B]."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        layer, hidden, weight, entries = self.layer, self.hidden, self.weight, self.weight.shape[0]
        if layer.sequence_parallel:
            # linear_logprob gives every rank the whole gradient: no sum, each rank takes its own rows of it
            hidden = gather_from_sequence_parallel_region(hidden, False, group=layer.tp_group)
        if layer.gradient_accumulation_fusion and weight.requires_grad and torch.is_grad_enabled():
            weight = weight.view_as(weight)
            weight.register_hook(functools.partial(_arrives, self.weight))
        bias = None if layer.skip_bias_add else layer.bias
        ids = targets_in(self.group, entries, ids)
        shard = equal_shard(self.group, entries)
        return -linear_logprob(hidden, weight, ids, bias=bias, **shard).logprobs

    def rows(self) -> tuple[int, int]:
        count, batch = self.hidden.shape[:2]
        return count * (self.group.size() if self.layer.sequence_parallel else 1), batch


def _arrives(weight: Any, grad: Tensor) -> None:
    """Megatron's DDP drops gradients of a weight whose logits of another micro batch, those of a call without
    labels, have marked it: their gradient went to ``main_grad`` directly."""
    if getattr(weight, "grad_added_to_main_grad", False):
        weight.grad_added_to_main_grad = False


def plan(patch: MegatronPatch) -> None:
    """Add what is replaced to a patch."""
    from megatron.core.models.common.language_module.language_module import LanguageModule
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    contract.checked(ColumnParallelLinear, "forward")
    original = contract.checked(LanguageModule, LOSS)
    loss = shown(_loss(original, patch), original, "linear_logprob")
    patch.replace(LanguageModule, LOSS, loss, expected=original)
    for model, (home, name) in MODELS.items():
        with patch.planning(f"{model}.{name}"):
            kind = getattr(importlib.import_module(home), model)
            original = contract.checked(kind, name)
            new = _with_labels(original, patch, functools.partial(_unable, loss, ColumnParallelLinear))
            patch.replace(kind, name, shown(new, original, "linear_logprob"), expected=original)


def _loss(original: Callable[..., Any], patch: MegatronPatch) -> Callable[..., Any]:
    def compute_language_model_loss(self: Any, labels: Tensor, logits: Any) -> Any:
        if not isinstance(logits, Unmultiplied):
            return original(self, labels, logits)
        reason = misplaced(labels=labels)
        if reason is None and labels.t().shape != logits.rows():
            reason = "labels have not the shape of the hidden states' rows"
        if reason is not None:
            patch.left(LOSS, reason)
            return original(self, labels, logits.logits())
        patch.count(patch.calls, LOSS)
        return logits.loss(labels.t()).t().contiguous()

    return compute_language_model_loss


def _with_labels(
    original: Callable[..., Any], patch: MegatronPatch, unable: Callable[[Any], str | None]
) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def with_labels(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("labels") is None or not self.post_process:
            return original(self, *args, **kwargs)
        if reason := unable(self):
            patch.left(LOSS, reason)
            return original(self, *args, **kwargs)
        with _unmultiplied(self.output_layer, patch):
            return original(self, *args, **kwargs)

    return with_labels


@contextlib.contextmanager
def _unmultiplied(layer: Any, patch: MegatronPatch) -> Iterator[None]:
    """Meanwhile the layer returns what it is called with."""
    forward = layer.forward

    def instead(
        input_: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> Any:
        logits = functools.partial(forward, input_, weight, runtime_gather_output)
        weight = layer.weight if weight is None else weight
        gathers = layer.gather_output if runtime_gather_output is None else runtime_gather_output
        reason = "the output layer gathers its logits" if gathers else _unfit(layer, input_, weight)
        group = registered(layer.tp_group)
        if reason is not None or group is None:
            patch.left(LOSS, reason or UNKNOWN)
            return logits()
        bias = layer.bias if layer.skip_bias_add else None
        return Unmultiplied(layer, group, input_, weight, lambda: logits()[0]), bias

    layer.__dict__["forward"] = instead
    try:
        yield
    finally:
        del layer.__dict__["forward"]


def _unfit(layer: Any, hidden: Any, weight: Any) -> str | None:
    if reason := unsuitable(NARROW, hidden_states=hidden, weight=weight):
        return reason
    if hidden.dim() != 3 or weight.dim() != 2 or hidden.shape[-1] != weight.shape[-1]:
        return "the output layer's input is not [L, B, H], or its weight not [V, H]"
    if weight.shape[0] != layer.output_size_per_partition:  # Megatron's own is an error
        return "the weight has not as many rows as the output layer"
    return None if hidden.dtype == weight.dtype else "hidden states and weight have different dtypes"


def _unable(loss: Callable[..., Any], kind: Any, model: Any) -> str | None:
    from megatron.core.config_logger import has_config_logger_enabled

    layer, config = model.output_layer, model.config
    if getattr(type(model), LOSS) is not loss or LOSS in vars(model):
        return "the model has a loss of its own"
    if type(layer) is not kind or "forward" in vars(layer):
        return "the output layer is not Megatron's ColumnParallelLinear as it is"
    if layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks:
        return "the output layer has hooks, which see its logits"
    if layer.explicit_expert_comm or layer.disable_grad_reduce:
        return "the output layer's gradients are not added up over the ranks"
    if config.defer_embedding_wgrad_compute:
        return "the gradient of the head's weight is deferred"
    if getattr(getattr(config, "_cpu_offloading_context", None), "inside_context", False):
        return "activations are offloaded"
    return "logits are logged" if has_config_logger_enabled(config) else None
