"""What ``patch`` returns."""

from __future__ import annotations

from rlkernel.integrations._parts import Asked, ByParts
from rlkernel.integrations.areal.contract import HOMES


class ArealPatch(ByParts):
    """See ``ByParts``."""

    def __init__(self, request: Asked) -> None:
        super().__init__(("rlkernel.patch_areal", "AReaL"), __package__, HOMES, request)
