"""The lm_head of verl's fused kernels: logprobs and entropies of hidden states, without logits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations._replacing import NARROW, misplaced, shown, unfit_temperature, unsuitable
from rlkernel.integrations._shards import UNKNOWN, equal_shard, registered, targets_in
from rlkernel.integrations.verl import contract
from rlkernel.integrations.verl.verl_patch import VerlPatch
from rlkernel.ops.linear_logprob import linear_logprob

MODULE = "FusedLinearForPPO"
TRITON = "linear_cross_entropy"
LIGER = "_LIGER_FUSED_LINEAR_SCALED_CROSS_ENTROPY"


def plan(patch: VerlPatch) -> None:
    """Add what is replaced to a patch."""
    import verl.utils.experimental.torch_functional as torch_head
    import verl.utils.kernel.linear_cross_entropy as triton_head

    with patch.planning(MODULE):
        kind = vars(torch_head).get(MODULE)
        if not isinstance(kind, type):
            raise PatchError(f"{torch_head.__name__}.{MODULE} must be a class, got {kind!r}")
        contract.checked(kind, "__init__")
        forward = contract.checked(kind, "forward")
        new = shown(_forward(forward, patch, torch_head), forward, "linear_logprob")
        patch.replace(kind, "forward", new, expected=forward)
    with patch.planning(TRITON):
        function = contract.checked(triton_head, "LinearCrossEntropy")
        original = vars(triton_head).get(TRITON)
        if getattr(original, "__self__", None) is not function:
            raise PatchError(f"{triton_head.__name__}.{TRITON} must be LinearCrossEntropy.apply")
        patch.replace_everywhere("verl", TRITON, _triton(original, patch), expected=original)


def _forward(original: Callable[..., Any], patch: VerlPatch, home: ModuleType) -> Callable[..., Any]:
    def forward(
        self: Any,
        hidden_states: Tensor,
        vocab_weights: Tensor,
        input_ids: Tensor,
        temperature: float = 1.0,
    ) -> tuple[Tensor, Tensor]:
        reason = _unable(hidden_states, vocab_weights, input_ids, temperature)
        if self.impl_backend != "torch" and vars(home).get(LIGER) is not None:
            reason = f"the backend {self.impl_backend!r} is asked for by name"
        if reason is None and hidden_states.dim() not in (2, 3):
            reason = "hidden_states are neither [N, H] nor [B, L, H]"
        if reason is not None:
            patch.left(MODULE, reason)
            return original(self, hidden_states, vocab_weights, input_ids, temperature)
        patch.count(patch.calls, MODULE)
        logprobs, entropy = _scored(hidden_states, vocab_weights, input_ids, temperature)
        return logprobs, entropy.to(hidden_states.dtype)

    return forward


def _triton(original: Callable[..., Any], patch: VerlPatch) -> Callable[..., Any]:
    # a method of autograd functions, which takes no keywords
    def linear_cross_entropy(
        hidden: Tensor, weight: Tensor, labels: Tensor, *rest: Any
    ) -> tuple[Tensor, Tensor]:
        temperature, reduction, group = [*rest, *DEFAULTS[len(rest) :]]
        # Megatron's hidden states are [L, 1, H] where its labels are [1, L]
        rows, ids = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
        reason = _unable(rows, weight, ids, temperature)
        shard: dict[str, Any] = {}
        if not isinstance(reduction, str) or reduction.lower() != "none":
            reason = "the reduction is not 'none'"
        elif reason is None and group is not None and torch.distributed.get_world_size(group) > 1:
            if (ranks := registered(group)) is None:
                reason = UNKNOWN
            else:
                shard, ids = equal_shard(ranks, len(weight)), targets_in(ranks, len(weight), ids)
                if getattr(hidden.grad_fn, "tensor_parallel_output_grad", False):
                    rows = _OfTheFirst.apply(rows, ranks.rank())
        if reason is not None:
            patch.left(TRITON, reason)
            return original(hidden, weight, labels, *rest)
        patch.count(patch.calls, TRITON)
        return _scored(rows, weight, ids, temperature, **shard)

    functools.update_wrapper(linear_cross_entropy, original)
    linear_cross_entropy.__module__, linear_cross_entropy.__qualname__ = "rlkernel", "linear_logprob"
    return linear_cross_entropy


DEFAULTS: tuple[Any, ...] = (1.0, "none", None)  # of temperature, reduction and group


class _OfTheFirst(torch.autograd.Function):
    """Hidden states that Megatron gathered from sequence-parallel ranks, whose gradients it adds up over
    them: each has the whole gradient, so that of the first counts."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad if ctx.rank == 0 else torch.zeros_like(grad), None


def _scored(
    hidden: Tensor, weight: Tensor, ids: Tensor, temperature: float, **shard: Any
) -> tuple[Tensor, Tensor]:
    out = linear_logprob(hidden, weight, ids, temperature=temperature, return_entropy=True, **shard)
    return out.logprobs, out.entropy


def _unable(hidden: Any, weight: Any, ids: Any, temperature: Any) -> str | None:
    if reason := unsuitable(NARROW, hidden_states=hidden, weight=weight) or misplaced(input_ids=ids):
        return reason
    if reason := unfit_temperature(temperature):
        return reason
    if hidden.dtype != weight.dtype and not torch.is_autocast_enabled(hidden.device.type):
        return "hidden states and weight have different dtypes"
    if hidden.shape[:-1] != ids.shape:
        return "input_ids have not the shape of the hidden states' rows"
    return None
