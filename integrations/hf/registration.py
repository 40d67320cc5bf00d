"""Packed attention under a name in transformers' tables, and models on it."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from rlkernel.integrations.hf.attention import attention_function
from rlkernel.integrations.hf.models import causal_lm
from rlkernel.integrations.hf.ordinary import default_attention, ordinary_mask

SUPPORTED = ">=5.16,<6"  # docs/integrations/hf.md tells what 5.16 lacks
UNTRIED = ">=5.25.dev0"  # 5.24 runs in CI; of these there is a warning

# name -> the implementation that serves ordinary calls under it, None for what transformers would choose
_registered: dict[str, str | None] = {}


def register_hf(name: str = "rlkernel") -> str:
    """Register packed attention with transformers under ``name``, and return it.

    A model on it (``attn_implementation=name``) takes ``**batch.model_kwargs()`` of a ``PrefixBatch``, and
    serves ordinary calls, ``generate`` among them, as it would by default: on sdpa, or on its own eager code
    where sdpa lacks what it needs (sinks, a softcap).  ``use_packed`` keeps another implementation for them.
    A second call has no effect.

    Raises:
        ImportError: transformers is not installed, or its version is not supported (there is a warning
            of one that has not been run).
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
    attention.register(name, functools.partial(attention_function, ordinary=ordinary, functions=functions))
    masks.register(name, functools.partial(ordinary_mask, ordinary=ordinary, makers=makers))
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
    if former != default_attention(type(found.config.get_text_config())):
        # transformers acts upon some words in a name
        suffix = former.replace("flash_attention_", "fa").replace("flash", "fa").replace("/", ".")
        name = f"{name}|{suffix}"
        _register(name, former)
    found.set_attn_implementation(_of_the_text(found, _Name(name, former)))
    return _of_the_text(found, former)


@contextlib.contextmanager
def on_its_own(model: Any) -> Iterator[None]:
    """Inside, a model on packed attention is on the one that serves its ordinary calls."""
    text = model.config.get_text_config()
    former = text._attn_implementation
    model.set_attn_implementation(_of_the_text(model, _registered[former] or default_attention(type(text))))
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

    found = transformers.__version__
    if not SpecifierSet(SUPPORTED).contains(found, prereleases=True):
        raise ImportError(f"the version of transformers must be {SUPPORTED}, got {found}")
    if SpecifierSet(UNTRIED).contains(found, prereleases=True):
        warnings.warn(
            f"packed attention has not been run with transformers {found} yet: "
            "rlkernel.integrations.hf.verify(model) compares a tiny packed batch with its samples alone",
            stacklevel=5,  # of register_hf, which is called by that of rlkernel
        )
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    return AttentionInterface, AttentionMaskInterface
