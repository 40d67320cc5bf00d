"""Models on packed attention while a patch is on: what they were on comes back, and goes with copies."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from rlkernel.integrations import hf

NAME = "_attn_implementation_internal"  # the setter of the name without it would set that of all parts


class _Former(NamedTuple):
    config: weakref.ref[Any]
    name: str | None


class Models:
    """Models that were put on packed attention, and the attention that each of their configs named before.

    A deep copy, a pickle or ``torch.save`` of such a model takes the former names along: it can be used when
    the patch is gone, and where rlkernel is not installed.
    """

    def __init__(self) -> None:
        self._former: dict[int, _Former] = {}  # by the id of a config; configs have no hash
        self._reducers: dict[type, tuple[Any, Any]] = {}
        self._doubts: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()

    def doubt(self, model: Any) -> str | None:
        """Why packed batches are not to be trusted to a model: a tiny one shows it, once for each model."""
        if hf.is_sharded(model):
            return None
        found = hf.causal_lm(model)
        if found not in self._doubts:
            self._doubts[found] = next(iter(hf.verify(model)), None)
        return self._doubts[found]

    def attach(self, model: Any) -> None:
        """Put a model on packed attention until ``undo()``; ordinary calls stay what they are."""
        found = hf.causal_lm(model)
        if hf.is_registered(found.config.get_text_config()._attn_implementation):
            return
        former = [(config, vars(config).get(NAME)) for config in _configs(found)]
        hf.use_packed(found)
        for config, name in former:
            if vars(config).get(NAME) != name:
                self._former[id(config)] = _Former(weakref.ref(config), name)
                self._leave_with(type(config))

    def undo(self) -> None:
        """Put back what each config named, but for what somebody has chosen since."""
        for config in [former.config() for former in self._former.values()]:
            if config is not None and hf.is_registered(vars(config).get(NAME)):
                vars(config)[NAME] = self._former[id(config)].name
        self._former.clear()
        for kind, (mine, theirs) in self._reducers.items():
            if copyreg.dispatch_table.get(kind) is mine:
                del copyreg.dispatch_table[kind]
                if theirs is not None:
                    copyreg.dispatch_table[kind] = theirs
        self._reducers.clear()

    def _leave_with(self, kind: type) -> None:
        if kind in self._reducers:
            return
        theirs: Callable[[Any], Any] | None = copyreg.dispatch_table.get(kind)

        def reduced(config: Any) -> Any:
            make, arguments, state, *rest = theirs(config) if theirs else config.__reduce_ex__(4)
            former = self._former.get(id(config))
            if former is not None and former.config() is config and hf.is_registered(state.get(NAME)):
                state = state | {NAME: former.name}
            return (make, arguments, state, *rest)

        copyreg.dispatch_table[kind] = reduced
        self._reducers[kind] = reduced, theirs


def _configs(model: Any) -> Iterator[Any]:
    """All configs that tell a part of a model which attention to run, each once."""
    pending = [module.config for module in model.modules() if hasattr(module, "config")]
    seen: set[int] = set()
    while pending:
        config = pending.pop()
        if id(config) in seen or not hasattr(config, "_attn_implementation"):
            continue
        seen.add(id(config))
        yield config
        pending += [
            x for name in getattr(config, "sub_configs", ()) if (x := getattr(config, name, None)) is not None
        ]
