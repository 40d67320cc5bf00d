"""TRL's GRPOTrainer and RLOOTrainer on packed batches: a prompt runs through the model once per group.

Each scores tokens in one method, for the loss as well as for the old and the reference policy. Its
model answers with the logprobs of whatever row has a label, so a packed batch goes through the same call:
wrappers, autocast, temperature and the head stay TRL's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations import hf
from rlkernel.integrations._replacing import unfit_temperature
from rlkernel.integrations.deepspeed.engine_head import EngineHead
from rlkernel.integrations.hf.lm_head import LmHead, narrow_head
from rlkernel.integrations.trl.contract import METHOD, counts_padding
from rlkernel.integrations.trl.prefix_sharing import PrefixSharing
from rlkernel.integrations.trl.reasons import NOTHING, is_reference, is_rotary, norm_after_rotary
from rlkernel.prefix.batch import PrefixBatch

UNLABELLED = -100  # transformers' mark

Scores = tuple[Tensor, "Tensor | None", "Tensor | None"]  # logprobs, entropies, aux loss


def packed_method(
    original: Callable[..., Scores], sharing: PrefixSharing, fused: bool = True
) -> Callable[..., Any]:
    """``original`` on packed batches, of a TRL with the fused head or, if not ``fused``, an earlier one."""
    from trl.extras.profiling import profiling_decorator

    patch = sharing.patch
    timed = profiling_decorator(_scores)
    signature = inspect.signature(original)
    has_aux_loss = "compute_aux_loss" in signature.parameters  # the earliest method has none, nor gives one

    def packed_logps_and_entropies(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = dict(signature.bind(self, *args, **kwargs).arguments)
        del given["self"]
        call = _Call(
            trainer=self,
            aux_loss=given.pop("compute_aux_loss", False),
            entropy=given.pop("compute_entropy", False),
            chunk=given.pop("batch_size", None) or len(given["input_ids"]),
            fused=fused,
            **{name: given.pop(name) for name in ("model", "input_ids", "attention_mask", "logits_to_keep")},
            multimodal=given,
        )
        if sharing.step is not None and torch.is_grad_enabled():
            sharing.step.scored = True
        micro_batches = call.micro_batches(sharing)
        if not micro_batches:
            return as_asked(scored(call))
        each = [scored(call.of(samples)) for samples in micro_batches]
        return as_asked(_joined(each, micro_batches, call.input_ids.device))

    def as_asked(scores: Scores) -> Any:
        return scores if has_aux_loss else scores[:2]

    def scored(call: _Call) -> Scores:
        batch = call.batch(sharing)
        if isinstance(batch, PrefixBatch):
            patch.count(patch.calls, METHOD)
            sharing.tokens.update(padded=call.input_ids.numel(), packed=batch.total)
            return timed(call.trainer, call, batch, sharing)
        sharing.left(METHOD, batch)
        options = {"compute_aux_loss": call.aux_loss} if has_aux_loss else {}
        logps, entropies, *more = original(
            call.trainer, call.model, call.input_ids, call.attention_mask, call.logits_to_keep, call.chunk,
            call.entropy, **options, **call.multimodal,
        )  # fmt: skip
        return logps, entropies, more[0] if more else None

    packed_logps_and_entropies.__qualname__ = packed_logps_and_entropies.__name__
    return packed_logps_and_entropies


@dataclass(frozen=True)
class _Call:
    """The arguments of one pass, as a trainer gives them."""

    trainer: Any
    model: Any
    input_ids: Tensor  # [N, P + L], prompts padded on the left and completions on the right
    attention_mask: Tensor
    logits_to_keep: int  # L
    chunk: int  # samples that TRL would run at once
    entropy: bool
    aux_loss: bool
    fused: bool  # whether this TRL has the fused head
    multimodal: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    for_loss: bool = False  # the very rows of the loss to come; nothing of the trainer refuses that

    @functools.cached_property
    def unwrapped(self) -> Any:
        return self.trainer.accelerator.unwrap_model(self.model)

    def micro_batches(self, sharing: PrefixSharing) -> list[Tensor]:
        """The samples of each loss to come, where these are its old logprobs; else nothing.

        A row's bits depend on what runs beside it, so both have to come from the same packs.
        """
        trainer, n = self.trainer, len(self.input_ids)
        policy = getattr(trainer, "model", None)
        if torch.is_grad_enabled() or self.aux_loss or policy is None or self.model is not policy:
            return []
        steps = trainer.args.steps_per_generation if policy.training else 1
        if n != steps * self.chunk or is_reference(self.unwrapped) or self.refusal(sharing):
            return []
        if not policy.training:  # an evaluation, whose samples stay as they are
            return [torch.arange(n, device="cpu")]
        order = sharing.order.plan(self.input_ids[:, : -self.logits_to_keep])
        return list(order.split(self.chunk))

    def of(self, samples: Tensor) -> _Call:
        """The call of some samples, all at once, on the rows that their loss will run."""
        rows = samples.to(self.input_ids.device)
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        return replace(self, input_ids=ids, attention_mask=mask, chunk=len(samples), for_loss=True)

    def refusal(self, sharing: PrefixSharing) -> str | None:
        given = sorted(name for name, value in self.multimodal.items() if value is not None)
        if given:
            return f"{given[0]} is given"
        model = self.trainer.model_wrapped if self.is_old else self.model
        if reason := sharing.refusal(self.trainer, model):
            return reason
        if self.fused:
            return None
        if counts_padding(self.trainer):
            return "the loss of LUSPO has the padding behind completions, which packed rows do not hold"
        return self.head_reason()

    def head(self) -> LmHead:
        """The model's lm_head, which scores the rows of a TRL without the fused head."""
        return narrow_head(self.model, self.trainer.temperature, self.entropy, EngineHead)

    def head_reason(self) -> str | None:
        try:
            self.head()
        except ValueError as error:
            return str(error)
        return unfit_temperature(self.trainer.temperature)

    @property
    def is_old(self) -> bool:
        """Whether these may be old logprobs, which go the way of their loss: its model may be wrapped."""
        policy = getattr(self.trainer, "model", None)
        if torch.is_grad_enabled() or policy is None or self.model is not policy:
            return False
        return policy.training and not is_reference(self.unwrapped)

    def batch(self, sharing: PrefixSharing) -> PrefixBatch | str:
        """The samples packed, or why TRL runs them."""
        if not self.for_loss and (reason := self.refusal(sharing)):
            return reason
        if self.sharded and torch.is_grad_enabled() and self.passes > 1:
            return "the model is sharded, and its backward passes must be as many as on other ranks"
        if self.aux_loss and self.chunk < len(self.input_ids):
            return "the aux loss of several chunks"
        prompt_mask = self.attention_mask[:, : -self.logits_to_keep] != 0
        if not bool(prompt_mask[:, -1:].any(1).all()):  # TRL predicts from whatever stands there
            return "a prompt is empty, or padded on the right"
        if not is_rotary(self.unwrapped) and not bool(prompt_mask.all()):
            return "positions are not rotary, and TRL counts the padding of prompts"
        if not bool(prompt_mask.all()) and (kind := norm_after_rotary(self.unwrapped)):
            return (
                f"{kind} normalises after its rotary positions, which makes them absolute, and TRL counts "
                "the padding of prompts: its values are not those of the samples alone"
            )
        (prompts, ids), (_, mask) = (
            x.tensor_split([-self.logits_to_keep], 1) for x in (self.input_ids, self.attention_mask)
        )
        try:
            batch = PrefixBatch.from_padded(prompts, prompt_mask, ids, mask)
        except ValueError:  # of the shapes that trainers make, only a gap can be refused
            return "attention_mask has a hole"
        if not batch.total:
            return NOTHING
        if self.input_ids.numel() < sharing.min_ratio * batch.total:
            return f"fewer than {sharing.min_ratio} tokens a row"
        if reasons := hf.check_model(self.unwrapped, batch):
            return reasons[0]
        return batch

    @functools.cached_property
    def sharded(self) -> bool:
        """Whether ranks gather their shards in each pass: all make as many passes as TRL would."""
        return hf.is_sharded(self.model)

    @property
    def passes(self) -> int:
        return -(-len(self.input_ids) // self.chunk)

    def parts(self, batch: PrefixBatch) -> list[PrefixBatch]:
        """What to run one after another. TRL runs ``chunk`` padded samples at once; as many rows take no more
        memory, and hold more samples."""
        limit = self.chunk * self.input_ids.shape[1]
        parts = [batch] if batch.total <= limit else batch.split(limit)
        if self.sharded and _calls(parts) > self.passes:  # groups fill parts badly; TRL's samples fit always
            parts = [
                batch.select(part.tolist())
                for part in torch.arange(len(batch), device="cpu").split(self.chunk)
            ]
        return parts


def _scores(self: Any, call: _Call, batch: PrefixBatch, sharing: PrefixSharing) -> Scores:
    sharing.models.attach(call.unwrapped)
    parts = call.parts(batch)
    scored = [_run(call, part, sharing) for part in parts]
    for _ in range(call.passes - _calls(parts) if call.sharded else 0):
        _run(call, batch.one_row(), sharing)
    return _joined(scored, [part.samples for part in parts], call.input_ids.device)


def _joined(scored: list[Scores], samples: list[Tensor], device: torch.device) -> Scores:
    """Scores of some samples each, in the order of the samples."""
    place = torch.cat(samples).argsort().to(device)
    logps = torch.cat([s[0] for s in scored])[place]
    entropies = [s[1] for s in scored if s[1] is not None]
    return logps, torch.cat(entropies)[place] if entropies else None, scored[0][2]


def _calls(parts: list[PrefixBatch]) -> int:
    return sum(part.total > 0 for part in parts)


def _run(call: _Call, part: PrefixBatch, sharing: PrefixSharing) -> Scores:
    """One packed pass, and its values where TRL has them: [samples, L], 0 behind each completion."""
    if not part.total:
        zeros = torch.zeros(len(part), part.width, dtype=torch.float32, device=part.device)
        return zeros, zeros if call.entropy else None, None
    rows, labels, keep = part, part.labels, None
    inputs: dict[str, Any] = {}
    if call.aux_loss or (call.for_loss and getattr(call.trainer, "aux_loss_enabled", False)):
        # counts the last tokens, which predict nothing, and a prompt for each of its samples
        rows, keep = part.with_last_tokens()
        labels = rows.labels.masked_fill(~keep, UNLABELLED)
    if call.aux_loss:
        inputs = {"attention_mask": rows.token_counts()[None, None, None], "output_router_logits": True}
    elif hasattr(call.unwrapped.config.get_text_config(), "output_router_logits"):
        # a config that asks for them would make TRL compute the aux loss
        inputs = {"output_router_logits": False}
    with call.trainer.accelerator.autocast(), hf.every_layer(call.unwrapped):
        if call.fused:
            outputs, logprobs, entropy = _scored_by_trl(call, rows, labels, inputs, sharing)
        else:
            outputs, logprobs, entropy = _scored_by_us(call, rows, labels, inputs)

    def unpacked(values: Tensor) -> Tensor:
        return part.unpack(values if keep is None else values[keep])

    entropies = unpacked(entropy) if call.entropy and entropy is not None else None
    return unpacked(logprobs), entropies, outputs.aux_loss if call.aux_loss else None


def _scored_by_trl(
    call: _Call, rows: PrefixBatch, labels: Tensor, inputs: dict[str, Any], sharing: PrefixSharing
) -> tuple[Any, Tensor, Tensor | None]:
    shifted = labels.new_full((1, rows.total), UNLABELLED)
    shifted[0, rows.n_prefix :] = labels
    with sharing.labels_after(rows.n_prefix, rows.total):
        outputs = call.model(**(rows.model_kwargs() | inputs), shift_labels=shifted, fused_lm_head=True)
    entropy = rows.completion_rows(outputs.entropy) if call.entropy else None
    return outputs, rows.completion_rows(outputs.log_probs), entropy


def _scored_by_us(
    call: _Call, rows: PrefixBatch, labels: Tensor, inputs: dict[str, Any]
) -> tuple[Any, Tensor, Tensor | None]:
    head = call.head()
    with head.scoring((1, rows.total), lambda hidden: rows.completion_rows(hidden[0]), labels):
        outputs = call.model(**(rows.model_kwargs() | inputs))
    logprobs, entropy = head.results(outputs)
    bonus = getattr(call.trainer, "_entropy_bonus_enabled", False)
    return outputs, logprobs, entropy if entropy is None or bonus else entropy.detach()
