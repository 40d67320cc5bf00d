"""Calls without a packed batch: what transformers would have chosen for the model serves them."""

from __future__ import annotations

import collections
import sys
from typing import Any, cast

import torch
from torch import Tensor, nn

from rlkernel.integrations._replacing import Seen
from rlkernel.integrations.hf.packed_call import refuse

NAMES_THAT_MODELS_KNOW = ("sdpa", "eager")

_defaults: dict[type, str] = {}  # configuration -> what transformers would choose


def ordinary_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *args: Any,
    name: str,
    run: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    if name in NAMES_THAT_MODELS_KNOW:
        attention_mask = _as_for_a_known_name(module, query, key, attention_mask, kwargs)
    seen: Any = module
    if "flash" in name:  # it looks up which flash attention it is
        seen = Seen(module, config=Seen(module.config, _attn_implementation=name))
    if run is None:
        run = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if run is None:
        refuse(module, "its module must define eager_attention_forward for ordinary calls, got none")
    return cast("tuple[Tensor, Tensor | None]", run(seen, query, key, value, attention_mask, *args, **kwargs))


def ordinary_mask(*, ordinary: str | None, makers: dict[str, Any], **kwargs: Any) -> Any:
    config = kwargs["config"]
    make = makers.get(ordinary or default_attention(type(config)))
    if make is None:
        return None
    if getattr(config, "num_kv_shared_layers", 0) and kwargs.get("q_length") != kwargs.get("kv_length"):
        kwargs["allow_is_causal_skip"] = False  # a static cache: see _as_for_a_known_name
    return make(**kwargs)


def default_attention(config: type) -> str:
    if config not in _defaults:
        _defaults[config] = _find_default(config)
    return _defaults[config]


def _find_default(config: type) -> str:
    """What transformers chooses where nobody does: sdpa, or eager code for models that sdpa lacks something
    for (sinks, a softcap). A file may hold models of both kinds; each has a configuration of its own."""
    from transformers import AutoModelForCausalLM, PreTrainedModel

    if config in AutoModelForCausalLM._model_mapping:  # InternLM 3's is for Llama's classes
        return "sdpa" if AutoModelForCausalLM._model_mapping[config]._supports_sdpa else "eager"
    owners = collections.defaultdict(list)
    pending = [PreTrainedModel]
    while pending:
        pending += (found := pending.pop()).__subclasses__()
        owners[found.config_class].append(found)
    known = next((owners[base] for base in config.__mro__ if base in owners), [])
    return "sdpa" if known and all(model._supports_sdpa for model in known) else "eager"


def _as_for_a_known_name(
    module: Any, query: Tensor, key: Tensor, mask: Tensor | None, kwargs: dict[str, Any]
) -> Tensor | None:
    """The mask as a model makes it that finds one of ``NAMES_THAT_MODELS_KNOW`` in its config, not ours."""
    rows, keys = query.shape[2], key.shape[2]
    if (indices := kwargs.get("indices")) is not None:  # of the keys that DeepSeek's indexer selected
        skipped = indices.new_ones((*query.shape[:1], rows, keys), dtype=torch.bool)
        skipped = skipped.scatter(-1, indices.long(), False)[:, None]
        assert mask is not None  # the indexer has read it
        kwargs["indices"] = None
        return (
            mask & ~skipped
            if mask.dtype == torch.bool
            else mask.masked_fill(skipped, torch.finfo(query.dtype).min)
        )
    if (blocks := kwargs.get("block_indices")) is not None:  # of MiniMax-M3's
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(keys - rows, keys, device=query.device)
        positions = positions.expand(len(query), -1)
        return cast(
            Tensor, module.indexer.build_block_mask(blocks, mask, keys, query.dtype, query.device, positions)
        )
    if mask is None and 1 < rows < keys and getattr(module, "is_kv_shared_layer", False):
        # Gemma 4 computes these layers for the last rows alone, and sdpa would take them for the first ones:
        # on "sdpa" it does not do that, here it has.
        return torch.ones(rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)[None, None]
    return mask
