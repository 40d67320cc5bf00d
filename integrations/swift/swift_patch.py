"""What ``patch`` returns."""

from __future__ import annotations

from rlkernel.integrations._parts import Asked, ByParts
from rlkernel.integrations.swift.contract import FRAMEWORK, HOMES

TRAINERS = ("grpo", "dpo", "kto", "cpo")


class SwiftPatch(ByParts):
    """See ``ByParts``; the fused head is put in place trainer by trainer."""

    def __init__(self, request: Asked) -> None:
        super().__init__(("rlkernel.patch_swift", FRAMEWORK), __package__, HOMES, request)

    def pieces(self) -> tuple[str, ...]:
        found: list[str] = []
        for part in self.parts:
            if part != "fused_head":
                found.append(part)
            elif "logprobs" in self.parts:  # which looks up what was scored, too
                found += TRAINERS
            else:
                found += ("lookup", *TRAINERS)
        return tuple(found)
