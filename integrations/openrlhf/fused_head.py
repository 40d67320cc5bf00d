"""The actor's log-probabilities and entropies, out of its hidden states and its lm_head, without logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rlkernel.integrations._replacing import WIDE, misplaced, shown, unfit_temperature, unsuitable
from rlkernel.integrations.deepspeed.engine_head import EngineHead
from rlkernel.integrations.hf.lm_head import HeadError
from rlkernel.integrations.hf.models import causal_lm
from rlkernel.integrations.openrlhf import contract
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch

ACTOR = "Actor.forward"
IGNORED = -100  # a label whose row is not scored
CALLED = ("unpad_and_slice_tensor", "gather_and_pad_tensor", "get_tensor_in_current_ring_attn_rank")

# heads of models that do something to logits that their config does not tell
_strange: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def plan(patch: OpenRlhfPatch) -> None:
    """Add what is replaced to a patch."""
    import openrlhf.models.actor as home
    import openrlhf.models.ring_attn_utils as packing

    with patch.planning(ACTOR):
        for name in CALLED:
            contract.checked(packing, name)
        original = contract.checked(home.Actor, "forward")
        new = shown(_forward(original, patch, packing), original, "linear_logprob")
        patch.replace(home.Actor, "forward", new, expected=original)


class Call(NamedTuple):
    """The arguments of the actor's forward that say what it computes and what it returns."""

    sequences: Tensor
    action_mask: Tensor | None
    attention_mask: Tensor | None
    return_output: bool
    return_logprobs: bool
    ring_attn_group: Any
    return_entropy: bool
    mm_inputs: dict[str, Any]


class Inputs(NamedTuple):
    """What the model is called with, and the label of each of its rows, [B, T] or packed [1, N]."""

    tokens: Tensor
    more: dict[str, Any]
    labels: Tensor
    restored: Callable[[Tensor], Tensor]  # to [B, T]


def _forward(original: Callable[..., Any], patch: OpenRlhfPatch, packing: ModuleType) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        call = Call(**{name: bound.arguments[name] for name in Call._fields})
        if call.action_mask is None and not call.return_logprobs:
            patch.left(ACTOR, "the logits are asked for", quiet=True)
            return original(self, *args, **kwargs)
        head = _unable(self, call) or _head(self, call)
        if isinstance(head, EngineHead):
            try:
                result = _scored(self, call, head, packing)
                patch.count(patch.calls, ACTOR)
                return result
            except HeadError as error:  # as the model is called for the first time
                _strange[head.module] = str(error)
                head = str(error)
        patch.left(ACTOR, head)
        return original(self, *args, **kwargs)

    return forward


def _unable(actor: Any, call: Call) -> str | None:
    """Why OpenRLHF's own is called, also where it tells of an error."""
    sequences, mask = call.sequences, call.action_mask
    if reason := misplaced(sequences=sequences) or unfit_temperature(actor.temperature):
        return reason
    if sequences.dim() != 2 or sequences.shape[1] < 2:
        return "sequences are not [B, T] with T >= 2"
    if call.attention_mask is None and not (getattr(actor, "is_vlm", False) and not actor.packing_samples):
        return "there is no attention_mask"
    if call.return_entropy and not call.return_output:
        return "an entropy is asked for, and no output that would have it"
    if mask is not None:
        if reason := misplaced(action_mask=mask):
            return reason
        if mask.dim() != 2 or len(mask) != len(sequences) or not 0 < mask.shape[1] < sequences.shape[1]:
            return "action_mask is not [B, A] with A < T"
    return None


def _head(actor: Any, call: Call) -> EngineHead | str:
    """The actor's lm_head, or why it is not used."""
    try:
        head = EngineHead(causal_lm(actor.model), actor.temperature, call.return_entropy, False)
    except ValueError as error:
        return str(error)
    return _strange.get(head.module) or unsuitable(WIDE, lm_head=head.module.weight) or head


def _scored(actor: Any, call: Call, head: EngineHead, packing: ModuleType) -> Any:
    given = _packed(call, packing) if actor.packing_samples else _padded(actor, call)
    rows, shape = given.labels.numel(), (given.labels.shape[0], given.labels.shape[1])
    with head.scoring(shape, lambda hidden: hidden.reshape(rows, -1), given.labels.reshape(-1)):
        output = actor.model(given.tokens, **given.more)
    logprobs, entropy = head.results(output)
    output["logits"] = None  # there are none; what stands there is of no use to anybody
    if entropy is not None:
        output.entropy = given.restored(entropy.float().view(shape))[:, :-1]
    found = given.restored(logprobs.float().view(shape))[:, :-1]
    if call.action_mask is not None:
        found = found[:, -call.action_mask.shape[1] :] * call.action_mask.float()
    return (found, output) if call.return_output else found


def _wanted(call: Call) -> Tensor:
    """[B, T]: the places whose next token is scored: those of actions, or all but the last."""
    wanted = torch.zeros_like(call.sequences, dtype=torch.int64)
    if call.action_mask is None or call.return_entropy:  # OpenRLHF gives entropies of prompts, too
        wanted[:, :-1] = 1
    else:
        wanted[:, -1 - call.action_mask.shape[1] : -1] = call.action_mask != 0
    return wanted


def _padded(actor: Any, call: Call) -> Inputs:
    """As OpenRLHF calls a model with samples that are padded."""
    sequences, more = call.sequences, dict(call.mm_inputs)
    if getattr(actor, "is_vlm", False):
        positions = None  # the model's own
        if more:
            config = actor._vlm_config
            kinds = (sequences == config.image_token_id).to(torch.int32)
            if getattr(config, "video_token_id", None) is not None:
                kinds[sequences == config.video_token_id] = 2
            more["mm_token_type_ids" if "image_grid_thw" in more else "token_type_ids"] = kinds
    else:
        assert call.attention_mask is not None
        positions = call.attention_mask.long().cumsum(-1) - 1
        positions.masked_fill_(call.attention_mask == 0, 1)
    labels = torch.roll(sequences, shifts=-1, dims=1).masked_fill(_wanted(call) == 0, IGNORED)
    more = {"attention_mask": call.attention_mask, "position_ids": positions, **more}
    return Inputs(sequences, more, labels, lambda x: x)


def _packed(call: Call, packing: ModuleType) -> Inputs:
    """As OpenRLHF packs samples, and shares them out over the ranks of a ring."""
    group, shape = call.ring_attn_group, call.sequences.shape
    sequences, positions, labels, padding, indices = packing.unpad_and_slice_tensor(
        call.sequences, call.attention_mask, group
    )
    wanted = _wanted(call).reshape(-1)[indices][None]
    if group is not None:
        wanted, _ = packing.get_tensor_in_current_ring_attn_rank(wanted, group, 0)
    labels = labels.masked_fill(wanted == 0, IGNORED)

    def restored(x: Tensor) -> Tensor:
        found: Tensor = packing.gather_and_pad_tensor(x, group, padding, indices, *shape)
        return found

    more = {"attention_mask": None, "position_ids": positions, **call.mm_inputs}
    return Inputs(sequences, more, labels, restored)
