"""Deterministic inference: a prompt has the bits that its tokens had when they were drawn, so that the
log-probabilities of both are rlkernel's or SGLang's."""

from __future__ import annotations

from sglang.srt.runtime_context import get_exec, get_spec

from rlkernel.integrations.sglang.sglang_patch import SglangPatch
from rlkernel.types import SglangPart


def left(patch: SglangPatch, other: SglangPart) -> str:
    """Why log-probabilities stay SGLang's, where it promises this; ``other`` has those that must agree."""
    try:
        asked, drafts = get_exec().deterministic, get_spec().speculative_algorithm
    except ValueError:  # there is no server
        return ""
    if not asked.enable_deterministic_inference:
        return ""
    if asked.rl_on_policy_target is not None:
        return "rl_on_policy_target, which wants the bits of a trainer's torch"
    if drafts:
        return "deterministic inference with speculative decoding, whose log-probabilities are SGLang's"
    return "" if patch.serves(other) else f"deterministic inference, without the part {other!r}"
