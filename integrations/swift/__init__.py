"""SWIFT (ms-swift): its trainers of GRPO, DPO, KTO, CPO and ORPO without logits, and its advantages.

SWIFT trains in processes that its command starts, with torchrun or without, which a replacement in another
process does not reach.  So there are two ways in beside ``patch``: ``--external_plugins`` takes the path of
``plugin.py``, which SWIFT imports in each of them; or ``python -m rlkernel.integrations.swift rlhf`` stands
for ``swift rlhf``.  Each part is put in its place when SWIFT imports it.
"""

from rlkernel.integrations.swift.install import patch
from rlkernel.integrations.swift.swift_patch import SwiftPatch

__all__ = ["SwiftPatch", "patch"]
