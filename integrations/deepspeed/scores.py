"""Logprobs of an engine's tokens, made inside its lm_head's call, where ZeRO has the head's parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlkernel.integrations.deepspeed.engine_head import EngineHead
from rlkernel.integrations.hf.models import causal_lm


class Scores(NamedTuple):
    """[B, L - 1]: entry t is of token t + 1, given those up to t.  fp32; entropy None unless asked for."""

    logprobs: Tensor
    entropy: Tensor | None


def score(
    engine: Any,
    input_ids: Tensor,
    *,
    temperature: float = 1.0,
    return_entropy: bool = False,
    fp32_head: bool = False,
    **model_kwargs: Any,
) -> Scores:
    """Log-probability of each token of ``input_ids`` but the first, without the logits of ``[B, L, V]``.

    Equal to ``rlkernel.logprob(engine(input_ids, **model_kwargs).logits[:, :-1], input_ids[:, 1:])``.

    The engine is called once, as always; its lm_head, where it would have made logits, makes logprobs.  So
    ZeRO-1, 2 and 3, offloaded parameters and tied heads work as they do for logits, and the loss goes to
    ``engine.backward``.

    Args:
        engine: DeepSpeed's, or any wrapper of a transformers causal language model.
        input_ids: [B, L].
        temperature: > 0.
        fp32_head: multiply in fp32, out of autocast.
        model_kwargs: handed on: ``attention_mask``, ``position_ids``, ``use_cache``.

    Raises:
        ValueError: the model has no plain linear lm_head, or calls it otherwise than once with all positions,
            or ``labels`` are among ``model_kwargs``.
    """
    if not isinstance(input_ids, Tensor) or input_ids.dim() != 2 or input_ids.shape[1] < 2:
        got = tuple(input_ids.shape) if isinstance(input_ids, Tensor) else type(input_ids).__name__
        raise ValueError(f"input_ids must be [B, L] with L >= 2, got {got}")
    if not isinstance(fp32_head, bool):
        raise ValueError(f"fp32_head must be True or False, got {fp32_head!r}")
    if model_kwargs.get("labels") is not None:
        raise ValueError("labels must be None, whose loss would need the logits, got a tensor")
    head = EngineHead(causal_lm(engine), temperature, return_entropy, fp32_head)
    targets = input_ids[:, 1:].reshape(-1).to(torch.int64)
    samples, length = input_ids.shape
    with head.scoring((samples, length), lambda hidden: hidden[:, :-1].reshape(targets.numel(), -1), targets):
        output = engine(input_ids, **model_kwargs)
    logprobs, entropy = head.results(output)
    rows = samples, length - 1
    return Scores(logprobs.view(rows), None if entropy is None else entropy.view(rows))
