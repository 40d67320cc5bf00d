"""SkyRL: its log-probabilities and entropies, the lm_head of its models, losses and advantages.

SkyRL trains in Ray's processes, which a replacement in the driver does not reach, and it hands none of its
environment on but what it names.  So the way in is Ray's: a job's ``runtime_env`` names a function that each
process of the job calls when it starts, ``plugin.register``, and the variable in which ``ray job submit``
hands such an environment to ``ray.init`` brings it there.  ``patch`` sets that variable.  A process that
starts so imports nothing of SkyRL: each part is put in its place when SkyRL imports it.
"""

from rlkernel.integrations.skyrl.install import patch
from rlkernel.integrations.skyrl.skyrl_patch import SkyrlPatch

__all__ = ["SkyrlPatch", "patch"]
