"""verl: its log-probabilities and entropies, fused head, losses and advantages.

verl trains in Ray's processes, which a replacement in the driver does not reach.  So the way in is verl's:
every process that imports it loads the entry points of ``verl.plugins``, of which ``plugin`` is one.  It does
nothing unless ``VERL_RLKERNEL`` is set, which ``patch`` does; processes that are started afterwards inherit
it.
"""

from rlkernel.integrations.verl.install import patch
from rlkernel.integrations.verl.verl_patch import VerlPatch

__all__ = ["VerlPatch", "patch"]
