"""``llamafactory-cli`` with rlkernel under it: ``python -m rlkernel.integrations.llamafactory train FILE``.

``LLAMAFACTORY_RLKERNEL`` names the parts, or everything is replaced.
"""

from __future__ import annotations

import os
import sys

from rlkernel.integrations._module import run_module
from rlkernel.integrations.llamafactory import switch
from rlkernel.integrations.llamafactory.install import register


def main(arguments: list[str]) -> None:
    run_module("llamafactory", ["llamafactory.cli", *arguments], _prepare)


def _prepare() -> None:
    os.environ.setdefault(switch.SWITCH, "1")
    register()


if __name__ == "__main__":
    main(sys.argv[1:])
