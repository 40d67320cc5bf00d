"""Logprobs of a packed batch from a Hugging Face model, whose lm_head never makes the logits.

The model is called as it is, through whatever wraps it (DDP, PEFT, accelerate's autocast), and only its
lm_head computes something else for the time of the call: logprobs of the rows that have a label. It answers
with a few probe values in place of logits, and what the model makes of those shows whether it does to logits
what ``linear_logprob`` was told.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, cast

import torch
from torch import Tensor, nn

from rlkernel.integrations.hf.attention import every_layer
from rlkernel.integrations.hf.lm_head import LmHead, zero_with_graph
from rlkernel.integrations.hf.models import causal_lm, check_model, family, is_sharded
from rlkernel.integrations.hf.registration import is_registered
from rlkernel.prefix.batch import PrefixBatch

if TYPE_CHECKING:
    from rlkernel.calls.logprob import Entropy

    class PackedLogprobs(NamedTuple, Generic[Entropy]):
        logprobs: Tensor
        entropy: Entropy
        aux_loss: Tensor | None

else:

    class PackedLogprobs(NamedTuple):
        logprobs: Tensor  # [M], one a label of the batch
        entropy: Tensor | None  # [M]
        aux_loss: Tensor | None  # the load-balancing loss of a mixture of experts


def packed_logprobs(
    model: nn.Module,
    batch: PrefixBatch,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    return_aux_loss: bool = False,
    max_tokens: int | None = None,
    passes: int | None = None,
    fp32_head: bool = False,
) -> PackedLogprobs:
    """Logprobs of all labels of a packed batch, each shared token computed once through the whole model.

    Equal to, over the samples run alone, in the order of ``batch.labels``,

        log_softmax(model(prompt + completion).logits / temperature)[completion]

    and so are the gradients.  ``batch.unpack(logprobs)`` gives [N, L].

    The model must be on the implementation that ``register_hf`` registered
    (``model.set_attn_implementation("rlkernel")``), and stays on it: gradient checkpointing looks it up again
    in backward.  The call goes through wrappers (DDP, FSDP, DeepSpeed, PEFT) and runs in the mode that the
    model is in, under the caller's ``no_grad`` and autocast.

    Args:
        model: a causal language model of transformers, alone or in DDP, FSDP, DeepSpeed or PEFT.
        batch: on the model's device.
        temperature: of the logprobs and the entropy.
        return_entropy: also return the entropy of each label's distribution.
        return_aux_loss: also return the load-balancing loss of a mixture of experts: that of the samples
            padded into one batch, every token counted as often as samples hold it.  Costs one row a sample,
            for the last tokens, which predict nothing but are routed.
        max_tokens: run ``batch.split(max_tokens)``, one part after another.  Without gradients the memory is
            that of the largest part.
        passes: call the model this many times, with one row where there is nothing left to run: the ranks of
            a model wait for each other, and must call it equally often.  None means once for each part that
            has rows, and at least once where the model is sharded.
        fp32_head: compute the lm_head in fp32, outside autocast.

    Returns:
        PackedLogprobs: ``logprobs`` [M], ``entropy`` [M] or None, fp32 (fp64 for fp64 models), and
        ``aux_loss`` or None.

    Raises:
        ValueError: the model is not on the implementation, or cannot run packed exactly; says why.  Or there
            are more parts than ``passes``, or ``max_tokens`` without it for a sharded model.
    """
    found = causal_lm(model)
    if not isinstance(batch, PrefixBatch):
        raise ValueError(f"batch must be a PrefixBatch, got {type(batch).__name__}")
    if reasons := check_model(model, batch):
        raise ValueError("model must run packed batches exactly: " + "; ".join(reasons))
    implementation = found.config.get_text_config()._attn_implementation
    if not is_registered(implementation):
        raise ValueError(
            "model must be on packed attention, rlkernel.register_hf() and "
            f"model.set_attn_implementation('rlkernel'), got {implementation!r}"
        )
    sharded = is_sharded(model)
    if sharded and max_tokens is not None and passes is None:
        raise ValueError("passes must be given with max_tokens for a sharded model, the same on every rank")
    head = LmHead(found, temperature, return_entropy, fp32_head)
    keep = None
    if return_aux_loss:
        _load_balancing_loss(family(found).__module__)  # or the model would fail in the middle
        batch, keep = batch.with_last_tokens()
    parts = [batch] if max_tokens is None else batch.split(max_tokens)
    parts = [part for part in parts if part.total]
    passes = max(len(parts), int(sharded)) if passes is None else passes
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < len(parts):
        raise ValueError(
            f"passes must be an integer >= {len(parts)}, the parts that have rows, got {passes!r}"
        )
    done = [_run(model, head, part, return_aux_loss) for part in parts]
    idle = [_run(model, head, batch.one_row(), False).logprobs for _ in range(passes - len(parts))]
    if done:
        values = [(part.logprobs, part.entropy) for part in done]
        logprobs, entropy = values[0] if len(parts) == 1 else _gather(values, _places(batch, parts))
    else:  # has a gradient: of nothing
        logprobs = idle[0][:0] if idle else head.module.weight.flatten()[:0].to(head.dtype)
        entropy = logprobs if return_entropy else None
    if keep is not None:
        logprobs, entropy = logprobs[keep], None if entropy is None else entropy[keep]
    aux_loss = None
    if return_aux_loss:
        aux_loss = _aux_loss(found, [part.router for part in done]) if done else logprobs.sum()
    for unused in idle:  # each call is to have a backward, as on the other ranks, whatever the loss takes
        logprobs = logprobs + zero_with_graph(unused)
        entropy = None if entropy is None else entropy + zero_with_graph(unused)
        aux_loss = None if aux_loss is None else aux_loss + zero_with_graph(unused)
    return PackedLogprobs(logprobs, entropy, aux_loss)


class _Part(NamedTuple):
    logprobs: Tensor
    entropy: Tensor | None
    router: tuple[tuple[Tensor, ...], Tensor] | None  # logits of each layer [T, E], weight of each row [T]


def _run(model: nn.Module, head: LmHead, batch: PrefixBatch, with_router: bool) -> _Part:
    inputs, uses = batch.model_kwargs(), None
    if getattr(head.config, "output_router_logits", None):  # asked for by the config; not always by the call
        inputs["output_router_logits"] = False
    if with_router:
        uses = batch.token_counts()
        # 4-d, so transformers passes it on; attention ignores it, the model's own loss takes it as weights
        inputs |= {"attention_mask": uses[None, None, None], "output_router_logits": True}
    rows = batch.completion_rows
    with every_layer(model), head.scoring((1, batch.total), rows, batch.labels):
        output = model(**inputs)
    logprobs, entropy = head.results(output)
    if uses is None:
        return _Part(logprobs, entropy, None)
    logits = getattr(output, "router_logits", None)
    if not isinstance(logits, tuple) or not logits:
        raise ValueError(f"{head.name}: it must return router_logits for return_aux_loss, got {logits!r}")
    if logprobs.requires_grad and not logits[0].requires_grad:
        raise ValueError(
            f"{head.name}: router_logits have no gradient, reentrant gradient checkpointing cuts it off; "
            "gradient_checkpointing_kwargs must be {'use_reentrant': False}"
        )
    return _Part(logprobs, entropy, (logits, uses))


# mixtures of experts


def _aux_loss(model: Any, routers: list[Any]) -> Tensor:
    logits = tuple(torch.cat(layer) for layer in zip(*(found for found, _ in routers), strict=True))
    weights = torch.cat([weight for _, weight in routers])
    config = model.config.get_text_config()
    experts = getattr(config, "num_experts", None) or config.num_local_experts
    loss = _load_balancing_loss(family(model).__module__)
    return cast(Tensor, loss(logits, experts, config.num_experts_per_tok, weights[None, None, None]))


@functools.cache
def _load_balancing_loss(file: str) -> Any:
    """transformers' own, which takes an attention mask, here a weight for each row."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss = getattr(sys.modules[file], "load_balancing_loss_func", load_balancing_loss_func)
    try:
        loss(
            (torch.zeros(2, 4, dtype=torch.float32, device="cpu"),),
            4,
            2,
            torch.ones(1, 1, 1, 2, dtype=torch.float32, device="cpu"),
        )
    except ValueError as error:
        import transformers

        raise ValueError(
            "return_aux_loss needs a transformers whose load-balancing loss takes masks of any shape, got "
            f"{transformers.__version__}"
        ) from error
    return loss


# parts


def _places(batch: PrefixBatch, parts: list[PrefixBatch]) -> list[Tensor]:
    """For each part, which label of the batch each of its labels is."""
    number = torch.arange(1, batch.labels.numel() + 1, device=batch.device)
    whole = batch.unpack(number)  # [N, L], 0 without a label
    row = {sample: i for i, sample in enumerate(batch.samples.tolist())}
    places = []
    for part in parts:
        rows = torch.tensor([row[s] for s in part.samples.tolist()], device=batch.device)
        mine = part.unpack(torch.arange(1, part.labels.numel() + 1, device=batch.device))
        has = mine > 0
        place = torch.zeros(part.labels.numel(), dtype=torch.int64, device=batch.device)
        place[mine[has] - 1] = whole[rows][has] - 1
        places.append(place)
    return places


def _gather(values: list[tuple[Tensor, Tensor | None]], places: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """One value a label; where two parts have computed one, that of the last of them."""
    place = torch.cat(places)
    source = torch.zeros(int(place.max()) + 1, dtype=torch.int64, device=place.device)
    source[place] = torch.arange(place.numel(), device=place.device)
    logprobs = torch.cat([x for x, _ in values])[source]
    entropies = [x for _, x in values if x is not None]
    return logprobs, torch.cat(entropies)[source] if entropies else None
