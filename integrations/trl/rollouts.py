"""vLLM under TRL's trainers: rlkernel goes under it when a trainer uses it, and leaves with the patch.

The modules of TRL's trainers import vLLM wherever it is installed, whether they use it or not.  So what is
replaced here is in the class that they all inherit, whose module does not: when a trainer with ``use_vllm``
is made, TRL has imported vLLM, and has not made its engine yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rlkernel.integrations import _contract, vllm
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations._patch import ABSENT
from rlkernel.integrations.trl import contract
from rlkernel.integrations.trl.invariant import Invariant
from rlkernel.integrations.vllm import switch

ENGINE = "vLLM"
TOLD = "/server_info"  # a vLLM server lists there the variables of its own that it knows
WITHOUT = "the server runs without rlkernel"
ADVICE = f"start it with {switch.SWITCH}={','.join(switch.DEFAULT)} where rlkernel is installed"


class Rollouts:
    """The part of a ``TrlPatch`` that puts rlkernel under the vLLM of TRL's trainers."""

    def __init__(
        self, patch: CountedPatch, required: bool, room: int = 0, invariant: Invariant | None = None
    ) -> None:
        self.patch = patch
        self.required = required
        self.room = room
        self.invariant = invariant
        self.engines: vllm.VllmPatch | None = None
        """The patch that came with a trainer; None before, and where one was on already."""

    def plan(self) -> None:
        """Raises PatchError where TRL is not what it must be."""
        base = contract.trainer_base()
        original: Any = getattr(base, contract.BEGIN)
        expected = contract.checked(base, contract.BEGIN) if contract.BEGIN in vars(base) else ABSENT
        self.patch.replace(base, contract.BEGIN, _made(original, self), expected=expected)
        self.patch.replace(base, contract.TRAIN, _trained(base, self), expected=ABSENT)

    def prepare(self, trainer: Any) -> None:
        """Put rlkernel under the engine of a trainer, or see whether it is under its server's."""
        if not getattr(trainer.args, "use_vllm", False):
            return
        if getattr(trainer.args, "vllm_mode", "colocate") == "colocate":
            self._put_on()
        elif (client := _client(trainer)) is not None and not runs_rlkernel(client):
            self._left(f"{WITHOUT}, {client.base_url}", ADVICE)

    def _put_on(self) -> None:
        if vllm.VllmPatch.in_place() is not None:
            return
        try:
            engines = self._asked()
        except ImportError:
            return  # TRL says so itself
        self.engines = engines.__enter__()
        for op, reason in engines.refused.items():
            self._left(f"{op}: {reason}")

    def _asked(self) -> vllm.VllmPatch:
        if self.invariant is None:
            return vllm.patch(strict=self.required, return_support=self.room)
        ops = (*switch.DEFAULT, "attention")
        return vllm.patch(ops, strict=True, return_support=self.room, batch_invariant=True)

    def _left(self, reason: str, advice: str = "") -> None:
        self.patch.left(ENGINE, reason, advice, quiet=self.required)
        if self.required:
            raise RuntimeError(f"{ENGINE} must run rlkernel (vllm='require'), got: {reason} ({advice})")

    def require_in_place(self) -> None:
        if self.engines is not None:
            self.engines.require_in_place()

    def undo(self) -> None:
        if self.engines is not None:
            engines, self.engines = self.engines, None
            engines.__exit__(None, None, None)

    def notes(self) -> dict[str, str]:
        """Which vLLM is here, and whether TRL would use it."""
        version = _contract.version("vllm")
        if version is None:
            return {}
        return {f"vLLM {version}": "rlkernel goes under it when a trainer has use_vllm=True"}


def _made(original: Callable[..., None], rollouts: Rollouts) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if rollouts.invariant is not None:
            rollouts.invariant.prepare(self)
        rollouts.prepare(self)

    return __init__


def _trained(base: Any, rollouts: Rollouts) -> Callable[..., Any]:
    @functools.wraps(base.train)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        rollouts.prepare(self)  # a trainer that was made before the patch
        if rollouts.invariant is not None:
            rollouts.invariant.begin(self)
        return super(base, self).train(*args, **kwargs)

    return train


def _client(trainer: Any) -> Any:
    """What talks to the server: of the first rank, once the trainer is made."""
    return getattr(getattr(trainer, "vllm_generation", None), "vllm_client", None)


def runs_rlkernel(client: Any) -> bool:
    """Whether the plugin is on in a server: vLLM then knows the variable that switches it on."""
    answer = client.session.get(client.base_url + TOLD, params={"config_format": "json"})
    return bool(answer.ok and answer.json().get("vllm_env", {}).get(switch.SWITCH))
