"""The plugin that axolotl loads by name in each of the processes that it launches."""

from __future__ import annotations

import logging
from typing import Any, ClassVar

from axolotl.integrations.base import BasePlugin

from rlkernel.integrations._patch import PatchError
from rlkernel.integrations.axolotl.args import PREFIX, RlkernelArgs
from rlkernel.integrations.axolotl.axolotl_patch import AxolotlPatch
from rlkernel.integrations.axolotl.install import patch

# below "axolotl", of which axolotl shows what is not a warning
logger = logging.getLogger("axolotl.integrations.rlkernel")

NO_RL = "`rl` names no algorithm, and rlkernel serves no other loss"
CONTEXT_PARALLEL = "context_parallel_size splits the tokens of a sequence over ranks"


class RlkernelPlugin(BasePlugin):
    """``rlkernel.patch_axolotl()`` from just before the trainer is made until training ends."""

    patch: ClassVar[AxolotlPatch | None] = None
    """What is in force, or was in the last training.  axolotl makes a plugin for each configuration, and a
    training that failed has not taken its patch off."""

    def register(self, cfg: Any) -> None:
        self.end()

    def get_input_args(self) -> str:
        return "rlkernel.integrations.axolotl.RlkernelArgs"

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """The last that axolotl calls before it makes the trainer, and it adds none.

        ``pre_model_load`` would be too early: axolotl replaces functions of TRL with each model, a reference
        as well.
        """
        self.end()
        options = {name.removeprefix(PREFIX): cfg.get(name) for name in RlkernelArgs.model_fields}
        given = {name: value for name, value in options.items() if value is not None}
        if reason := unserved(cfg):
            if given.get("prefix_sharing") == "require":
                raise PatchError(f"rlkernel_prefix_sharing must not be 'require' here: {reason}")
            logger.warning("rlkernel leaves everything to axolotl: %s", reason)
            return []
        RlkernelPlugin.patch = patch(**given)
        logger.info("%s", self.patch)
        return []

    def post_train(self, cfg: Any, model: Any) -> None:
        self.end()

    def end(self) -> None:
        """Undo what is in force, and log what ran on rlkernel."""
        if self.patch is None or not self.patch.active:
            return
        try:
            self.patch.undo()
        except PatchError as error:  # a training that is over has not failed
            logger.warning("rlkernel stays in place: %s", error)


def unserved(cfg: Any) -> str | None:
    """Why a configuration is left to axolotl."""
    if not cfg.get("rl"):
        return NO_RL
    if (cfg.get("context_parallel_size") or 1) > 1:
        return CONTEXT_PARALLEL
    return None
