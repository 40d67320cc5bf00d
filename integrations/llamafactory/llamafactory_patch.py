"""What ``patch`` returns."""

from __future__ import annotations

from rlkernel.integrations._parts import Asked, ByParts
from rlkernel.integrations.llamafactory.contract import HOMES


class LlamafactoryPatch(ByParts):
    """See ``ByParts``."""

    def __init__(self, request: Asked) -> None:
        super().__init__(("rlkernel.patch_llamafactory", "LLaMA-Factory"), __package__, HOMES, request)
