"""The attention function that transformers calls, and a watch over the layers that call it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from rlkernel.integrations.hf.invariant import autocast, invariant_attention, takes
from rlkernel.integrations.hf.models import as_written, causal_lm, family
from rlkernel.integrations.hf.ordinary import default_attention, ordinary_attention
from rlkernel.integrations.hf.packed_call import check_call
from rlkernel.ops.attention import attention
from rlkernel.ops.prefix_shared_attention import prefix_shared_attention
from rlkernel.prefix.batch import PrefixBatch
from rlkernel.runtime import invariance

_calls: ContextVar[list[nn.Module] | None] = ContextVar("rlkernel_attention_calls", default=None)


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    ordinary: str | None,
    functions: dict[str, Any],
    prefix_batch: PrefixBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if prefix_batch is None:
        ordinary = ordinary or default_attention(type(module.config))
        if takes(module, ordinary, query, args, kwargs):
            return invariant_attention(module, query, key, value, attention_mask, **kwargs)
        run = functions.get(ordinary)
        return ordinary_attention(
            module, query, key, value, attention_mask, *args, name=ordinary, run=run, **kwargs
        )
    check_call(module, query, key, attention_mask, prefix_batch, args, kwargs)
    calls = _calls.get()
    if calls is not None and not torch.compiler.is_compiling():
        calls.append(module)
    q, k, v = (x[0].transpose(0, 1) for x in autocast(query, key, value))
    # in batch_invariant a row has the bits that it has in a padded batch and in an engine
    attend = attention if invariance.is_on() else prefix_shared_attention
    out = attend(
        q,
        k,
        v,
        batch=prefix_batch,
        scale=query.shape[-1] ** -0.5 if (scale := kwargs.get("scaling")) is None else scale,
        softcap=kwargs.get("softcap"),
        window=kwargs.get("sliding_window"),
        sinks=kwargs.get("s_aux"),
    )
    assert isinstance(out, Tensor)
    return out[None], None


@contextlib.contextmanager
def every_layer(model: nn.Module) -> Iterator[None]:
    """Raises at the end of the block unless each layer of the model has run packed in it, once.

    What is compiled runs as it was written inside: what compiled layers do cannot be watched.

    Raises:
        ValueError: some attention went past transformers' AttentionInterface, or the model did not run once.
    """
    calls: list[nn.Module] = []
    token = _calls.set(calls)
    try:
        with as_written(model):
            yield
    finally:
        _calls.reset(token)
    found = causal_lm(model)
    wanted = found.config.get_text_config().num_hidden_layers
    if len(calls) != wanted:
        raise ValueError(
            f"{family(found).__name__}: each of its {wanted} layers must call the registered attention once, "
            f"got {len(calls)} calls: its attention does not all go through transformers' AttentionInterface"
        )
