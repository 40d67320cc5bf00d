"""OpenRLHF: its log-probabilities and entropies, its actor's head, losses and advantages.

OpenRLHF trains in Ray's actors, or in what DeepSpeed's launcher starts, which a replacement in the driver
does not reach, and it has no plugins.  So there are two ways in beside ``patch``: ``RAY_RUNTIME_ENV_HOOK``
names ``runtime_env``, and Ray does the rest; or ``python -m rlkernel.integrations.openrlhf`` runs a module of
OpenRLHF, with or without Ray.
"""

from rlkernel.integrations.openrlhf.install import patch
from rlkernel.integrations.openrlhf.openrlhf_patch import OpenRlhfPatch
from rlkernel.integrations.openrlhf.processes import in_worker, runtime_env

__all__ = ["OpenRlhfPatch", "in_worker", "patch", "runtime_env"]
