"""Hugging Face transformers: one model serves packed batches, where a group's prompt runs once, and all else.

``register_hf()`` gives transformers an attention implementation. A call with the keyword argument
``prefix_batch`` runs ``prefix_shared_attention``; every other call runs what transformers would have chosen
for the model. So a model is put on it once and for all,

    rlkernel.register_hf()
    model.set_attn_implementation("rlkernel")

and not around a call: gradient checkpointing looks the implementation up again in backward, when the call is
long over. For the same reason the batch travels as an argument, which checkpointing keeps.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from rlkernel.integrations._hf_models import LAYER_TYPES, as_written, causal_lm
from rlkernel.integrations._hf_models import check_model as check_model  # for adapters
from rlkernel.integrations._hf_models import family as family
from rlkernel.integrations._hf_models import is_sharded as is_sharded
from rlkernel.ops.prefix_shared_attention import prefix_shared_attention
from rlkernel.prefix.batch import PrefixBatch

SUPPORTED = ">=5.16,<5.24"  # 5.23 runs in CI; docs/integrations/hf.md tells what 5.16 lacks

# What reaches an attention function and changes nothing that it computes.
IGNORED = frozenset(
    {
        "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "max_length_k", "max_length_q",
        "num_items_in_batch", "output_hidden_states", "output_router_logits", "position_embeddings",
        "position_ids", "return_dict", "seq_idx",
    }
)  # fmt: skip

NAMES_THAT_MODELS_KNOW = ("sdpa", "eager")

# arguments of a model that change its mask or its positions by something else than text
NOT_TEXT = ("audio", "image", "input_features", "pixel_values", "token_type_ids", "video")

OPTIONS = ("dropout", "output_attentions", "s_aux", "scaling", "sliding_window", "softcap", "use_cache")


# name -> the implementation that serves ordinary calls under it, None for what transformers would choose
_registered: dict[str, str | None] = {}

_defaults: dict[type, str] = {}  # configuration -> what transformers would choose
_calls: ContextVar[list[nn.Module] | None] = ContextVar("rlkernel_attention_calls", default=None)
# of a batch: positions that were compared with its own, and at which version
_seen_positions: weakref.WeakKeyDictionary[PrefixBatch, tuple[weakref.ref[Tensor], int | None]] = (
    weakref.WeakKeyDictionary()
)


def register_hf(name: str = "rlkernel") -> str:
    """Register packed attention with transformers under ``name``, and return it.

    A model on it (``attn_implementation=name``) takes ``**batch.model_kwargs()`` of a ``PrefixBatch``, and
    serves ordinary calls, ``generate`` among them, as it would by default: on sdpa, or on its own eager code
    where sdpa lacks what it needs (sinks, a softcap).  ``use_packed`` keeps another implementation for them.
    A second call has no effect.

    Raises:
        ImportError: transformers is not installed, or its version is not supported.
        ValueError: ``name`` means something else to transformers already.
    """
    if not isinstance(name, str) or not name.isidentifier() or "flash" in name or "sdpa" in name:
        raise ValueError(f"name must be an identifier without 'flash' or 'sdpa' in it, got {name!r}")
    _register(name, None)
    return name


def _register(name: str, ordinary: str | None) -> None:
    attention, masks = _interfaces()
    if name in _registered:
        return
    if name == "eager" or name in attention._global_mapping or name in masks._global_mapping:
        raise ValueError(f"name must be free, got {name!r}, another attention of transformers")
    # with transformers' tables at hand, which torch.compile reads, and not the way to them
    functions, makers = attention._global_mapping, masks._global_mapping
    attention.register(name, functools.partial(_attention, ordinary=ordinary, functions=functions))
    masks.register(name, functools.partial(_mask, ordinary=ordinary, makers=makers))
    _registered[name] = ordinary


def is_registered(implementation: str | None) -> bool:
    """Whether a model on this ``config._attn_implementation`` takes packed batches."""
    return implementation in _registered


def use_packed(model: nn.Module, name: str = "rlkernel") -> Any:
    """Put a model on packed attention, its ordinary calls on what it is on now; returns that.

    ``model.set_attn_implementation(<that>)`` takes it back. The language model alone is put on it: towers for
    images and sounds stay on what they are on. A copy of the model, and what ``torch.save`` makes of it, is
    on what the model was on before.
    """
    found = causal_lm(model)
    former: str = found.config.get_text_config()._attn_implementation
    if is_registered(former):
        return _of_the_text(found, former)
    register_hf(name)
    if former != _default(type(found.config.get_text_config())):
        # transformers acts upon some words in a name
        suffix = former.replace("flash_attention_", "fa").replace("flash", "fa").replace("/", ".")
        name = f"{name}|{suffix}"
        _register(name, former)
    found.set_attn_implementation(_of_the_text(found, _Name(name, former)))
    return _of_the_text(found, former)


def verify(model: nn.Module) -> list[str]:
    """Why a model's packed logits are not those of its samples alone; empty when they are.

    Runs six samples of a few tokens, each alone on the model's own attention, and then packed. So it finds
    what ``check_model`` does not know: modules that mix tokens of neighbouring rows, attention that is not
    the registered one, code that packed batches break. It sees no window and no limit longer than its
    samples, and in bf16 nothing that is small against bf16's rounding.

    The model is put into evaluation mode for it, and left as it was, on the attention that it was on. It is
    called without what wraps it (DDP, PEFT), so that ranks need not agree.

    Raises:
        ValueError: the model is sharded (FSDP, ZeRO-3), whose passes have to follow a plan of all ranks.
    """
    from rlkernel.integrations._hf_verify import found_by_running

    return found_by_running(model)


@contextlib.contextmanager
def on_its_own(model: Any) -> Iterator[None]:
    """Inside, a model on packed attention is on the one that serves its ordinary calls."""
    text = model.config.get_text_config()
    former = text._attn_implementation
    model.set_attn_implementation(_of_the_text(model, _registered[former] or _default(type(text))))
    try:
        yield
    finally:
        model.set_attn_implementation(_of_the_text(model, former))


def _of_the_text(model: Any, implementation: str) -> Any:
    """What ``set_attn_implementation`` takes to change a model's language model, and no tower beside it."""
    path = _path(model.config, model.config.get_text_config())
    if not path:
        return {"": implementation} if getattr(model.config, "sub_configs", {}) else implementation
    result: Any = implementation
    for name in reversed(path):
        result = {name: result}
    return result


def _path(config: Any, wanted: Any) -> list[str] | None:
    """The attributes that lead from a configuration to one inside of it."""
    if config is wanted:
        return []
    for name in getattr(config, "sub_configs", {}):
        part = getattr(config, name, None)
        if part is not None and (rest := _path(part, wanted)) is not None:
            return [name, *rest]
    return None


class _Name(str):
    """A name of packed attention in a config, whose copies are the name of what was there before."""

    former: str

    def __new__(cls, name: str, former: str) -> _Name:
        result = super().__new__(cls, name)
        result.former = former
        return result

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (self.former,)


@functools.cache
def _interfaces() -> tuple[Any, Any]:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"rlkernel.register_hf() needs pip install 'transformers{SUPPORTED}'") from error
    from packaging.specifiers import SpecifierSet  # transformers depends on it

    if not SpecifierSet(SUPPORTED).contains(transformers.__version__, prereleases=True):
        raise ImportError(f"the version of transformers must be {SUPPORTED}, got {transformers.__version__}")
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface


# the attention function


def _attention(
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
        ordinary = ordinary or _default(type(module.config))
        run = functions.get(ordinary)
        return _ordinary(module, query, key, value, attention_mask, *args, name=ordinary, run=run, **kwargs)
    _check_call(module, query, key, attention_mask, prefix_batch, args, kwargs)
    calls = _calls.get()
    if calls is not None and not torch.compiler.is_compiling():
        calls.append(module)
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(query.device.type)  # as autocast does for sdpa
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    out = prefix_shared_attention(
        q,
        k,
        v,
        prefix_batch,
        scale=query.shape[-1] ** -0.5 if (scale := kwargs.get("scaling")) is None else scale,
        softcap=kwargs.get("softcap"),
        window=kwargs.get("sliding_window"),
        sinks=kwargs.get("s_aux"),
    )
    assert isinstance(out, Tensor)
    return out[None], None


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    batch: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    if not isinstance(batch, PrefixBatch):
        _refuse(module, f"prefix_batch must be a PrefixBatch, got {type(batch).__name__}")
    if args:
        _refuse(module, f"attention options must be given by name, got {len(args)} by position")
    if query.shape[0] != 1:
        _refuse(
            module, f"input_ids must be the batch's, of shape (1, {batch.total}), got {query.shape[0]} rows"
        )
    if query.shape[2] != batch.total:
        _refuse(module, f"input_ids must have the batch's {batch.total} tokens, got {query.shape[2]}")
    if key.shape[2] != batch.total:
        _refuse(
            module,
            f"keys must be the batch's own {batch.total} rows, got {key.shape[2]}: there is no cache and no "
            "cross-attention in a packed batch",
        )
    if mask is not None and mask.shape[:3] != (1, 1, 1):
        _refuse(module, f"attention_mask must be the batch's stand-in, got one of shape {tuple(mask.shape)}")
    if kwargs.get("use_cache"):
        _refuse(module, "use_cache must be False for a packed batch, got True")
    if kwargs.get("output_attentions"):
        _refuse(module, "output_attentions must be False for a packed batch, got True")
    if kwargs.get("dropout"):
        _refuse(module, f"attention dropout must be 0 in training, got {kwargs['dropout']}")
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        _refuse(module, "attention must be causal, got is_causal=False")
    other = set(_config_layer_types(module)) - set(LAYER_TYPES)
    if other:
        _refuse(module, f"layer_types must be {' or '.join(LAYER_TYPES)}, got {', '.join(sorted(other))}")
    layer_type = _layer_type(module)
    window = kwargs.get("sliding_window")
    if layer_type is not None and (layer_type == "sliding_attention") != (window is not None):
        _refuse(
            module, f"sliding_window must be given to sliding_attention only, got {window} in {layer_type}"
        )
    for name, value in kwargs.items():
        if name not in OPTIONS and name not in IGNORED and value is not None:
            _refuse(module, f"{name} must be None, got {type(value).__name__}: its effect is not known")
    if not _are_positions(kwargs.get("position_ids"), batch):
        _refuse(module, "position_ids must be the batch's, got others")
    first = not getattr(module, "layer_idx", 0) and not torch.compiler.is_compiling()
    if first and (given := _given_beside_text()):
        _refuse(module, f"{given} must be None for a packed batch: its mask is of text alone")


def _are_positions(found: Tensor | None, batch: PrefixBatch) -> bool:
    want = batch.position_ids
    if found is None or found is want or torch.compiler.is_compiling():
        return True
    version = None if found.is_inference() else found._version  # counts changes in place
    seen, seen_version = _seen_positions.get(batch, (None, None))
    if seen is not None and seen() is found and version is not None and seen_version == version:
        return True
    if found.shape[-1:] != want.shape[-1:] or not bool((found.to(want.device) == want).all()):
        return False
    _seen_positions[batch] = (
        weakref.ref(found),
        version,
    )  # the comparison waits for the GPU: once, not in every layer
    return True


def _given_beside_text() -> str | None:
    """The argument by which the model that is running was given images, sounds or other tokens than text.

    A model with images makes its own mask of them, and a packed batch's stand-in takes the place of it. Its
    arguments do not reach the attention; the frames of the call have them.
    """
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if code.co_name == "forward" and any(_is_beside_text(name) for name in names):
            values = frame.f_locals
            for name in filter(_is_beside_text, names):
                value = values.get(name)
                if value is not None and not (name.endswith("token_type_ids") and not bool(value.any())):
                    return name
    return None


def _is_beside_text(name: str) -> bool:
    return any(word in name for word in NOT_TEXT)


def _refuse(module: nn.Module, reason: str) -> NoReturn:
    layer = getattr(module, "layer_idx", None)
    where = type(module).__name__ + ("" if layer is None else f" of layer {layer}")
    raise ValueError(f"{where}: {reason}")


def _config_layer_types(module: nn.Module) -> list[str]:
    return getattr(getattr(module, "config", None), "layer_types", None) or []


def _layer_type(module: nn.Module) -> str | None:
    """What the mask of this layer would have been; None where the model does not say."""
    types, layer = _config_layer_types(module), getattr(module, "layer_idx", None)
    if types:
        return types[layer] if isinstance(layer, int) and layer < len(types) else None
    config: Any = getattr(module, "config", None)
    has_window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    return "sliding_attention" if has_window else None


# ordinary calls


def _ordinary(
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
        seen = _Seen(module, config=_Seen(module.config, _attn_implementation=name))
    if run is None:
        run = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if run is None:
        _refuse(module, "its module must define eager_attention_forward for ordinary calls, got none")
    return cast("tuple[Tensor, Tensor | None]", run(seen, query, key, value, attention_mask, *args, **kwargs))


def _mask(*, ordinary: str | None, makers: dict[str, Any], **kwargs: Any) -> Any:
    config = kwargs["config"]
    make = makers.get(ordinary or _default(type(config)))
    if make is None:
        return None
    if getattr(config, "num_kv_shared_layers", 0) and kwargs.get("q_length") != kwargs.get("kv_length"):
        kwargs["allow_is_causal_skip"] = False  # a static cache: see _as_for_a_known_name
    return make(**kwargs)


def _default(config: type) -> str:
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


class _Seen:
    """An object of which some attributes look different."""

    def __init__(self, target: Any, **changed: Any) -> None:
        self.__dict__.update(changed, _target=target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


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
