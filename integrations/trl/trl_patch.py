"""What ``patch`` returns."""

from __future__ import annotations

import contextlib

from typing_extensions import Self

import rlkernel
from rlkernel.integrations._counted_patch import CountedPatch
from rlkernel.integrations.trl.distillation import Distillation
from rlkernel.integrations.trl.prefix_sharing import PrefixSharing
from rlkernel.integrations.trl.rollouts import Rollouts
from rlkernel.integrations.trl.support import Support
from rlkernel.integrations.vllm import VllmPatch


class TrlPatch(CountedPatch):
    """What ``patch`` returns: undo it, or read what it replaced and which calls went where."""

    def __init__(self, batch_invariant: bool = False) -> None:
        super().__init__("rlkernel.patch_trl", "TRL")
        self.batch_invariant = batch_invariant
        """Whether trainers compute the very log-probabilities of their rollouts."""
        self._mode = contextlib.ExitStack()
        self.prefix: PrefixSharing | None = None
        """What ``prefix_sharing`` did: ``patch.prefix.tokens``, ``patch.prefix.ratio``."""
        self.rollouts: Rollouts | None = None
        self.support: Support | None = None
        self.distillation: Distillation | None = None

    @property
    def vllm(self) -> VllmPatch | None:
        """The patch of vLLM that a trainer with ``use_vllm`` brought with it, once there is one."""
        return None if self.rollouts is None else self.rollouts.engines

    @property
    def notes(self) -> dict[str, str]:
        return self.rollouts.notes() if self.rollouts else {}

    def require_in_place(self) -> None:
        super().require_in_place()
        if self.rollouts is not None:
            self.rollouts.require_in_place()

    def apply(self) -> Self:
        if not self.active:
            with contextlib.ExitStack() as mode:  # neither stays without the other
                if self.batch_invariant:  # what the mode cannot serve outside of trainers' passes is torch's
                    mode.enter_context(rlkernel.batch_invariant(strict=False))
                super().apply()
                if self.distillation is not None:
                    self.distillation.begin()
                self._mode = mode.pop_all()
        return self

    def undo(self) -> None:
        super().undo()
        if self.distillation is not None:
            self.distillation.end()
        self._mode.close()
        if self.rollouts is not None:
            self.rollouts.undo()
        if self.prefix is not None:
            self.prefix.models.undo()
