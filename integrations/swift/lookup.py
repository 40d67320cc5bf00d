"""TRL's helpers of logits where only the fused head is asked for: they look up what was scored."""

from __future__ import annotations

from rlkernel.integrations.swift.logprobs import replace
from rlkernel.integrations.swift.swift_patch import SwiftPatch


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch."""
    replace(patch, computed=False)
