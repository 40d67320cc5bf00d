"""Log-probabilities and entropies of logits, by TRL's helpers, which SWIFT's trainers call."""

from __future__ import annotations

import importlib

from rlkernel.integrations import _logit_helpers as ours
from rlkernel.integrations._replacing import shown
from rlkernel.integrations.swift import contract
from rlkernel.integrations.swift.swift_patch import SwiftPatch

HELPERS = (ours.selective_log_softmax, ours.entropy_from_logits)


def plan(patch: SwiftPatch) -> None:
    """Add what is replaced to a patch, in every module of SWIFT and TRL that has imported it by name."""
    replace(patch, computed=True)


def replace(patch: SwiftPatch, computed: bool) -> None:
    """Helpers that look up what was scored already, and that rlkernel computes of other logits, or TRL."""
    home = importlib.import_module(contract.HOMES["logprobs"])
    for helper in HELPERS:
        name = helper.__name__
        with patch.planning(name):
            original = contract.checked(home, name)
            function = ours.helper(helper, original, patch) if computed else original
            new = shown(ours.looked_up_in(name, function), original, "logprob")
            for package in ("trl", "swift"):
                patch.replace_everywhere(package, name, new, expected=original)
