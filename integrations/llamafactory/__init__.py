"""LLaMA-Factory: its trainers of preferences and DFT, whose models score tokens and make no logits.

LLaMA-Factory has no plugins, and starts torchrun for several GPUs.  So there are two ways in: ``patch`` in a
script that calls ``run_exp``; or ``python -m rlkernel.integrations.llamafactory`` in the place of
``llamafactory-cli``, which reaches torchrun's processes, too.
"""

from rlkernel.integrations.llamafactory.install import patch, register
from rlkernel.integrations.llamafactory.llamafactory_patch import LlamafactoryPatch

__all__ = ["LlamafactoryPatch", "patch", "register"]
