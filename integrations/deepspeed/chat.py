"""DeepSpeed-Chat's PPO: logprobs without logits, and its losses and advantages as ops.

Its trainer calls ``engine(...).logits`` and hands slices of that to ``gather_log_probs``.  While it scores,
an engine's stand-in returns a tensor of ``[B, L, 1]`` for the logits, which holds the logprobs already.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.deepspeed.contract import (
    GATHER,
    GATHER_PARAMETERS,
    METHODS,
    TRAINER,
    checked,
    unsupported_dtype,
)
from rlkernel.integrations.deepspeed.deepspeed_patch import DeepSpeedPatch
from rlkernel.integrations.deepspeed.engine_head import EngineHead
from rlkernel.integrations.deepspeed.scores import score
from rlkernel.integrations.hf.models import causal_lm
from rlkernel.ops.gae import gae
from rlkernel.ops.logprob import logprobs_from_logits
from rlkernel.ops.policy_loss import policy_loss
from rlkernel.ops.value_loss import value_loss

SCORED = ("generate_experience", "train_rlhf")  # the methods in which the engines are called for logits
ENGINES = ("actor_model", "ref_model")
# what may become of logits on their way; __get__ is of attributes, as shape, dtype and device
PASSING = ("__getitem__", "__get__", "to", "float", "detach", "contiguous", "as_subclass", "size", "dim")


class Scored(torch.Tensor):
    """Logprobs [B, L, 1] where logits would be; slices and casts of it are of this type too.

    What else a trainer does with logits, an entropy or a softmax of its own, has no answer here.
    """

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name not in PASSING:
            raise ValueError(
                f"{TRAINER} must hand its logits to {GATHER} alone while rlkernel.patch_deepspeed() has its "
                f"module, got {name}() of them"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


def plan(patch: DeepSpeedPatch, module: ModuleType) -> None:
    """Add what is replaced in a trainer's module to a patch."""
    gather = checked(module, GATHER, GATHER_PARAMETERS)
    patch.replace(module, GATHER, _gather(gather, patch), expected=gather)
    trainer = vars(module).get(TRAINER)
    if not isinstance(trainer, type):
        raise PatchError(f"{module.__name__}.{TRAINER} must be a class, got {trainer!r}")
    for name, parameters in METHODS.items():
        original = checked(trainer, name, parameters)
        make = _scoring if name in SCORED else LOSSES[name]
        new = functools.wraps(original)(make(original, patch))
        new.__module__, new.__qualname__ = (
            "rlkernel",
            BY.get(name, "linear_logprob"),
        )  # as a patch shows itself
        patch.replace(trainer, name, new, expected=original)


class Engine:
    """An engine as its trainer sees it, whose call gives logprobs in the place of logits."""

    __slots__ = ("_engine", "_patch")

    def __init__(self, engine: Any, patch: DeepSpeedPatch) -> None:
        object.__setattr__(self, "_engine", engine)
        object.__setattr__(self, "_patch", patch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._engine, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._engine, name)

    def __call__(self, input_ids: Tensor | None = None, **arguments: Any) -> Any:
        if reason := _unable(self._engine, input_ids, arguments):
            self._patch.left(f"{TRAINER}'s logits", reason)
            given = {} if input_ids is None else {"input_ids": input_ids}
            return self._engine(**given, **arguments)
        assert input_ids is not None
        self._patch.count(self._patch.calls, f"{TRAINER}'s logits")
        logprobs = score(self._engine, input_ids, **arguments).logprobs
        # one entry a token, and one behind the last, which the trainer cuts off
        whole = torch.nn.functional.pad(logprobs, (0, 1))[..., None]
        return SimpleNamespace(logits=whole.as_subclass(Scored))


def _unable(engine: Any, input_ids: Tensor | None, arguments: dict[str, Any]) -> str | None:
    if input_ids is None or input_ids.dim() != 2 or input_ids.shape[1] < 2:
        return "input_ids are not [B, L] with L >= 2"
    if arguments.get("labels") is not None:
        return "labels are given"
    if type(engine).__name__ == "DeepSpeedHybridEngine":
        return "the hybrid engine exchanges the layers of its model"
    try:
        head = EngineHead(causal_lm(engine), 1.0, False, False)
    except ValueError as error:
        return str(error)
    return unsupported_dtype(lm_head=head.module.weight)


@contextlib.contextmanager
def _engines(trainer: Any, patch: DeepSpeedPatch) -> Iterator[None]:
    engines = {name: getattr(trainer, name) for name in ENGINES}
    # one of the methods may call another one
    before = {name: engine for name, engine in engines.items() if not isinstance(engine, Engine)}
    instead = {name: Engine(engine, patch) for name, engine in before.items()}
    for name, engine in instead.items():
        setattr(trainer, name, engine)
    try:
        yield
    finally:
        for name, engine in before.items():
            if getattr(trainer, name, None) is instead[name]:  # or else the trainer has another one now
                setattr(trainer, name, engine)


def _scoring(original: Callable[..., Any], patch: DeepSpeedPatch) -> Callable[..., Any]:
    def scoring(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _engines(self, patch):
            return original(self, *args, **kwargs)

    return scoring


def _gather(original: Callable[..., Tensor], patch: DeepSpeedPatch) -> Callable[..., Tensor]:
    def gather_log_probs(logits: Tensor, labels: Tensor) -> Tensor:
        if isinstance(logits, Scored):
            found = logits.as_subclass(torch.Tensor)[..., 0]
            if found.shape != labels.shape:
                raise ValueError(
                    f"labels must be the next tokens, {tuple(found.shape)}, got {tuple(labels.shape)}"
                )
            return found
        if reason := unsupported_dtype(logits=logits):
            patch.left(GATHER, reason)
            return original(logits, labels)
        patch.count(patch.calls, GATHER)
        return logprobs_from_logits(logits, labels)

    gather_log_probs.__module__, gather_log_probs.__qualname__ = "rlkernel", GATHER
    return gather_log_probs


def _actor_loss(original: Callable[..., Tensor], patch: DeepSpeedPatch) -> Callable[..., Tensor]:
    def actor_loss_fn(
        self: Any, logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor
    ) -> Tensor:
        patch.count(patch.calls, "actor_loss_fn")
        return policy_loss(
            logprobs, old_logprobs, advantages, mask, loss_type="ppo", epsilon=self.cliprange
        ).loss

    return actor_loss_fn


def _critic_loss(original: Callable[..., Tensor], patch: DeepSpeedPatch) -> Callable[..., Tensor]:
    def critic_loss_fn(
        self: Any, values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor
    ) -> Tensor:
        patch.count(patch.calls, "critic_loss_fn")
        return value_loss(
            values, returns, mask, old_values=old_values, cliprange_value=self.cliprange_value
        ).loss

    return critic_loss_fn


def _advantages(original: Callable[..., Any], patch: DeepSpeedPatch) -> Callable[..., Any]:
    def get_advantages_and_returns(
        self: Any, values: Tensor, rewards: Tensor, start: int
    ) -> tuple[Tensor, Tensor]:
        patch.count(patch.calls, "get_advantages_and_returns")
        rewards, values = rewards[:, start:], values[:, start : rewards.shape[1]]
        found = gae(rewards, values, gamma=self.gamma, lam=self.lam)
        return found.advantages, found.returns

    return get_advantages_and_returns


LOSSES = {
    "actor_loss_fn": _actor_loss,
    "critic_loss_fn": _critic_loss,
    "get_advantages_and_returns": _advantages,
}
BY = {"actor_loss_fn": "policy_loss", "critic_loss_fn": "value_loss", "get_advantages_and_returns": "gae"}
