"""What ``patch`` returns."""

from __future__ import annotations

from rlkernel.integrations._parts import Asked, ByParts
from rlkernel.integrations.skyrl.contract import HOMES


class SkyrlPatch(ByParts):
    """See ``ByParts``."""

    def __init__(self, request: Asked) -> None:
        super().__init__(("rlkernel.patch_skyrl", "SkyRL"), __package__, HOMES, request)
