"""TRL's GRPOTrainer and RLOOTrainer on packed batches: a prompt runs through the model once per group.

Each scores tokens in one method, for the loss as well as for the old and the reference policy. Its
model answers with the logprobs of whatever row has a label, so a packed batch goes through the same call:
wrappers, autocast, temperature and the head stay TRL's.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlkernel.integrations import hf
from rlkernel.integrations._trl_contract import (
    METHOD,
    METHOD_PARAMETERS,
    SHUFFLE,
    SHUFFLE_PARAMETERS,
    STEP,
    STEP_PARAMETERS,
    checked,
)
from rlkernel.integrations._trl_models import Models
from rlkernel.integrations._trl_step import Order, Step, group_shuffle, watched_step
from rlkernel.prefix.batch import PrefixBatch

if TYPE_CHECKING:
    from rlkernel.integrations.trl import TrlPatch

UNLABELLED = -100  # transformers' mark
MIN_RATIO = 1.1  # with less to share, a step gains about what packing costs

Scores = tuple[Tensor, "Tensor | None", "Tensor | None"]  # logprobs, entropies, aux loss


NOTHING = "no completion has a token"
DROPOUT = "dropout: completions would share the noise of their prompt"
ATTENTION_DROPOUT = "attention dropout must be 0 in training"
ADVICE = {
    DROPOUT: "a row that samples share can only have one draw: patch_trl(dropout='shared') takes that, "
    "disable_dropout=True in the config draws none",
    ATTENTION_DROPOUT: "model_init_kwargs={'attention_dropout': 0.0} in the config turns it off; "
    "disable_dropout=True does not reach it",
    "tokens a row": "prefix_min_ratio=1 packs it all the same",
}


class PrefixSharing:
    """The part of a ``TrlPatch`` that packs the passes of TRL's trainers and keeps their groups together."""

    def __init__(
        self, patch: TrlPatch, min_ratio: float | None, required: bool = False, shared_dropout: bool = False
    ) -> None:
        import trl.trainer.grpo_trainer as grpo
        import trl.trainer.rloo_trainer as rloo

        self.patch = patch
        self.min_ratio = MIN_RATIO if min_ratio is None else min_ratio
        self.required, self.shared_dropout = required, shared_dropout
        self.tokens: Counter[str] = Counter()
        """Tokens of TRL's padded batches ("padded"), and the rows that ran in their place ("packed")."""
        self.order = Order()
        self.step: Step | None = None
        self.bypassing: weakref.WeakSet[Any] = weakref.WeakSet()  # trainers whose losses do not come here
        self.models = Models()
        self._rows = self._unlabelled = 0

        hf.register_hf()  # raises now if it cannot, not in the first step
        for module, trainer in ((grpo, grpo.GRPOTrainer), (rloo, rloo.RLOOTrainer)):
            method = checked(trainer, METHOD, METHOD_PARAMETERS)
            patch.replace(trainer, METHOD, _packed_method(method, self), expected=method)
            step = checked(trainer, STEP, STEP_PARAMETERS)
            patch.replace(trainer, STEP, watched_step(step, self), expected=step)
            shuffle = checked(module, SHUFFLE, SHUFFLE_PARAMETERS)
            patch.replace(module, SHUFFLE, group_shuffle(shuffle, self), expected=shuffle)

    @property
    def ratio(self) -> float:
        """How many tokens of TRL's padded batches each packed row stood for, 1 before the first."""
        return self.tokens["padded"] / self.tokens["packed"] if self.tokens["packed"] else 1.0

    def left(self, name: str, reason: str) -> None:
        """Count, and warn of or refuse, what runs as in TRL."""
        quiet = reason == NOTHING  # there is nothing to share
        advice = next((advice for part, advice in ADVICE.items() if part in reason), "")
        self.patch.left(name, reason, advice, quiet or self.required)
        if self.required and not quiet:
            advice = advice and f" ({advice})"
            raise RuntimeError(f"{name} must run packed (prefix_sharing='require'), got: {reason}{advice}")

    def refusal(self, trainer: Any, model: Any) -> str | None:
        """Why none of a trainer's batches can run packed through a model, or None."""
        model_inside = trainer.accelerator.unwrap_model(model)
        if reason := _wrapper_reason(trainer, model, model_inside):
            return reason
        if reasons := hf.check_model(model_inside):
            return reasons[0]
        if reason := _model_reason(model_inside, self.shared_dropout):
            return reason
        return self.models.doubt(model)

    @contextlib.contextmanager
    def labels_after(self, n_prefix: int, rows: int) -> Iterator[None]:
        """Inside, the head's first rows have no label. Off GPUs, TRL hands it all rows nevertheless."""
        self._rows, self._unlabelled = rows, n_prefix
        try:
            yield
        finally:
            self._rows = self._unlabelled = 0

    def unlabelled(self, rows: int) -> int:
        """How many of the head's rows have no label, all in front."""
        return self._unlabelled if rows == self._rows else 0


# The passes


def _packed_method(original: Callable[..., Scores], sharing: PrefixSharing) -> Callable[..., Scores]:
    from trl.extras.profiling import profiling_decorator

    patch = sharing.patch
    timed = profiling_decorator(_scores)

    def packed_logps_and_entropies(
        self: Any,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        *rest: Any,
        **multimodal: Any,
    ) -> Scores:
        call = _Call(
            self, model, input_ids, attention_mask, logits_to_keep, batch_size or len(input_ids),
            compute_entropy, compute_aux_loss, rest, multimodal,
        )  # fmt: skip
        if sharing.step is not None and torch.is_grad_enabled():
            sharing.step.scored = True
        micro_batches = call.micro_batches(sharing)
        if not micro_batches:
            return scored(call)
        each = [scored(call.of(samples)) for samples in micro_batches]
        return _joined(each, micro_batches, call.input_ids.device)

    def scored(call: _Call) -> Scores:
        batch = call.batch(sharing)
        if isinstance(batch, PrefixBatch):
            patch.count(patch.calls, METHOD)
            sharing.tokens.update(padded=call.input_ids.numel(), packed=batch.total)
            return timed(call.trainer, call, batch, sharing)
        sharing.left(METHOD, batch)
        return original(
            call.trainer, call.model, call.input_ids, call.attention_mask, call.logits_to_keep, call.chunk,
            call.entropy, call.aux_loss, *call.rest, **call.multimodal,
        )  # fmt: skip

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
    rest: tuple[Any, ...] = ()
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
        if n != steps * self.chunk or _is_reference(self.unwrapped) or self.refusal(sharing):
            return []
        if not policy.training:  # an evaluation, whose samples stay as they are
            return [torch.arange(n)]
        order = sharing.order.plan(self.input_ids[:, : -self.logits_to_keep])
        return list(order.split(self.chunk))

    def of(self, samples: Tensor) -> _Call:
        """The call of some samples, all at once, on the rows that their loss will run."""
        rows = samples.to(self.input_ids.device)
        ids, mask = self.input_ids[rows], self.attention_mask[rows]
        return replace(self, input_ids=ids, attention_mask=mask, chunk=len(samples), for_loss=True)

    def refusal(self, sharing: PrefixSharing) -> str | None:
        given = sorted(name for name, value in self.multimodal.items() if value is not None)
        if given or any(value is not None for value in self.rest):
            return f"{given[0] if given else 'a further argument'} is given"
        return sharing.refusal(self.trainer, self.model)

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
        if not _is_rotary(self.unwrapped) and not bool(prompt_mask.all()):
            return "positions are not rotary, and TRL counts the padding of prompts"
        if not bool(prompt_mask.all()) and (kind := _norm_after_rotary(self.unwrapped)):
            return (
                f"{kind} normalises after its rotary positions, which makes them absolute, and TRL counts "
                "the padding of prompts: its values are not those of the samples alone"
            )
        try:
            batch = self._pack()
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
            parts = [batch.select(part.tolist()) for part in torch.arange(len(batch)).split(self.chunk)]
        return parts

    def _pack(self) -> PrefixBatch:
        prompt_ids, ids = self.input_ids.tensor_split([-self.logits_to_keep], 1)
        prompt_mask, mask = self.attention_mask.tensor_split([-self.logits_to_keep], 1)
        return PrefixBatch.from_padded(prompt_ids, prompt_mask, ids, mask)


def _wrapper_reason(trainer: Any, model: Any, inside: Any) -> str | None:
    if getattr(trainer, "use_transformers_continuous_batching", False):
        return "continuous batching runs on no registered attention, and the model would be on one"
    if getattr(trainer, "_is_vlm", False):
        return "a vision-language model makes positions of its own"
    if isinstance(model, torch.nn.DataParallel):
        return "DataParallel splits the batch by samples"
    accelerator = trainer.accelerator
    kind = str(getattr(accelerator.distributed_type, "value", ""))
    if kind in ("MEGATRON_LM", "XLA"):
        return f"accelerate runs the model through {kind}"
    parallel = getattr(accelerator, "parallelism_config", None)
    if getattr(parallel, "cp_enabled", False) or getattr(parallel, "sp_enabled", False):
        return "context parallelism splits the tokens of a sequence over ranks"
    if hasattr(inside, "_orig_mod") or inside._compiled_call_impl is not None:
        return "torch.compile would compile anew for every batch"
    return None


def _model_reason(model: Any, shared_dropout: bool) -> str | None:
    configs = getattr(model, "peft_config", None)
    if isinstance(configs, dict) and any(getattr(c, "is_prompt_learning", False) for c in configs.values()):
        return "PEFT puts virtual tokens in front of each prompt"
    for path, module in model.named_modules():
        if not module.training:
            continue
        if hasattr(module, "neftune_noise_alpha"):
            return "NEFTune: its noise grows smaller with the length of a row, and a packed row is longer"
        noise = _noise(path, module)
        if noise and not shared_dropout:
            return DROPOUT
        if any("att" in name for name in noise):
            return f"{ATTENTION_DROPOUT}, got that of {path}"
    return None


def _noise(path: str, module: Any) -> list[str]:
    """The names by which a module draws noise."""
    if isinstance(module, torch.nn.modules.dropout._DropoutNd):
        return [path.rpartition(".")[2]] if module.p > 0 else []
    values = {name: x for name, x in vars(module).items() if "dropout" in name or "jitter" in name}
    kind = "attention " if "attention" in type(module).__name__.lower() else ""
    return [kind + name for name, x in values.items() if isinstance(x, float) and x > 0]


def _is_reference(model: Any) -> bool:
    """Whether a PEFT model stands for the reference now: its adapters are off, or TRL's copy of one is on."""
    if getattr(model, "peft_config", None) is None:
        return False
    off = any(getattr(module, "_disable_adapters", False) for module in model.modules())
    return off or "ref" in model.active_adapters


def _is_rotary(model: Any) -> bool:
    return any("rotary" in type(module).__name__.lower() for module in model.modules())


def _norm_after_rotary(model: Any) -> str | None:
    """The attention whose queries and keys are weighted after they were turned, as in HunYuan's models."""
    names = (type(m).__name__ for m in model.modules() if hasattr(m, "query_layernorm"))
    return next((name for name in names if name.startswith("HunYuan")), None)


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
        zeros = torch.zeros(len(part), part.width, device=part.device)
        return zeros, zeros if call.entropy else None, None
    rows, labels, keep = part, part.labels, None
    inputs: dict[str, Any] = {}
    if call.aux_loss or (call.for_loss and call.trainer.aux_loss_enabled):
        # counts the last tokens, which predict nothing, and a prompt for each of its samples
        rows, keep = part.with_last_tokens()
        labels = rows.labels.masked_fill(~keep, UNLABELLED)
    if call.aux_loss:
        inputs = {"attention_mask": rows.token_counts()[None, None, None], "output_router_logits": True}
    elif hasattr(call.unwrapped.config.get_text_config(), "output_router_logits"):
        # a config that asks for them would make TRL compute the aux loss
        inputs = {"output_router_logits": False}
    shifted = labels.new_full((1, rows.total), UNLABELLED)
    shifted[0, rows.n_prefix :] = labels
    with (
        call.trainer.accelerator.autocast(),
        sharing.labels_after(rows.n_prefix, rows.total),
        hf.every_layer(call.unwrapped),
    ):
        outputs = call.model(**(rows.model_kwargs() | inputs), shift_labels=shifted, fused_lm_head=True)

    def unpacked(values: Tensor) -> Tensor:
        values = rows.completion_rows(values)
        return part.unpack(values if keep is None else values[keep])

    entropies = unpacked(outputs.entropy) if call.entropy else None
    return unpacked(outputs.log_probs), entropies, outputs.aux_loss if call.aux_loss else None
