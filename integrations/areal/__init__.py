"""AReaL: its log-probabilities and entropies, the lm_head of its FSDP engine, and generalised advantages.

AReaL trains in processes that its scheduler starts, each with a command that the configuration names, and has
no plugins.  So the way in is that command: ``python -m rlkernel.integrations.areal MODULE`` runs a module of
AReaL's with rlkernel under it.  Where a script of the user's trains itself, as under ``torchrun``, ``patch``
is all that it needs.  Nothing of AReaL is imported for it: each part is put in its place when AReaL imports
it.
"""

from rlkernel.integrations.areal.areal_patch import ArealPatch
from rlkernel.integrations.areal.install import patch, register

__all__ = ["ArealPatch", "patch", "register"]
