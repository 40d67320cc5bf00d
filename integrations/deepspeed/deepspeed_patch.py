"""What ``patch`` returns."""

from __future__ import annotations

from typing import Any

from rlkernel.integrations._counted_patch import CountedPatch


class DeepSpeedPatch(CountedPatch):
    """What ``patch`` returns: undo it, or read what it replaced and which calls went where."""

    def __init__(self, trainer_module: Any) -> None:
        super().__init__("rlkernel.patch_deepspeed", "DeepSpeed")
        self.trainer_module = trainer_module
