"""axolotl: ``plugins: [rlkernel.integrations.axolotl.RlkernelPlugin]`` in its YAML puts rlkernel under its
trainers of GRPO, DPO, IPO and KTO.

These are TRL's with a few methods more, so ``patch_trl()`` serves them.  Its asynchronous trainer of GRPO
scores tokens in methods of its own, which are replaced here.
"""

from __future__ import annotations

from typing import Any

from rlkernel.integrations.axolotl.axolotl_patch import AxolotlPatch
from rlkernel.integrations.axolotl.install import patch

__all__ = ["AxolotlPatch", "RlkernelArgs", "RlkernelPlugin", "patch"]  # noqa: F822  # two of them by __getattr__


def __getattr__(name: str) -> Any:  # what axolotl asks for by name; their bases are axolotl's and pydantic's
    if name == "RlkernelPlugin":
        from rlkernel.integrations.axolotl.plugin import RlkernelPlugin

        return RlkernelPlugin
    if name == "RlkernelArgs":
        from rlkernel.integrations.axolotl.args import RlkernelArgs

        return RlkernelArgs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
