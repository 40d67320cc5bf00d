"""Run a module of AReaL with rlkernel under it: ``python -m rlkernel.integrations.areal MODULE ...``.

    actor:
      scheduling_spec:
        - cmd: python -m rlkernel.integrations.areal areal.infra.rpc.rpc_server

``AREAL_RLKERNEL`` names the parts, or everything is replaced.
"""

from __future__ import annotations

import os
import sys

from rlkernel.integrations._module import run_module
from rlkernel.integrations.areal import switch
from rlkernel.integrations.areal.install import register


def main(arguments: list[str]) -> None:
    run_module("areal", arguments, _prepare)


def _prepare() -> None:
    os.environ.setdefault(switch.SWITCH, "1")
    register()


if __name__ == "__main__":
    main(sys.argv[1:])
